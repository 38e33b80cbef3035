"""Races --fast against torch's own parts, and each trick against its absence. Needs torch."""

from run.config import Parser


def bench_flags(description):
    parser = Parser(description)
    parser.add_argument("--quick", action="store_true",
                        help="does it run? small model, two turns per side, rows of up to 4 ranks")
    parser.add_argument("--only", default="", metavar="NAME", help="rows whose name contains it")
    parser.add_argument("--json", metavar="FILE", help="write the figures there")
    parser.add_argument("--gpu", action="store_true", help="only the rows for one GPU")
    return parser
