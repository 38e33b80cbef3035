"""--watch: every message of a step has its line, in an order that any run repeats; and watching
changes nothing."""

import re
from types import SimpleNamespace
from unittest.mock import patch

import pytest
import torch

import train
from collectives import all_reduce
from data.batches import Data
from ddp import DDP
from engine.shared_memory import MESSAGE
from group import wait_all
from run.config import check
from run.watch import Watch, axis_of, tell, ticks
from tests.harness import HERE, VOCAB, config, mesh_of, pool
from tests.runs import Run, command, losses, one_line
from tests.runs import flags as flags_of

ROOT = {"fast": ""}  # trains the root's parts
# Collectives and methods; and the one job that is not a collective, the ring attention's
CARRIERS = ("all_reduce", "reduce_scatter", "all_gather", "all_to_all", "send", "exchange",
            "pass on")


class Counting:
    """Takes the place of a communicator, and counts what is sent."""

    def __init__(self, communicator, sends):
        self.communicator = communicator
        self.sends = sends

    def __getattr__(self, name):
        return getattr(self.communicator, name)

    def send(self, tensors, *args):
        self.sends.append(tensors[0].nbytes)
        return self.communicator.send(tensors, *args)


class CountingSocket:
    """A socket of a link; counts the bytes of the messages that it announces."""

    def __init__(self, socket, sends):
        self.socket, self.sends = socket, sends

    def __getattr__(self, name):
        return getattr(self.socket, name)

    def sendmsg(self, packets, *args):
        sent = self.socket.sendmsg(packets, *args)
        self.sends += [MESSAGE.unpack(packet)[1] for packet in packets]
        return sent


def counted(mesh):
    """Count what the groups of a mesh send, also those that are made later, through gloo and
    through shared memory. Returns a list: the bytes of each message."""
    sends = []
    usual = mesh.communicator

    def communicator(name, ranks):
        made = usual(name, ranks)
        return made and Counting(made, sends)

    mesh.communicator = communicator
    for group in mesh.groups.values():
        group.communicator = group.communicator and Counting(group.communicator, sends)
    if neighbours := getattr(mesh, "neighbours", None):
        connect = neighbours.connect
        neighbours.connect = lambda *args: CountingSocket(connect(*args), sends)
        for group in mesh.groups.values():
            for end in getattr(group, "links", {}).values():
                end.socket = end.socket and CountingSocket(end.socket, sends)
    return sends


def sent_by(mesh):
    return sum(group.bytes_sent for group in mesh.groups.values())


def told(watch, mesh, sends, before):
    """What the tests look at, of one rank."""
    assert type(mesh.world) is mesh.group_class and mesh.group_class.__name__ != "Watched"
    assert not any("exchange" in vars(group) for group in mesh.groups.values())
    found = {"sent": list(watch.sent.values()), "sends": list(sends),
             "bytes_sent": sent_by(mesh) - before, "lanes": list(watch.lanes.values())}
    return {**found, "story": watch.story("all")}  # last, because its text is gathered by messages


def _watched(rank, cfg, in_order=False):
    """The first step of train.py. in_order: in NCCL's manner; torch then wants the communicators
    themselves, so nothing is counted."""
    mesh = mesh_of(cfg, in_order)
    trainer = train.Trainer(cfg, mesh, VOCAB)
    batches = Data(cfg).training(cfg, 0, mesh)
    before = sent_by(mesh)
    sends, watch = [] if in_order else counted(mesh), Watch(mesh)
    with watch.step():
        trainer.step(batches, 0.01)
    return told(watch, mesh, sends, before)


