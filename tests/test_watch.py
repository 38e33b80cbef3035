"""--watch: every message of a step has its line, in an order that any run repeats; and watching
changes nothing."""

import re
from types import SimpleNamespace
from unittest.mock import patch

import pytest
import torch

import train
from collectives import Group, all_reduce, wait_all
from data.batches import Data
from ddp import DDP
from run.config import check
from run.watch import Watch, axis_of, tell, ticks
from tests.harness import HERE, VOCAB, config
from tests.pool import pool
from tests.runs import Run, command, one_line
from tests.runs import flags as flags_of
from transport.background import Background

# Collectives, and methods of Group
CARRIERS = ("all_reduce", "reduce_scatter", "all_gather", "all_to_all", "send", "exchange")


class Counting:
    """Takes the place of what carries a group's messages, below Group.exchange, and notes the bytes
    of each message."""

    def __init__(self, carrier, sends):
        self.carrier = carrier
        self.sends = sends

    def __getattr__(self, name):
        return getattr(self.carrier, name)

    def exchange(self, send, *args):
        self.sends += [] if send is None else [send.nbytes]
        return self.carrier.exchange(send, *args)


def _watched(rank, cfg):
    """What the tests look at, of a rank's first step."""
    mesh = train.make_mesh(cfg, cfg.device)
    trainer = train.Trainer(cfg, mesh, VOCAB)
    batches = Data(cfg).training(cfg, 0, mesh)
    carriers, sends = {}, []
    for group in mesh.groups.values():
        carriers[group] = group.carrier
        group.carrier = group.carrier and Counting(group.carrier, sends)
    before = sum(group.bytes_sent for group in mesh.groups.values())
    usual = Group.exchange, Background.start
    watch = Watch(mesh)
    with watch.step():
        trainer.step(batches, 0.01)
    assert (Group.exchange, Background.start) == usual
    found = {"sent": list(watch.sent.values()), "sends": list(sends),
             "bytes_sent": sum(group.bytes_sent for group in mesh.groups.values()) - before,
             "lanes": list(watch.lanes.values())}
    return {**found, "story": watch.story("all")}  # last, because its text is gathered by messages


def watched(corpus, **flags):
    """[what _watched returns] of the ranks."""
    cfg = config(corpus, **{"microbatches": 1, **flags})
    return pool(check(cfg, 1), _watched, cfg)


EVERY = [
    {"dp": 2, "tp": 2, "pp": 2, "microbatches": 3},
    {"dp": 3, "zero": 1}, {"dp": 2, "tp": 2, "zero": 2, "microbatches": 2},
    {"dp": 2, "zero": 3, "microbatches": 2}, {"dp": 4, "shard": 2, "zero": 2},
    {"tp": 2, "sp": True, "pp": 2, "recompute": True, "schedule": "zb-h1", "microbatches": 2},
    {"cp": 2, "tp": 2}, {"cp": 4, "cp_attention": "all-to-all"},
    {"dp": 2, "ep": 2, "tp": 2, "experts": 4, "sp": True},
    {"pp": 2, "schedule": "interleaved", "chunks": 2, "microbatches": 4}]


@pytest.mark.parametrize("flags", EVERY, ids=str)
def test_every_message_has_a_line_and_every_send_its_receive(corpus, flags):
    ranks = watched(corpus, **flags)
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
        assert not file.startswith("transport/"), message.what
        assert all(re.search(rf"^ *(def|class) {name}\b", (HERE / file).read_text(), re.MULTILINE)
                   for name in function.split(".")), message.what
    if "zero" in flags:  # a thread sends weights and gradients; the lines come in one order again
        assert watched(corpus, **flags)[0]["story"] == ranks[0]["story"]


def test_gloo_carries_the_same_messages_as_shared_memory(corpus):
    stories = [watched(corpus, dp=2, zero=3, transport=transport)[0]["story"]
               for transport in ("auto", "gloo")]
    assert stories[0] == stories[1]


def test_the_messages_of_a_thread_are_named_by_who_started_them(corpus):
    """Gradients leave from a function of the background's, weights from all_gather itself."""
    whats = {message.what for message in watched(corpus, dp=2, zero=1)[0]["sent"]}
    assert whats == {"reduce_scatter, zero.py ZeRO1.reduce", "all_gather, zero.py ZeRO1.publish",
                     "all_reduce, train.py Trainer.step"}


