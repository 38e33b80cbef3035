"""Finds the layouts of a job on a cluster that fit: the fastest, and those worth their trouble.

Candidates are all layouts that train.py takes. Two kinds are left out, unless flags name them:
those in NOT_SEARCHED, and second names of a layout (other schedules on one pipeline rank,
interleaved with one chunk, --sp without tensor ranks, all-to-all without context ranks, ZeRO
without replicas). Each candidate gets a lower bound of its time (Costs.lower_bound):
messages between stages take no time, and the bubble is computed by the schedule's formula or,
without a formula, from the shortest wait of rank 0. The layout with the lowest bound is refined
first: by its ZeRO stage, then by memory, then by the simulated schedule. So no layout is
overlooked, and few are simulated. A model whose blocks differ needs another search (Alpa, arXiv
2201.12023)."""

import heapq
import math
from contextlib import suppress
from dataclasses import asdict, fields
from itertools import product

from extras.planner.costs import Costs
from extras.planner.habits import kind_of_layout, price
from extras.planner.memory import Layout, activations, memory
from extras.planner.mixture import splits_experts
from extras.planner.programs import TRAIN_PY, lacks_stage
from run.config import Config, check_layout, check_limits, given, require
from schedules import SCHEDULES
from sizes import LlamaConfig

MOST_ACTIONS = 10**6  # of a schedule, on all ranks
NOT_SEARCHED = """\
tp beyond a node, more than 64 pipeline ranks,
cp with fewer than 512 tokens on a rank, gpipe, more than 8 chunks unless the number of stages
divides the number of blocks, more than 16 chunks, more than 16 sequences in a microbatch,
copies of shards (--shard)"""


def as_config(job, named):
    """train.py's flags for a job and the named fields of a layout."""
    model = job.model
    flags = {f.name for f in fields(Config)}
    sizes = {name: value for name, value in asdict(model).items() if name in flags}
    if isinstance(model, LlamaConfig):
        sizes.update(arch="llama", untied=not model.tied)
    experts = model.n_experts
    # check_layout demands that ep x tp divides the number of experts, because train.py's experts
    # are whole. If the tensor ranks split each expert, only ep has to divide the number. It does
    # if ep x tp divides tp times the number: so pass tp times the number
    if splits_experts(model):
        experts *= named.get("tp", 1)
    return Config(**named, **sizes, batch_size=job.batch_size, experts=experts,
                  dtype="bfloat16", grad_dtype="float32" if job.grad_width > job.width else "same")


def require_few_actions(named):
    """ValueError if the schedule of these fields {name: value} is too long to plan."""
    actions = math.prod(named.get(name) or 1 for name in ("pp", "microbatches", "chunks"))
    require(actions <= MOST_ACTIONS, f"--pp x --microbatches x --chunks = {actions:,} must be at "
            "most a million for a plan")