EVERY = [
    {"dp": 2, "tp": 2, "pp": 2, "microbatches": 3},
    {"dp": 3, "zero": 1}, {"dp": 2, "tp": 2, "zero": 2, "microbatches": 2}, {"dp": 2, "zero": 3},
    {"tp": 2, "sp": True, "pp": 2, "recompute": True}, {"cp": 2, "tp": 2},
    {"cp": 4, "cp_attention": "all-to-all"},
    {"dp": 2, "ep": 2, "tp": 2, "experts": 4, "sp": True},
    {"pp": 2, "schedule": "interleaved", "chunks": 2, "microbatches": 4},
    {"pp": 2, "dp": 2, "schedule": "zb-v", "zero": 3, "microbatches": 3},

    {"dp": 2, "zero": 1, "fast": "ddp"}, {"dp": 4, "shard": 2, "zero": 2},
    {**ROOT, "dp": 2, "tp": 2, "pp": 2, "microbatches": 3},
    {**ROOT, "dp": 3, "zero": 1}, {**ROOT, "dp": 2, "zero": 2, "microbatches": 2},
    {**ROOT, "dp": 2, "tp": 3, "zero": 3}, {**ROOT, "cp": 2, "tp": 2, "sp": True},
    {**ROOT, "dp": 4, "ep": 2, "shard": 2, "experts": 4}]


@pytest.mark.parametrize("flags", EVERY, ids=str)
def test_every_message_has_a_line_and_every_send_its_receive(corpus, flags):
    cfg = config(corpus, **{"microbatches": 1, **flags})
    world = check(cfg, 1)
    ranks = pool(world, _watched, cfg)
    lines = [line for line in ranks[0]["story"].splitlines() if " -> " in line]
    assert len(lines) == sum(len(rank["sends"]) for rank in ranks) > 0
    for rank in ranks:
        assert sorted(message.nbytes for message in rank["sent"]) == sorted(rank["sends"])
        assert sum(rank["sends"]) == rank["bytes_sent"]
        for message in rank["sent"]:
            receiver = ranks[message.dst]["lanes"]
            assert any(["awaited", message.key, 1] == [*event] for lane in receiver
                       for event in lane), message
    sums = [line for line in ranks[0]["story"].splitlines() if " messages, " in line]
    number, nbytes = (sum(int(line.split()[i].replace(",", "")) for line in sums) for i in (1, 3))
    assert number == len(lines) and nbytes == sum(rank["bytes_sent"] for rank in ranks)
    # Every line names a collective or a method, a file of this repository and a function in it
    for message in (message for rank in ranks for message in rank["sent"]):
        carrier, file, function = re.fullmatch(r"(.+), (\S+) (\S+)", message.what).groups()
        assert carrier in CARRIERS and (HERE / file).is_relative_to(HERE), message.what
        assert all(re.search(rf"^ *(def|class) {name}\b", (HERE / file).read_text(), re.MULTILINE)
                   for name in function.split(".")), message.what
    if "zero" in flags:  # threads send weights and gradients; the lines come in one order again
        assert pool(world, _watched, cfg)[0]["story"] == ranks[0]["story"]


def test_in_nccls_order_the_same_bytes_are_told(corpus):
    cfg = config(corpus, dp=2, tp=2, microbatches=2)
    in_order, early = (pool(4, _watched, cfg, order) for order in (True, False))
    for rank in in_order:
        assert rank["bytes_sent"] == sum(message.nbytes for message in rank["sent"])
    assert sum(rank["bytes_sent"] for rank in in_order) == sum(rank["bytes_sent"] for rank in early)


