"""All layouts of a job on a cluster, and those that fit and are fastest.

Each layout gets a lower bound of its time: nothing is waited for, and the bubble is by its formula.
Whatever has the lowest is looked at more closely: first what its ZeRO stage adds, then whether it
fits into memory and what the simulator says. Once the lowest is such a time, nothing can be faster.
So all layouts count, and few are simulated. For models that are not a row of equal blocks, choosing
a partition is an open problem (Alpa, arXiv 2201.12023).
"""

import heapq
import math
from collections import Counter
from itertools import product

from planner.costs import data_time, lower_bound, step_time
from planner.memory import Layout, memory
from schedules import SCHEDULES

GB = 1e9


def divisors(n, most=math.inf):
    return [d for d in range(1, int(min(n, most)) + 1) if n % d == 0]


class Search:
    """All layouts of a job on `gpus` devices that have the values of `fixed` ({field: value})."""

    def __init__(self, job, gpus, device, fixed):
        self.job, self.gpus, self.device, self.fixed = job, gpus, device, fixed
        self.out = Counter()  # why layouts fell out -> how many did
        self.smallest = None  # of those that do not fit: (bytes, layout) of what needs least

    def values(self, name, options):
        return [self.fixed[name]] if name in self.fixed else options

    def axes(self):
        """(dp, tp, pp, cp, ep) that multiply to the devices and divide what they split."""
        model, fixed = self.job.model, self.fixed
        L, S, N = model.n_layer, model.block_size, model.n_experts

        def broken(dp, tp, pp, cp, ep):
            rules = {  # what is printed -> whether it holds
                "--tp must divide --n-head": model.n_head % tp == 0,
                "--tp beyond a node": tp <= self.device.node or "tp" in fixed,
                "--pp must be at most --n-layer": pp <= L,
                "--cp must leave 2 pieces of a sequence": cp == 1 or S % (2 * cp) == 0,
                "--cp with fewer than 512 tokens on a rank": cp == 1 or S // cp >= 512
                    or "cp" in fixed,
                "--dp must divide --batch-size": self.job.batch_size % dp == 0,
                "--ep must divide --dp": dp % ep == 0,
                "--ep x --tp must divide --experts": N % (ep * tp) == 0}
            return next((rule for rule, holds in rules.items() if not holds), None)

        splits = product(*(self.values(axis, divisors(self.gpus)) for axis in ("tp", "pp", "cp")))
        for tp, pp, cp in splits:
            dp, left = divmod(self.gpus, tp * pp * cp)
            if left or not dp or dp != fixed.get("dp", dp):
                continue
            for ep in self.values("ep", divisors(dp) if N else [1]):
                if reason := broken(dp, tp, pp, cp, ep):
                    self.out[reason] += 1
                else:
                    yield dp, tp, pp, cp, ep

    def pipelines(self, pp, m):
        """(schedule, chunks) that exist. GPipe is as fast as 1F1B and holds more: only if named."""
        names = [name for name in SCHEDULES if name != "gpipe"] if pp > 1 else ["1f1b"]
        for schedule in self.values("schedule", names):
            L = self.job.model.n_layer
            several = [v for v in range(2, L // pp + 2) if v <= 8 or L % (v * pp) == 0]
            options = {"interleaved": several if pp > 1 else [1], "zb-v": [2]}
            for chunks in self.values("chunks", options.get(schedule, [1])):
                if chunks != {"interleaved": chunks, "zb-v": 2}.get(schedule, 1):
                    self.out["--chunks does not fit the schedule"] += 1
                elif chunks * pp > L + 2:
                    self.out["--pp x --chunks must be at most --n-layer + 2"] += 1
                elif schedule == "interleaved" and m % pp:
                    self.out["--microbatches must be a multiple of --pp for interleaved"] += 1
                else:
                    yield schedule, chunks

    def layouts(self):
        """All that train.py would take, without their ZeRO stage; microbatches of at most 16
        sequences."""
        job = self.job
        recomputes = ["none", "full"] + ["selective"] * (job.attention == "naive")
        for dp, tp, pp, cp, ep in self.axes():
            share = job.batch_size // dp
            counts = self.values("microbatches", [share // b for b in divisors(share, 16)])
            swaps = ["ring"] + ["all-to-all"] * (cp > 1 and job.model.n_head // tp % cp == 0)
            splits = [False, True] if tp > 1 and job.model.block_size % (cp * tp) == 0 else [False]
            for m in counts:
                if share % m:
                    self.out["--microbatches must divide the sequences of a data rank"] += 1
                    continue
                for (schedule, chunks), sp, recompute, swap in product(
                        self.pipelines(pp, m), self.values("sp", splits),
                        self.values("recompute", recomputes), self.values("cp_attention", swaps)):
                    yield Layout(dp, tp, pp, cp, ep, sp, 0, schedule, chunks, m, recompute, swap)

    def fits(self, layout, ranks=None):
        need = memory(self.job, layout, ranks)["total"]
        if need > self.device.gb * GB:
            self.out["memory"] += 1
            self.smallest = min(self.smallest or (need, layout), (need, layout))
        return need <= self.device.gb * GB

    def best(self, top):
        """[(seconds, layout)] of the `top` best ways to split the devices, best first, each with
        what suits it best."""
        job, device = self.job, self.device
        queue = [(lower_bound(job, layout, device), 0, layout) for layout in self.layouts()]
        heapq.heapify(queue)
        found = {}  # (dp, tp, pp, cp, ep, sp) -> (seconds, layout)
        while queue and len(found) < top:
            seconds, closeness, layout = heapq.heappop(queue)
            way = layout[:6]
            if way in found:
                self.out["slower"] += 1
            elif closeness == 0:  # with gradients' sums, by ZeRO stage
                for zero in self.values("zero", range(4) if layout.dp * layout.cp > 1 else [0]):
                    staged = layout._replace(zero=zero)
                    seconds_staged = seconds + sum(data_time(job, staged, device))
                    heapq.heappush(queue, (seconds_staged, 1, staged))
            elif closeness == 1:  # whether it fits (the ends hold most); simulated
                if self.fits(layout, {0, layout.pp - 1}):
                    heapq.heappush(queue, (step_time(job, layout, device), 2, layout))
            elif self.fits(layout):
                found[way] = seconds, layout
        self.out["slower"] += len(queue)
        self.out = +self.out  # without zeros
        return list(found.values())