def test_a_step_sends_what_the_formulas_say(corpus):
    """The messages and bytes of each axis, of all ranks: the docstrings of ddp.py,
    tensor_parallel.py and pipeline.py."""
    D, T, P, m = 2, 2, 2, 3
    cfg = config(corpus, dp=D, tp=T, pp=P, microbatches=m)
    B, S, C, L = cfg.batch_size // D // m, cfg.block_size, cfg.n_embd, cfg.n_layer
    story = watched(corpus, dp=D, tp=T, pp=P, microbatches=m)[0]["story"]
    nbytes = {axis: int(number.replace(",", "")) for axis, number in
              re.findall(r"^([a-z+]+): .* ([\d,]+) bytes$", story, re.MULTILINE)}
    times = {axis: int(number) for axis, number in
             re.findall(r"^([a-z+]+): (\d+) messages", story, re.MULTILINE)}
    assert nbytes.keys() == {"tp", "pp", "dp", "dp+pp+tp"}
    hops = 1  # of an all-reduce over two ranks, each of which sends a message
    # The loss gathers a number per token; the sum of the targets' logits is one number
    assert times["tp"] == D * m * ((4 * L + 2) * T * hops + T * (T - 1) + T)
    activation = 8 * B * S * C
    assert nbytes["tp"] == D * m * ((4 * L + 2) * T * activation + T * (T - 1) * 8 * B * S + T * 8)
    assert times["pp"] == D * T * (m * 2 * (P - 1) + P * hops)
    ends = 2 * D * VOCAB * C * 8  # two stages all-reduce the tied matrix: each sends all of it
    assert nbytes["pp"] == D * T * m * 2 * (P - 1) * activation + ends
    # One message a layer and hop: L blocks, wpe, ln_f, and on two stages the tied matrix
    assert times["dp"] == (L + 4) * T * D * hops
    split = 12 * L * C * C + 7 * L * C + 2 * VOCAB * C
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
    def reduce_of_my_own(ddp, flat):
        if flat.weights.numel() < 100:  # of two ranks
            received = torch.empty_like(flat.grads)
            group = flat.group
            wait_all([group.recv(received, group.prev), group.send(flat.grads, group.next)])
            flat.grads += received
        else:
            all_reduce(flat.grads, flat.group)

    with patch.object(DDP, "reduce", reduce_of_my_own):
        return _watched(rank, cfg)["story"]


def test_a_technique_of_my_own_is_named_by_its_function(corpus):
    cfg = config(corpus, dp=2, microbatches=1)
    check(cfg, 1)
    story = pool(2, _with_a_technique_of_my_own, cfg)[0]
    # Python 3.10 does not know the function around a function
    around = r"(_with_a_technique_of_my_own\.)?"
    for carrier in ("all_reduce", "send"):
        assert re.search(rf" {carrier}, tests/test_watch.py {around}reduce_of_my_own ", story)


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
    story = watched(corpus, pp=2, microbatches=3)[0]["story"]
    sends = re.findall(r"^ *(\d+)  (\d -> \d)  pp +send, ", story, re.MULTILINE)
    assert [tick for tick, ranks in sends if ranks == "0 -> 1"] == ["0", "0", "2"]
    assert [tick for tick, ranks in sends if ranks == "1 -> 0"] == ["1", "1", "3"]


def test_a_layers_gradients_leave_before_those_of_the_layer_before_it(corpus):
    """DDP: one message a layer and hop, from the head to the embedding, each at its ticks, and the
    number of the norm last."""
    sent = watched(corpus, dp=2)[0]["sent"]
    of_replicas = [message.shape[0] for message in sent if message.what.endswith("DDP.reduce")]
    C, S = 24, 8
    block = 12 * C * C + 13 * C
    layers = [2 * C, block, block, block]  # ln_f, the blocks
    ends = {S * C, VOCAB * C}  # wpe, and the tied matrix: backward reaches its first user last
    assert of_replicas[: len(layers)] == layers
    assert set(of_replicas[len(layers) :]) == ends


# ---- what is asked for ----


def test_one_rank_or_one_axis_is_a_part_of_the_whole(corpus):
    ranks = watched(corpus, dp=2, tp=2, pp=2, microbatches=3)
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


def _weights(rank, cfg, watch):
    """This rank's weights after three steps."""
    mesh = train.make_mesh(cfg, cfg.device)
    trainer = train.Trainer(cfg, mesh, VOCAB)
    for step in range(3):
        batches = Data(cfg).training(cfg, step, mesh)
        if watch and step == 0:
            with Watch(mesh).step():
                trainer.step(batches, 0.01)
        else:
            trainer.step(batches, 0.01)
    return [weights for _, weights in trainer.reducer.whole()]


@pytest.mark.parametrize("flags", [{"dp": 2, "zero": 3, "microbatches": 2},
                                   {"tp": 2, "sp": True, "pp": 2, "microbatches": 3}], ids=str)
def test_weights_have_the_same_bits_when_a_step_was_watched(corpus, flags):
    cfg = config(corpus, **flags)
    world = check(cfg, 1)
    alone, seen = (pool(world, _weights, cfg, watch) for watch in (False, True))
    for mine, other in zip(alone, seen, strict=True):
        assert all(map(torch.equal, mine, other))


def test_a_run_prints_the_messages_of_its_first_step_before_its_loss(corpus, tmp_path):
    run = Run(2, flags_of(corpus, tmp_path / "out", dp=2, zero=2, watch="1"), tmp_path)
    assert run.wait() == [0, 0], run.read()
    printed = run.read("stdout")
    assert "0 -> 1  dp " in printed and printed.count("tick") == 1
    assert printed.index(" messages, ") < printed.index("step      0")


def test_without_the_flag_nothing_of_it_is_imported():
    run = command("-c", "import sys, train; print([name for name in sys.modules "
                        "if name == 'run.watch'])")
    assert run.stdout == "[]\n", run.stderr