def test_a_step_of_the_root_sends_what_the_formulas_say(corpus):
    """The messages and bytes of each axis, of all ranks: the docstrings of ddp.py,
    tensor_parallel.py and pipeline.py."""
    D, T, P, m = 2, 2, 2, 3
    cfg = config(corpus, **ROOT, dp=D, tp=T, pp=P, microbatches=m)
    B, S, C, L = cfg.batch_size // D // m, cfg.block_size, cfg.n_embd, cfg.n_layer
    check(cfg, 1)
    story = pool(D * T * P, _watched, cfg)[0]["story"]
    nbytes = {axis: int(number.replace(",", "")) for axis, number in
              re.findall(r"^([a-z+]+): .* ([\d,]+) bytes$", story, re.MULTILINE)}
    times = {axis: int(number) for axis, number in
             re.findall(r"^([a-z+]+): (\d+) messages", story, re.MULTILINE)}
    assert nbytes.keys() == {"tp", "pp", "dp", "dp+pp+tp"}
    hops = 2 * (2 - 1)  # of an all-reduce over two ranks, each of which sends a message in each hop
    assert times["tp"] == D * m * (4 * L + 2 + 2) * T * hops
    assert times["pp"] == D * T * (m * 2 * (P - 1) + P * hops)
    tensors = T * (12 * L + 5)  # 12 in a block; wte, wpe, ln_f's two, and the head
    assert times["dp"] == tensors * D * hops
    activation = 8 * B * S * C
    all_reduces = (4 * L + 2) * activation + 3 * 8 * B * S  # of a microbatch, in a replica
    assert nbytes["tp"] == D * m * T * 2 * (T - 1) / T * all_reduces
    ends = 2 * D * VOCAB * C * 8  # two stages all-reduce the tied matrix: each sends all of it
    assert nbytes["pp"] == D * T * m * 2 * (P - 1) * activation + ends
    split = 12 * L * C * C + 7 * L * C + 2 * VOCAB * C  # the tied matrix is on two stages
    whole = T * (S * C + (6 * L + 2) * C)
    assert nbytes["dp"] == D * 2 * (D - 1) / D * 8 * (split + whole)
    # Three numbers: the loss, requests to stop, the squared norm. Each is a chunk; five are empty
    assert times["dp+pp+tp"] == 3 * 2 * (D * P * T - 1)
    assert nbytes["dp+pp+tp"] == 8 * times["dp+pp+tp"]


@pytest.mark.parametrize("name,axis", [
    ("tp", "tp"), ("pp_ends", "pp"), ("shard_ep_cp", "dp+cp"), ("shard_cp", "dp+cp"), ("ep", "ep"),
    ("rep", "dp"), ("dp", "dp"), ("world", "dp+pp+cp"), ("pp_cp_tp", "pp+cp")])
def test_the_data_axes_of_the_mesh_are_dp_and_the_ranks_that_share_experts_ep(name, axis):
    sizes = {"rep": 2, "shard": 2, "pp": 2, "ep": 2, "cp": 2, "tp": 2 if axis == "tp" else 1}
    assert axis_of(SimpleNamespace(name=name), sizes) == axis


def _with_a_technique_of_my_own(rank, cfg):
    """Training whose sum over the replicas is a function of this file."""
    def gradients_of_my_own(ddp):
        grads = [param.grad for param in ddp.params]
        for param, grad in zip(ddp.params, grads, strict=True):
            group = param.tag.sum_over[0]
            if grad.dim() == 1:  # of two ranks
                received = torch.empty_like(grad)
                wait_all([group.recv(received, group.prev), group.send(grad, group.next)])
                grad += received
            else:
                all_reduce(grad, group)
            param.grad = None
        return grads

    with patch.object(DDP, "gradients", gradients_of_my_own):
        return _watched(rank, cfg)["story"]


def test_a_technique_of_my_own_is_named_by_its_function(corpus):
    cfg = config(corpus, **ROOT, dp=2, microbatches=1)
    check(cfg, 1)
    story = pool(2, _with_a_technique_of_my_own, cfg)[0]
    # Python 3.10 does not know the function around a function
    around = r"(_with_a_technique_of_my_own\.)?"
    for carrier in ("all_reduce", "send"):
        assert re.search(rf" {carrier}, tests/test_watch.py {around}gradients_of_my_own ", story)


# ---- the order ----


def test_a_message_has_as_many_ticks_as_messages_had_to_arrive_before_it():
    """Rank 0 sends a, and b to rank 1, which waits for it before c; rank 0's job waits for c."""
    rank_0 = [("did", "a", 0), ("did", "job", 0), ("did", "b", 0), ("awaited", "end", 0),
              ("did", "last", 0)]
    job = [("awaited", "job", 0), ("awaited", "c", 1), ("did", "d", 0), ("did", "end", 0)]
    rank_1 = [("awaited", "b", 1), ("did", "c", 0), ("awaited", "d", 1)]
    assert ticks([job, rank_0, rank_1]) == {"a": 0, "job": 0, "b": 0, "c": 1, "d": 2, "end": 2,
                                            "last": 2}
    with pytest.raises(AssertionError, match="an event that no thread has"):
        ticks([job, rank_0])


