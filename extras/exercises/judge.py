"""Runs an attempt on real processes, and trains a small GPT with it, by train.py.

    attempt      one rank: runs an exercise's judge; sends a Report, whatever happens
    verdict      picks the report to print from those of all ranks
    trains       sets the attempt's functions in the root's modules, trains two steps, compares with
                 one process
"""

import traceback
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import NamedTuple
from unittest.mock import patch

import torch

import train
from collectives import own_chunk
from extras.exercises.board import ENDED, Board, OtherSize, Stuck, WatchedMesh
from group import CommunicationError, Group
from optimizer import learning_rate
from run.config import Config

# Relative to a tensor's norm: float64 has 16 digits, and a sum in another order loses a few
TOLERANCE = 1e-10


class Wrong(Exception):
    """The attempt is wrong. One line: what differs, in plain words."""


class Report(NamedTuple):
    kind: str  # one of KINDS
    line: str  # the line to print; "" if right
    facts: tuple = ()  # lines: figures next to their formulas


# Worst first: verdict() picks one report of the worst kind, because the other ranks' reports may
# follow from it
KINDS = ("not written", "an error", "wrong", "a hang", "a lost message", "right")


def place_of(error):
    """Where an error came from, "FILE, line N": the innermost call in the learner's file; if none
    is there, the innermost call. A line that is no Python has not been called: its error names
    it."""
    if isinstance(error, SyntaxError):
        return f"{Path(error.filename).name}, line {error.lineno}"
    frames = traceback.extract_tb(error.__traceback__)  # outermost call first
    # Names of exercises begin with e01 to e16
    own = [frame for frame in frames if Path(frame.filename).name.startswith(("e0", "e1"))]
    frame = (own or frames)[-1]
    return f"{Path(frame.filename).name}, line {frame.lineno}"


def said_by(error):
    """An exception's text in one line: the first and the last of its lines, and its notes."""
    key = error.args[0] if error.args else None
    try:
        lines = str(error).strip().splitlines() or [""]
    except Exception:  # a class of the learner's
        lines = ["its text cannot be read"]
    if isinstance(key, torch.Tensor):  # a KeyError: its text would be the tensor's numbers
        said = f"the parameter {key.tag.name}" if hasattr(key, "tag") else "a tensor"
    elif isinstance(error, SyntaxError):
        said = error.msg  # its str() has the place once more
    else:
        said = " ... ".join([lines[0], *lines[1:][-1:]])
    return said + "".join(f" ({note})" for note in getattr(error, "__notes__", ()))


@contextmanager
def while_trying(what):
    """Add a note, such as "in step 2", to an exception that is raised inside, Wrong or another."""
    try:
        yield
    except Exception as error:
        error.add_note(what)
        raise


def attempt(rank, judge, forms, board, send):
    """Run an attempt on one rank, and call send(report) with this rank's Report. Returns when no
    rank can go on. judge: Exercise.judge; forms() returns {name: the learner's function or class};
    board: path of a file that only this attempt uses."""
    board = Board(board, rank, torch.distributed.get_world_size())

    def make_mesh(**sizes):
        return WatchedMesh(board, **sizes)

    try:
        report = Report("right", "", tuple(judge(make_mesh, forms())))
    except NotImplementedError:
        report = Report("not written", "the body is still to be written")
    except (Wrong, OtherSize) as error:
        report = Report("wrong", said_by(error))
    except Stuck as error:
        report = Report("a hang", str(error))
    except CommunicationError as error:  # another rank has ended, whose report tells more
        report = Report("a lost message", str(error))
    except BaseException as error:  # also SystemExit and KeyboardInterrupt
        report = Report("an error", f"rank {rank}: {type(error).__name__} in {place_of(error)}: "
                                    + said_by(error))
    # A rank that hangs stays on the board as waiting: the other ranks have to see for what
    if report.kind != "a hang":
        board.write(ENDED)
    send(report)  # before the wait, which does not end if another rank computes forever
    board.wait_for_all()


def verdict(reports):
    """The report to print: the first of the worst kind."""
    return min(reports, key=lambda report: KINDS.index(report.kind))


# ---- comparisons and words that all judges use ----


def same(got, want):
    """Are two tensors or numbers equal, to TOLERANCE? Tensors of different shapes are not."""
    got = torch.as_tensor(got)
    want = torch.as_tensor(want)
    if got.shape != want.shape:
        return False
    error = (got.detach().double() - want.double()).norm().item()
    return error <= TOLERANCE * max(want.double().norm().item(), 1e-3)  # the norm may be 0


def transposed(tensor):
    """A tensor with the same values that is not contiguous."""
    return tensor.mT.contiguous().mT


def factor(got, want):
    """The number k with got = k want; None if there is none, or if k is 1."""
    got, want = got.detach().double().flatten(), want.detach().double().flatten()
    if got.shape != want.shape or not want.any():
        return None
    k = ((got @ want) / (want @ want)).item()
    return k if same(got, k * want) and abs(k - 1) > 1e-9 else None


def in_numbers(k):
    """A factor as text: 0.25 as "1/4", 2.0 as "2", any other with three digits."""
    if k and abs(1 / k - round(1 / k)) < 1e-9 and abs(k) < 1:
        return f"1/{round(1 / k)}"
    return f"{round(k)}" if abs(k - round(k)) < 1e-9 else f"{k:.3g}"


