"""Changes of the pipeline: what crosses a boundary between two stages."""

from itertools import count, product

from collectives import WithBackward
from run.doctor.groups import cut_by_layout
from run.doctor.step import Change


def at_boundary(i, change):
    """change(x, rank, n): what becomes of the activation that enters layer i, in a rank's forward
    number n (which is a microbatch's)."""
    def after(model, mesh):
        layer = model.layers[i]
        right = layer.forward
        numbers = count()
        layer.forward = lambda x, *targets: right(change(x, mesh.rank, next(numbers)), *targets)
    return after


def scaled(boundaries, ahead, back):
    """Multiply what crosses each boundary: activations by `ahead`, gradients by `back`."""
    def change(x, rank, n):
        return WithBackward.apply(x, lambda x: ahead * x, lambda grad: back * grad)

    def after(model, mesh):
        for i in boundaries:
            at_boundary(i, change)(model, mesh)
    return after


def targets_of(order):
    def feed(ids, targets, k, mesh, positions):
        return ids[k][:, positions], targets[order(k)][:, positions]
    return feed


class Crossing:
    """The activations and gradients that cross a boundary in the right step."""

    def __init__(self, step, i):
        self.i = i
        self.x = {}  # (rank, n): activation
        self.grad = {}
        step.run(Change("", after=at_boundary(i, self.record)))

    def record(self, x, rank, n):
        self.x[rank, n] = x.detach()
        x.register_hook(lambda grad: self.grad.update({(rank, n): grad}))
        return x

    def swapped(self, m, order, forward):
        """Another microbatch's activation (forward) or gradient. order(k): whose, of the same data
        rank, microbatch k gets."""
        def change(x, rank, n):
            other = n // m * m + order(n % m)
            if forward:
                return WithBackward.apply(x, lambda x: self.x[rank, other], lambda grad: grad)
            return WithBackward.apply(x, lambda x: x, lambda grad: self.grad[rank, other])
        return at_boundary(self.i, change)


def pipeline_changes(step):
    """What a message between two pipeline ranks may carry in the place of the right one."""
    m = step.layout["microbatches"]
    orders = {"the one before": lambda k: (k - 1) % m, "the one after": lambda k: (k + 1) % m,
              "the opposite one in order": lambda k: m - 1 - k, "the first one": lambda k: 0,
              "the last one": lambda k: m - 1}
    found = []
    boundaries = cut_by_layout(step.config, step.layout)
    found.append(Change("no gradient goes back over the pipeline's boundaries", forward=False,
                        after=scaled(boundaries, 1, 0)))
    for i in boundaries:
        found.append(Change(f"no gradient goes back over the boundary before layer {i}",
                            forward=False, after=scaled([i], 1, 0)))
        crossing = Crossing(step, i)
        for forward, (whose, order) in product((True, False), orders.items() if m > 1 else ()):
            what = "activation" if forward else "gradient"
            found.append(Change(f"at the boundary before layer {i} a microbatch gets the {what} of "
                                f"another microbatch: {whose}", forward=forward,
                                after=crossing.swapped(m, order, forward),
                                by_microbatch=True))
    if m > 1:
        found += [Change(f"a microbatch's activation meets the targets of another one: {whose}",
                         feed=targets_of(order), by_microbatch=True)
                  for whose, order in orders.items()]
    sizes = {1 / m: "divided by the microbatches", m: "times the microbatches"}
    for axis in ("dp", "pp", "tp"):
        size = step.layout[axis]
        sizes |= {1 / size: f"divided by {axis}", size: f"times {axis}"}
    sizes |= {0.5: "halved", 2.0: "doubled", 0.1: "divided by 10", 10.0: "times 10"}
    sizes.pop(1, None)
    for factor, words in sizes.items():
        for name, ways in (("gradients are", (1, factor)), ("activations are", (factor, 1)),
                           ("activations and gradients are", (factor, factor))):
            found.append(Change(f"{name} {words} at each boundary of the pipeline",
                                forward=ways[0] != 1, after=scaled(boundaries, *ways)))
    return found