def test_the_lines_follow_the_schedule(corpus):
    """1F1B on two stages, m = 3: rank 0 sends the activations of F0 F1, and that of F2 when the
    gradient of B0 has come. Rank 1 sends a gradient when it has an activation: B0 and B1 at tick 1,
    because F0 and F1 were both sent at tick 0."""
    cfg = config(corpus, **ROOT, pp=2, microbatches=3)
    check(cfg, 1)
    story = pool(2, _watched, cfg)[0]["story"]
    sends = re.findall(r"^ *(\d+)  (\d -> \d)  pp +send, ", story, re.MULTILINE)
    assert [tick for tick, ranks in sends if ranks == "0 -> 1"] == ["0", "0", "2"]
    assert [tick for tick, ranks in sends if ranks == "1 -> 0"] == ["1", "1", "3"]


# ---- what is asked for ----


def test_one_rank_or_one_axis_is_a_part_of_the_whole(corpus):
    cfg = config(corpus, **ROOT, dp=2, tp=2, pp=2, microbatches=3)
    check(cfg, 1)
    ranks = pool(8, _watched, cfg)
    sent = [message for rank in ranks for message in rank["sent"]]
    tick = {message.key: 0 for message in sent}

    def rows(which):
        return [line.split() for line in tell(sent, tick, which).splitlines() if " -> " in line]

    all_rows = rows("all")
    of_rank = [row for row in all_rows if "3" in (row[1], row[3])]
    assert 0 < len(of_rank) < len(all_rows) and rows("3") == of_rank
    for axis in ("dp", "tp"):
        of_axis = [row for row in all_rows if axis in row[4].split("+")]
        assert 0 < len(of_axis) < len(all_rows) and rows(axis) == of_axis


@pytest.mark.parametrize("words,says", [
    ("--dp 2 --tp 2 --pp 2 --watch 9", "--watch 9 must be a rank, 0 to 7, or an axis"),
    ("--dp 2 --tp 2 --pp 2 --watch xy", "of several ranks: dp pp tp; alone: all messages"),
    ("--dp 2 --watch tp", "--watch tp must be a rank, 0 to 1"),
    ("--watch", "--watch all: one rank sends no messages")])
def test_what_cannot_be_watched_is_refused_in_one_line(words, says, capsys, monkeypatch):
    line = one_line(lambda: train.read_command_line(""), ["train.py", *words.split()], capsys,
                    monkeypatch)
    assert says in line


# ---- nothing changes ----


@pytest.mark.parametrize("layout", [
    {"dp": 2, "zero": 2}, {"dp": 2, "zero": 3, "fast": True},
    {"tp": 2, "sp": True, "fast": True}], ids=str)
def test_losses_have_the_same_bits_when_watched(corpus, tmp_path, layout):
    found = []
    for name in ("alone", "watched"):
        more = {"watch": "1"} if name == "watched" else {}
        argv = flags_of(corpus, tmp_path / name, **layout, **more)
        run = Run(2, argv, tmp_path)
        assert run.wait() == [0, 0], run.read()
        found.append(losses(tmp_path / name / "metrics.jsonl"))
        printed = run.read("stdout")
        assert ("0 -> 1" in printed) == (name == "watched")
    assert found[0] == found[1] and len(found[0]) == 4
    # one step is watched, before its loss is printed
    assert printed.index(" messages, ") < printed.index("step      0") and (
        printed.count("tick") == 1)
    assert (", engine/" in printed) == ("fast" in layout)


def test_without_the_flag_nothing_of_it_is_imported():
    run = command("-c", "import sys, train; print([name for name in sys.modules "
                        "if name == 'run.watch'])")
    assert run.stdout == "[]\n", run.stderr
