"""Finds the layouts of a job on a cluster that fit and are fastest or, within a band, simplest.

All layouts that train.py takes count; those that LEFT_OUT of plan.py names only if given as flags.
Each layout gets a lower bound of its time: no exposed messages, the bubble by its formula. The
layout of the lowest bound is refined: by its ZeRO stage, then by memory and the simulator. So all
count, few are simulated. Beyond rows of equal blocks this is open (Alpa, arXiv 2201.12023)."""

import heapq
import math
from contextlib import suppress
from itertools import product

from planner.costs import Costs
from planner.memory import Layout, activations, memory
from run.config import Config, check_layout
from schedules import SCHEDULES


def as_config(job, named):
    """train.py's flags for a job and the named fields of a layout."""
    model = job.model
    return Config(**named, batch_size=job.batch_size, n_layer=model.n_layer, n_head=model.n_head,
                  n_embd=model.n_embd, block_size=model.block_size, experts=model.n_experts,
                  top_k=model.top_k, dtype="bfloat16",
                  grad_dtype="float32" if job.grad_width > job.width else "same")


def layout_of(cfg):
    """The Layout of train.py's flags."""
    return Layout(*(getattr(cfg, name) for name in Layout._fields))


def departures(layout):
    """{field: value} of a layout, of those that are not plain."""
    plain = Layout()._asdict()
    return {name: value for name, value in layout._asdict().items() if value != plain[name]}


def effort(layout):
    """How much of a layout has to be set up and can go wrong: the axes that split a model, and each
    departure from the plainest schedule, states and activations."""
    return len(departures(layout).keys() - {"dp", "chunks", "microbatches"})


class Search:
    """Layouts of a job on `gpus` devices that have the values of `fixed` ({field: value})."""

    def __init__(self, job, gpus, device, fixed):
        self.job, self.gpus, self.device, self.fixed = job, gpus, device, fixed
        self.costs = Costs(job, device)
        self.fastest = None  # (seconds, layout)
        self.smallest = None  # (bytes, layout) of the smallest that does not fit
        self.misfits = self.slower = 0  # layouts that do not fit; others, most of them pruned

    def options(self, **options):
        """All {field: value}; a fixed field has one value."""
        lists = [[self.fixed[name]] if name in self.fixed else values
                 for name, values in options.items()]
        return [dict(zip(options, values, strict=True)) for values in product(*lists)]

    def axes(self):
        """All {field: value} of dp, tp, pp, cp, ep, sp and cp_attention."""
        divisors = [d for d in range(1, self.gpus + 1) if self.gpus % d == 0]
        experts, S = self.job.model.n_experts, self.job.model.block_size
        for axes in self.options(tp=divisors, pp=divisors, cp=divisors):
            tp, cp = axes["tp"], axes["cp"]
            if (tp > self.device.node and "tp" not in self.fixed
                    or cp > 1 and S // cp < 512 and "cp" not in self.fixed):
                continue
            for more in self.options(dp=[self.gpus // math.prod(axes.values())],
                                     ep=divisors if experts else [1],
                                     sp=[False, True] if tp > 1 else [False],
                                     cp_attention=["ring", "all-to-all"] if cp > 1 else ["ring"]):
                way = {**axes, **more}
                with suppress(ValueError):
                    cfg = as_config(self.job, {**way, "microbatches": 1})
                    if check_layout(cfg, self.gpus) == self.gpus:
                        yield way

    def layouts(self):
        """All, with ZeRO stage 0."""
        L = self.job.model.n_layer
        for axes in self.axes():
            share = self.job.batch_size // axes["dp"]  # sequences of a data rank
            pp, counts = axes["pp"], [share // b for b in range(1, 17) if share % b == 0]
            names = ["1f1b"]
            if pp > 1:  # not GPipe: 1F1B has its bubble, and holds less
                names = [name for name, declared in SCHEDULES.items() if not declared.grows]
            # of many chunks, those that share the blocks evenly
            many = [v for v in range(2, 17) if v <= 8 or L % (v * pp) == 0] if pp > 1 else [1]
            many = [self.fixed.get("chunks")] if "chunks" in self.fixed else many
            for more in self.options(microbatches=counts, schedule=names, recompute=[False, True]):
                m, schedule = more["microbatches"], more["schedule"]
                declared = SCHEDULES[schedule]
                if share % m or declared.in_rounds and m % pp:
                    continue
                for v in [declared.chunks] if declared.chunks else many:
                    if v * pp <= L + 2 and v == self.fixed.get("chunks", v):
                        yield Layout(**axes, **more, chunks=v)

    def fits(self, layout, ranks=None):
        """Do these pipeline ranks (None: all) have enough memory?"""
        need = memory(self.job, layout, ranks)["total"]
        if need > self.device.gb * 1e9:
            self.misfits += 1
            self.smallest = min(self.smallest or (need, layout), (need, layout))
        return need <= self.device.gb * 1e9

    def best(self, top, band=0.0):
        """[(seconds, layout)] of the `top` best (dp, tp, pp, cp, ep, sp), with the best rest: the
        fastest or, with a band, first those of least effort that are at most so much slower."""
        limit, found = -math.inf, {}  # found: (dp, tp, pp, cp, ep, sp) -> (seconds, layout)

        def entry(seconds, kind, layout):
            return effort(layout) if seconds <= limit else math.inf, seconds, kind, layout

        queue = [entry(self.costs.lower_bound(layout), "bound", layout)
                 for layout in self.layouts()]
        heapq.heapify(queue)
        while queue and len(found) < top:
            _, seconds, kind, layout = heapq.heappop(queue)
            if layout[:6] in found:
                self.slower += 1
                continue
            if kind == "bound":
                stages = [0, 1, 2, 3] if layout.dp * layout.cp > 1 else [0]
                if activations(self.job, layout, 0) > self.device.gb * 1e9:
                    stages = stages[-1:]  # of those that do not fit, the one that holds least
                for zero in self.options(zero=stages):
                    staged = layout._replace(**zero)
                    least = seconds + sum(self.costs.data_time(staged))
                    heapq.heappush(queue, entry(least, "with data", staged))
            elif kind == "with data":
                if self.fits(layout, [0, layout.pp - 1]):  # the ends hold most
                    heapq.heappush(queue, entry(self.costs.step_time(layout), "exact", layout))
            elif self.fits(layout):
                if self.fastest is None:
                    self.fastest = seconds, layout
                    if band:  # from here on by effort
                        limit = seconds * (1 + band)
                        queue = [entry(*each) for _, *each in queue]
                        heapq.heapify(queue)
                        heapq.heappush(queue, entry(seconds, kind, layout))
                        continue
                found[layout[:6]] = seconds, layout
        self.slower += len(queue)
        return list(found.values())
