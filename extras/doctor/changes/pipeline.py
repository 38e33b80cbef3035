"""Changes of the pipeline: what crosses a boundary between two stages.

The doctor has no pipeline ranks. A message between two of them is the activation that enters a
layer, and the gradient that leaves it in backward: both are changed there. A rank's forwards are
numbered n = d m + k, for microbatch k of data rank d, in the order in which step.py runs them.
"""

from itertools import count

from collectives import WithBackward
from extras.doctor.finding import axes_by_size
from extras.doctor.groups import cut_by_layout
from extras.doctor.step import Change
from schedules import make_schedule, placement


def at_boundary(i, change):
    """change(x, rank, n): what becomes of the activation that enters layer i in a rank's n-th
    forward."""
    def after(model, mesh):
        layer = model.layers[i]
        right = layer.forward
        numbers = count()
        layer.forward = lambda x, *targets: right(change(x, mesh.rank, next(numbers)), *targets)
    return after


def all_of(afters):
    """One `after` of a Change, made of several."""
    def after(model, mesh):
        for change in afters:
            change(model, mesh)
    return after


def scaled(boundaries, forward, backward):
    """Multiply what crosses the boundaries: activations by `forward`, gradients by `backward`."""
    def change(x, rank, n):
        return WithBackward.apply(x, lambda x: forward * x, lambda grad: backward * grad)
    return all_of([at_boundary(i, change) for i in boundaries])


def scale_changes(layout, boundaries):
    words_of = {}  # factor -> words
    for size, axes in axes_by_size(layout, ("microbatches", "dp", "pp", "tp")).items():
        which = " or ".join(axes)
        words_of |= {1 / size: f"divided by {which}", size: f"times {which}"}
    # After the sizes: 2 is "doubled", whichever axes have 2 ranks
    words_of |= {0.5: "halved", 2.0: "doubled", 0.1: "divided by 10", 10.0: "times 10"}
    where = "at each boundary of the pipeline"
    found = []
    for factor, words in words_of.items():
        found += [Change(f"gradients are {words} {where}", after=scaled(boundaries, 1, factor),
                         forward=False),
                  Change(f"activations are {words} {where}", after=scaled(boundaries, factor, 1)),
                  Change(f"activations and gradients are {words} {where}",
                         after=scaled(boundaries, factor, factor))]
    return found


# ---- a message of another microbatch ----


def orders(m):
    """{words: order}. order(k): the microbatch that is taken for microbatch k."""
    return {"the one before": lambda k: (k - 1) % m,
            "the one after": lambda k: (k + 1) % m,
            "the opposite one in order": lambda k: m - 1 - k,
            "the first one": lambda k: 0,
            "the last one": lambda k: m - 1}


def targets_of(order):
    """Feeds the tokens of microbatch k with the targets of order(k)."""
    def feed(ids, targets, k, mesh, positions):
        return ids[k][:, positions], targets[order(k)][:, positions]
    return feed


class Crossing:
    """All activations and gradients that cross a boundary in a step (record_crossing)."""

    def __init__(self, i, m):
        """i: the boundary lies before layer i. m: number of microbatches."""
        self.i = i
        self.m = m
        self.activations = {}  # (rank, n): what enters layer i
        self.gradients = {}  # (rank, n): its gradient

    def record(self, x, rank, n):
        self.activations[rank, n] = x.detach()
        x.register_hook(lambda grad: self.gradients.update({(rank, n): grad}))
        return x

    def other(self, n, order):
        """The number of the forward that is taken for the n-th, of the same data rank."""
        d, k = divmod(n, self.m)
        return d * self.m + order(k)

    def other_activation(self, order):
        def change(x, rank, n):
            other = self.activations[rank, self.other(n, order)]
            return WithBackward.apply(x, lambda x: other, lambda grad: grad)
        return at_boundary(self.i, change)

    def other_gradient(self, order):
        def change(x, rank, n):
            other = self.gradients[rank, self.other(n, order)]
            return WithBackward.apply(x, lambda x: x, lambda grad: other)
        return at_boundary(self.i, change)

    def changes(self):
        found = []
        where = f"at the boundary before layer {self.i} a microbatch gets the"
        for whose, order in orders(self.m).items():
            found.append(Change(f"{where} activation of another microbatch: {whose}",
                                after=self.other_activation(order), by_microbatch=True))
        for whose, order in orders(self.m).items():
            found.append(Change(f"{where} gradient of another microbatch: {whose}",
                                after=self.other_gradient(order), forward=False,
                                by_microbatch=True))
        return found


def record_crossing(step, i, changed=()):
    """The Crossing of the boundary before layer i: runs the step once. changed: what is done to
    other boundaries in this step, each an `after` of a Change; (): the right step."""
    crossing = Crossing(i, step.layout["microbatches"])
    step.run(Change("recorded", after=all_of([at_boundary(i, crossing.record), *changed])))
    return crossing


# ---- activations taken from a stack ----


def newest_in_flight(layout):
    """[{k: k2}] of each stage: the backward of microbatch k meets the activation of microbatch k2,
    the newest one that is in flight there. For two stages of 1F1B and three microbatches:

        stage 0    F0 F1 B0 F2 B1 B2    {0: 1, 1: 2, 2: 0}
        stage 1    F0 B0 F1 B1 F2 B2    {0: 0, 1: 1, 2: 2}
    """
    n_stages = len(placement(layout["schedule"], layout["pp"], layout["chunks"]))
    met = [{} for _ in range(n_stages)]
    in_flight = [[] for _ in range(n_stages)]
    for actions in make_schedule(layout["schedule"], layout["pp"], layout["microbatches"],
                                 layout["chunks"]):
        for kind, s, k in actions:
            if kind == "F":
                in_flight[s].append(k)
            elif kind in ("B", "I"):
                met[s][k] = in_flight[s].pop()
    return met


def stack_change(step, boundaries):
    """The Change of a pipeline in which each stage has a stack of its own for its activations.

    In the backward of microbatch k stage s + 1 sends the gradient of microbatch met[s + 1][k], and
    stage s uses it for microbatch met[s][k]. In the example above stage 0 uses the gradient of
    microbatch 0 for 1, that of 1 for 2, and that of 2 for 0. The last boundary comes first, because
    its gradients are part of those at the boundaries before it."""
    met = newest_in_flight(step.layout)
    changed = []
    for s in reversed(range(len(boundaries))):  # the boundary between stages s and s + 1
        gradient_used = {met[s][k]: met[s + 1][k] for k in met[s]}  # microbatch: whose gradient
        crossing = record_crossing(step, boundaries[s], changed)
        changed.append(crossing.other_gradient(gradient_used.get))
    return Change("each backward meets the activation of the newest microbatch in flight, not of "
                  "its own (pp)", after=all_of(changed), forward=False, by_microbatch=True)


def pipeline_changes(step):
    m = step.layout["microbatches"]
    boundaries = cut_by_layout(step.config, step.layout)
    found = [Change("no gradient goes back over the pipeline's boundaries",
                    after=scaled(boundaries, 1, 0), forward=False)]
    for i in boundaries:
        found.append(Change(f"no gradient goes back over the boundary before layer {i}",
                            after=scaled([i], 1, 0), forward=False))
        if m > 1:
            found += record_crossing(step, i).changes()
    if m > 1:
        found.append(stack_change(step, boundaries))
        for whose, order in orders(m).items():
            found.append(Change(
                f"a microbatch's activation meets the targets of another one: {whose}",
                feed=targets_of(order), by_microbatch=True))
    return found + scale_changes(step.layout, boundaries)