def settle(cfg, gpus):
    """check_layout() for a layout that has all --gpus: settles a Config's open flags. ValueError,
    in the planner's words, for a wrong layout, and for one of too many actions to plan."""
    check_limits(cfg)
    model_ranks = cfg.tp * cfg.pp * cfg.cp
    ranks = model_ranks * (cfg.dp or max(1, gpus // model_ranks))
    axes = [name for name in ("dp", "tp", "pp", "cp") if getattr(cfg, name)]
    require(ranks == gpus, f"{given(cfg, *axes)}: {ranks} ranks do not match --gpus {gpus}")
    require_few_actions(vars(cfg))
    check_layout(cfg, gpus)


def layout_of(cfg):
    """The Layout of train.py's flags. Shards over all data ranks are shard 0, also where train.py
    has filled in their number."""
    layout = Layout(*(getattr(cfg, name) for name in Layout._fields))
    return layout._replace(shard=0) if layout.shard == layout.dp else layout


def divisors(number):
    return [d for d in range(1, number + 1) if number % d == 0]


def round_batch(batch, gpus):
    """The batch that the most data ranks divide, at most 1/16 from `batch`: a multiple of the
    largest divisor of `gpus` that has one there. On 64 GPUs 127 becomes 128, and 96 stays 96."""
    for ranks in reversed(divisors(gpus)):
        near = max(1, round(batch / ranks)) * ranks
        if 16 * abs(near - batch) <= batch:
            return near


def departures(layout):
    """{field: value} of the fields of a layout that differ from those of one process."""
    plain = Layout()._asdict()
    return {name: value for name, value in layout._asdict().items() if value != plain[name]}


class Search:
    """Layouts of a job on `gpus` devices that have the values of `fixed` ({field: value}), and that
    a program (extras/planner/programs.py) can run."""

    def __init__(self, job, gpus, device, fixed, program=TRAIN_PY):
        self.job = job
        self.gpus = gpus
        self.device = device
        self.fixed = fixed
        self.program = program  # only layouts that this program has
        self.costs = Costs(job, device)
        self.fastest = None  # (seconds, layout)
        self.smallest = None  # (bytes, layout) of the smallest layout that does not fit
        # Layouts that best() does not return are counted; each ZeRO stage is a layout of its own
        self.misfits = 0  # those that do not fit
        self.slower = 0  # all others: pruned by a lower bound, slower, or not worth their trouble

    def options(self, **options):
        """[{field: value}], all combinations. options: {field: its values}; a fixed field has only
        its fixed value."""
        lists = [[self.fixed[name]] if name in self.fixed else values
                 for name, values in options.items()]
        return [dict(zip(options, values, strict=True)) for values in product(*lists)]

    def axes(self):
        """Yields {field: value} of dp, tp, pp, cp, ep, sp and cp_attention: all combinations that
        train.py takes, without NOT_SEARCHED."""
        ranks = divisors(self.gpus)
        experts, S = self.job.model.n_experts, self.job.model.block_size
        for axes in self.options(tp=ranks, pp=ranks, cp=ranks):
            tp, cp = axes["tp"], axes["cp"]
            if self.gpus % (axes["pp"] * tp * cp):
                continue
            # check_layout refuses stages without a layer, too, but only after make_schedule has
            # made the lists of actions of all ranks
            if axes["pp"] > self.job.model.n_layer + 2:
                continue
            if axes["pp"] > 64 and "pp" not in self.fixed:
                continue
            if tp > self.device.node and "tp" not in self.fixed:
                continue
            if cp > 1 and S // cp < 512 and "cp" not in self.fixed:
                continue
            for more in self.options(dp=[self.gpus // math.prod(axes.values())], shard=[0],
                                     ep=ranks if experts else [1],
                                     sp=[False, True] if tp > 1 else [False],
                                     cp_attention=["ring", "all-to-all"] if cp > 1 else ["ring"]):
                split = {**axes, **more}
                with suppress(ValueError):  # check_layout raises it: train.py takes no such layout
                    cfg = as_config(self.job, {**split, "microbatches": 1})
                    if check_layout(cfg, self.gpus) == self.gpus:
                        yield split

    def chunk_counts(self, schedule, pp):
        """The numbers of chunks to try: the schedule's own number, or the value of --chunks. If
        there is neither: 1 on one pipeline rank; on several 2 to 8, and those from 9 to 16 for
        which the number of stages divides the number of blocks."""
        own_number = SCHEDULES[schedule].chunks
        asked = self.fixed.get("chunks")
        if own_number:  # if --chunks asks for another number, this schedule has nothing to try
            return [own_number] if asked in (None, own_number) else []
        if asked:
            return [asked]
        if pp == 1:
            return [1]
        L = self.job.model.n_layer
        return [v for v in range(2, 17) if v <= 8 or L % (v * pp) == 0]

    def layouts(self):
        """Yields all candidates, each with ZeRO stage 0."""
        for axes in self.axes():
            pp = axes["pp"]
            share = self.job.batch_size // axes["dp"]  # sequences of a data rank
            # Numbers of microbatches, such that each has b = 1 .. 16 sequences
            counts = [share // b for b in range(1, 17) if share % b == 0]
            schedules = ["1f1b"]
            if pp > 1:  # without GPipe: 1F1B has the same bubble, and holds less
                schedules = [name for name, declared in SCHEDULES.items() if not declared.grows]
            for more in self.options(microbatches=counts, schedule=schedules,
                                     recompute=[False, True]):
                m, schedule = more["microbatches"], more["schedule"]
                if share % m:  # --microbatches m does not divide this share
                    continue
                if SCHEDULES[schedule].in_rounds and m % pp:
                    continue
                for v in self.chunk_counts(schedule, pp):
                    layout = Layout(**axes, **more, chunks=v)
                    # Each stage needs a layer: a block or an end of the model
                    if v * pp > self.job.model.n_layer + 2:
                        continue
                    if not self.program.lacks(self.job, layout):
                        yield layout

    def fits(self, layout, ranks=None):
        """Do these pipeline ranks (None: all) have enough memory? If not, adds 1 to misfits and
        keeps self.smallest up to date."""
        need = memory(self.job, layout, ranks)["total"]
        if need <= self.device.usable * 1e9:
            return True
        self.misfits += 1
        if self.smallest is None or (need, layout) < self.smallest:
            self.smallest = need, layout
        return False

    def with_zero(self, layout):
        """[Layout]: the layout in each ZeRO stage that the program has for it. If --zero is given,
        this stage is the only one. Without --zero and without replicas stage 0 is the only one,
        because there is nothing to shard."""
        stages = self.program.zero if layout.dp * layout.cp > 1 else [0]
        staged = [layout._replace(**zero) for zero in self.options(zero=stages)]
        return [each for each in staged
                if not self.program.lacks(self.job, each) + lacks_stage(self.program, each)]

    def worth_trying(self, layout):
        """with_zero(layout); [] if the activations of rank 0 alone do not fit."""
        staged = self.with_zero(layout)
        if not staged:
            return []
        # A layout whose rank 0 has no room for its activations does not fit, in any ZeRO stage.
        # next_fit() finds out later whether other layouts fit
        if activations(self.job, layout, 0) <= self.device.usable * 1e9:
            return staged
        # Count the layout in all ZeRO stages. fits() counts it in the last stage, which mostly
        # holds least, and records it in self.smallest if no smaller layout is there
        self.misfits += len(staged) - 1
        self.fits(staged[-1], [0, layout.pp - 1])
        return []

    def next_fit(self, queue, entry, found):
        """(seconds, layout) of the first layout of the queue that fits, with its exact time; None
        if none is left. found: Kinds of layouts (habits.py) to skip. The queue is a heap of
        entry(seconds, precision, layout). A layout that leaves the queue returns to it with more
        precise seconds, until they are exact:

            precision      seconds                                  becomes
            "bound"        lower bound of the pipeline              a "with update" per ZeRO stage
            "with update"  bound + update_time of the ZeRO stage    "exact", if the end ranks fit
            "exact"        simulated pipeline + update_time         the answer, if all ranks fit

        (update_time: data-parallel messages and the optimizer. The end ranks are the first and the
        last of the pipeline)
        """
        while queue:
            _, _, seconds, precision, layout = heapq.heappop(queue)
            if precision == "bound":
                for staged in self.worth_trying(layout):
                    least = seconds + sum(self.costs.update_time(staged))
                    heapq.heappush(queue, entry(least, "with update", staged))
            elif kind_of_layout(layout) in found:
                self.slower += 1
            elif precision == "with update":
                if self.fits(layout, [0, layout.pp - 1]):  # mostly one of these holds most
                    heapq.heappush(queue, entry(self.costs.step_time(layout), "exact", layout))
            elif self.fits(layout):
                return seconds, layout
        return None

    def by_time(self, seconds, precision, layout):
        """An entry of a heap of layouts. Its first two values order the heap: the fastest comes
        first."""
        return 0, seconds, seconds, precision, layout

    def by_price(self, limit):
        """A function like by_time, for another order: layouts that take at most `limit` seconds
        come first, and among them the layout with the least product of time and price."""
        def entry(seconds, precision, layout):
            # A bound stands for all ZeRO stages of its layout. ZeRO-1 has the lowest price of them,
            # so a bound with this price leaves the queue before any stage would
            priced = layout._replace(zero=1) if precision == "bound" else layout
            return seconds > limit, seconds * price(self.job, priced), seconds, precision, layout

        return entry

    def best(self, top, band=0.0):
        """[(seconds, layout)] of the `top` best Kinds of layouts: the best layout of each. Layouts
        that take at most 1 + band times as long as the fastest come before all others."""
        # Find the fastest
        queue = [self.by_time(self.costs.lower_bound(layout), "bound", layout)
                 for layout in self.layouts()]
        heapq.heapify(queue)
        self.fastest = self.next_fit(queue, self.by_time, found={})
        if self.fastest is None:
            return []
        # List the best. Prices change the order of the queue, so make its entries once more. The
        # fastest layout has left the queue: put it back
        seconds, layout = self.fastest
        entry = self.by_price(seconds * (1 + band))
        queue = [entry(*each) for _, _, *each in queue]  # each: seconds, precision, layout
        queue.append(entry(seconds, "exact", layout))
        heapq.heapify(queue)
        found = {}  # Kind -> (seconds, layout)
        while len(found) < top:
            following = self.next_fit(queue, entry, found)
            if following is None:
                break
            found[kind_of_layout(following[1])] = following
        for _, _, _, precision, layout in queue:
            self.slower += len(self.with_zero(layout)) if precision == "bound" else 1
        return list(found.values())

    def at_round_batch(self):
        """(batch, seconds, layout) of the fastest layout for the round_batch() of this job; None if
        the job's own batch is round, or if no layout fits."""
        near = round_batch(self.job.batch_size, self.gpus)
        if near == self.job.batch_size:
            return None
        job = self.job._replace(batch_size=near)
        best = Search(job, self.gpus, self.device, self.fixed, self.program).best(1)
        return (near, *best[0]) if best else None
