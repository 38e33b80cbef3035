"""Finds the layouts of a job on a cluster that fit and are fastest.

Searched: all that train.py takes, but tp beyond a node, cp with fewer than 512 tokens on a rank and
gpipe only if named (1f1b is as fast and holds less), and at most 16 sequences in a microbatch.

Each layout gets a lower bound of its time: no exposed messages, the bubble by its formula. The
layout with the lowest bound is refined first: by what its ZeRO stage adds, then by memory and the
simulator. Once the lowest time is exact, no other layout is faster: all count, few are simulated.
For models other than a row of equal blocks this is an open problem (Alpa, arXiv 2201.12023).
"""

import heapq
from functools import cache
from itertools import product

from planner.costs import data_time, lower_bound, step_time
from planner.memory import Layout, memory
from run.config import Config, check_layout
from schedules import SCHEDULES, make_schedule

GB = 1e9


def as_config(job, named):
    """train.py's flags for a job and the named fields of a layout."""
    model = job.model
    named = {**named, "recompute": named.get("recompute") == "full"}  # selective: fused attention
    return Config(**named, batch_size=job.batch_size, n_layer=model.n_layer, n_head=model.n_head,
                  n_embd=model.n_embd, block_size=model.block_size, experts=model.n_experts,
                  top_k=model.top_k, dtype="bfloat16",
                  grad_dtype="float32" if job.wide else "same")


def divisors(n):
    return [d for d in range(1, n + 1) if n % d == 0]


def holds(check, *args):
    try:
        check(*args)
    except ValueError:
        return False
    return True


@cache
def schedule_exists(schedule, P, m, v):
    """Asks for one rank's list only: all P lists of all candidates would take minutes."""
    return (holds(make_schedule, schedule, 1, 1, v)
            and holds(SCHEDULES[schedule], P, m, v, 0))


class Search:
    """Layouts of a job on `gpus` devices that have the values of `fixed` ({field: value})."""

    def __init__(self, job, gpus, device, fixed):
        self.job, self.gpus, self.device, self.fixed = job, gpus, device, fixed
        self.smallest = None  # (bytes, layout) of the smallest that does not fit
        self.misfits = self.slower = 0  # layouts that do not fit; slower ones, most of them pruned

    def values(self, name, options):
        return [self.fixed[name]] if name in self.fixed else options

    def axes(self):
        """All {field: value} of dp, tp, pp, cp, ep, sp and cp_attention."""
        splits = product(*(self.values(axis, divisors(self.gpus)) for axis in ("tp", "pp", "cp")))
        for tp, pp, cp in splits:
            dp, left = divmod(self.gpus, tp * pp * cp)
            few_tokens = cp > 1 and self.job.model.block_size // cp < 512
            if (left or not dp or dp != self.fixed.get("dp", dp)
                    or (tp > self.device.node and "tp" not in self.fixed)
                    or (few_tokens and "cp" not in self.fixed)):
                continue
            for ep, sp, swap in product(
                    self.values("ep", divisors(dp) if self.job.model.n_experts else [1]),
                    self.values("sp", [False, True] if tp > 1 else [False]),
                    self.values("cp_attention", ["ring", "all-to-all"] if cp > 1 else ["ring"])):
                axes = {"dp": dp, "tp": tp, "pp": pp, "cp": cp, "ep": ep, "sp": sp,
                        "cp_attention": swap}
                if holds(check_layout, as_config(self.job, {**axes, "microbatches": 1}), self.gpus):
                    yield axes

    def schedules(self, pp, m):
        """All (schedule, chunks)."""
        L = self.job.model.n_layer
        names = [name for name in SCHEDULES if name != "gpipe"] if pp > 1 else ["1f1b"]
        for schedule in self.values("schedule", names):
            options = [2] if schedule == "zb-v" else [1]
            if schedule == "interleaved" and pp > 1:
                options = [v for v in range(2, L + 3) if v <= 8 or L % (v * pp) == 0]
            for chunks in self.values("chunks", options):
                # no stage is empty: embedding, L blocks, head
                if chunks * pp <= L + 2 and schedule_exists(schedule, pp, m, chunks):
                    yield schedule, chunks

    def layouts(self):
        """All, with ZeRO stage 0."""
        recomputes = ["none", "full"] + ["selective"] * (self.job.attention == "naive")
        for axes in self.axes():
            share = self.job.batch_size // axes["dp"]  # sequences of a data rank
            counts = [share // b for b in range(1, 17) if share % b == 0]
            for m in self.values("microbatches", counts):
                if share % m:
                    continue
                for (schedule, chunks), recompute in product(
                        self.schedules(axes["pp"], m), self.values("recompute", recomputes)):
                    yield Layout(**axes, schedule=schedule, chunks=chunks, microbatches=m,
                                 recompute=recompute)

    def fits(self, layout, ranks=None):
        """Do these pipeline ranks (None: all) have enough memory?"""
        need = memory(self.job, layout, ranks)["total"]
        if need > self.device.gb * GB:
            self.misfits += 1
            self.smallest = min(self.smallest or (need, layout), (need, layout))
        return need <= self.device.gb * GB

    def best(self, top):
        """[(seconds, layout)], best first, of the `top` best (dp, tp, pp, cp, ep, sp): each with
        its best schedule, microbatches, ZeRO stage and recompute."""
        job, device = self.job, self.device
        queue = [(lower_bound(job, layout, device), "bound", layout) for layout in self.layouts()]
        heapq.heapify(queue)
        found = {}  # (dp, tp, pp, cp, ep, sp) -> (seconds, layout)
        while queue and len(found) < top:
            seconds, kind, layout = heapq.heappop(queue)
            if layout[:6] in found:
                self.slower += 1
            elif kind == "bound":
                data_ranks = layout.dp * layout.cp
                for zero in self.values("zero", [0, 1, 2, 3] if data_ranks > 1 else [0]):
                    staged = layout._replace(zero=zero)
                    more = sum(data_time(job, staged, device))
                    heapq.heappush(queue, (seconds + more, "bound with data", staged))
            elif kind == "bound with data":
                if self.fits(layout, [0, layout.pp - 1]):  # the ends hold most
                    heapq.heappush(queue, (step_time(job, layout, device), "exact", layout))
            elif self.fits(layout):
                found[layout[:6]] = seconds, layout
        self.slower += len(queue)
        return list(found.values())