def check_shape(what, got, want):
    if not isinstance(got, torch.Tensor):
        raise Wrong(f"{what} is no tensor: {type(got).__name__} was returned")
    if got.shape != want.shape:
        raise Wrong(f"{what} has shape {[*got.shape]}, and should have {[*want.shape]}")
    if got.dtype != want.dtype:
        raise Wrong(f"{what} is {got.dtype}, and should be {want.dtype}, like the input")


def beside(what, got, formula, value):
    """A line with a figure, `got`, next to the value of its formula. Raises Wrong if they differ.
    what: names the figure."""
    if got != value:
        raise Wrong(f"right, but {what}: {got}, and the formula {formula} says {value}")
    return f"{what}: {got}    formula {formula} = {value}"


# ---- a training with the attempt in it ----


class Alone:
    """The mesh of one process, with the members of Mesh that train.py reads. (A Mesh would have all
    processes of torch.distributed.)"""

    def __init__(self):
        self.device = torch.device("cpu")
        self.rank = 0
        self.world = Group(self, "alone", [0], 0)

    def group(self, *axes):
        return self.world

    def ends(self, axis):
        return self.world

    def place(self, *axes):
        return 0, 1


class RandomTokens:
    """Takes the place of Data (data/batches.py): random tokens, the same for any layout."""

    vocab_size = 21  # not a multiple of 2 or 4, so the tensor ranks' slices differ in length

    def training(self, cfg, step, mesh):
        generator = torch.Generator().manual_seed(step)
        shape = (cfg.batch_size, cfg.block_size + 1)
        tokens = torch.randint(self.vocab_size, shape, generator=generator)
        index, size = mesh.place("dp")
        mine = tokens.chunk(size)[index].chunk(cfg.microbatches)
        # None: the number of a microbatch's first sequence, which only dropout reads
        return [(part[:, :-1], part[:, 1:], None) for part in mine]


def small_config(mesh_sizes, **flags):
    """The Config of a small GPT on a mesh of these sizes, {axis: ranks}."""
    return Config(**{
        "dp": 1, "microbatches": 1, "chunks": 1, "n_layer": 2, "n_head": 4, "n_embd": 8,
        "block_size": 4, "batch_size": 8, "steps": 2, "dtype": "float64", "device": "cpu",
        "lr": 1e-2, "warmup_steps": 1, "grad_clip": 0.2,
        **mesh_sizes, **flags})


class Step(NamedTuple):
    loss: float
    norm: float
    grads: list  # this rank's gradients that the optimizer gets: slices, under ZeRO chunks
    tags: list  # the tag of each gradient


def steps_of(cfg, mesh):
    """Train with train.py's Trainer. Returns a list of Steps."""
    data = RandomTokens()
    trainer = train.Trainer(cfg, mesh, data.vocab_size)
    steps = []
    for number in range(cfg.steps):
        norm, sums = trainer.step(data.training(cfg, number, mesh), learning_rate(cfg, number))
        grads = [grad.clone() for grad in trainer.grads]
        steps.append(Step(sums[0].item(), norm.item(), grads, trainer.reducer.tags))
    return steps


@contextmanager
def placed(places):
    """places: [(owner, name, value)]. Set each owner's attribute `name` to the value, and at the
    end back to what it was."""
    with ExitStack() as stack:
        for owner, name, value in places:
            stack.enter_context(patch.object(owner, name, value))
        yield


def trains(make_mesh, places, sizes, model=None, **flags):
    """Train two steps of a small GPT on a mesh of these sizes, with the attempt in these places
    (placed()). Raise Wrong unless the gradients, norms and losses are those of one process. model:
    flags of the model, {name: value}; flags: others, of the layout. Returns the mesh, and a line
    that says what was compared."""
    model = model or {}
    cfg = small_config(sizes, **model, **flags)
    want = steps_of(small_config({}, **model), Alone())
    mesh = make_mesh(**sizes)
    with placed(places):
        got = steps_of(cfg, mesh)
    layout = " x ".join(f"{axis} {size}" for axis, size in sizes.items())
    layout += ", sp" if cfg.sp else ""
    for number, (mine, alone) in enumerate(zip(got, want, strict=True), start=1):
        full = {tag.name: grad for grad, tag in zip(alone.grads, alone.tags, strict=True)}
        for grad, tag in zip(mine.grads, mine.tags, strict=True):
            part = tag.slice(full[tag.name])
            if cfg.zero:
                part = own_chunk(part.contiguous(), tag.sum_over[0])
            if cfg.fast:  # the engine's gradients are flat
                part = part.flatten()
            if not same(grad, part):
                raise Wrong(f"a training step ({layout}): rank {mesh.rank}, step {number}: "
                            f"the gradient of {tag.name} " + against_alone(grad, part))
        for what in ("norm", "loss"):
            mine_value, value = getattr(mine, what), getattr(alone, what)
            if not same(mine_value, value):
                raise Wrong(f"a training step ({layout}): rank {mesh.rank}, step {number}: the "
                            f"{what} is {mine_value:.6g}, and one process's {value:.6g}")
    return mesh, f"two steps of a small GPT ({layout}): every gradient is one process's, to 1e-10"


def against_alone(got, want):
    """How a gradient differs from one process's."""
    if got.shape != want.shape:
        return f"has shape {[*got.shape]}, and should have {[*want.shape]}"
    k = factor(got, want)
    if k is None:
        return "differs from one process's"
    return f"is {in_numbers(k)} times one process's"
