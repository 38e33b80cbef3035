"""The plain forms of the root and plain.py, which composes them, equal one process and train.py."""

import itertools

import pytest
import torch

import context_parallel
import engine.pipeline
import plain
import schedules
import train
from collectives import all_gather, own_chunk
from data.batches import Data
from engine.dropout import Dropout
from engine.group import Group as EngineGroup
from engine.mesh import Mesh as EngineMesh
from engine.tensor_parallel import parallelize
from expert_parallel import spread_experts
from experts import kind_of
from group import Group
from mesh import Mesh
from model import ABSENT, build, cross_entropy
from run.config import Config, check
from sequence_parallel import sequence_parallel
from shard import tag_whole
from show.demonstrations import NoReducer
from sizes import GPTConfig, config_of
from tensor_parallel import vocabulary_loss
from tests.harness import (
    STEPS,
    VOCAB,
    _train,
    assemble,
    bare,
    close,
    config,
    equals_one_process,
    pool,
    reference,
    same_model,
)
from tests.runs import PLAIN_SCHEDULES, command, one_line
from tests.runs import flags as flags_of


def mesh_of_root(cfg):
    return Mesh(Group, dp=cfg.dp, pp=cfg.pp, tp=cfg.tp)


# ---- plain.py, in every layout that it has ----


def whole(tensor, tag, zero):
    """(tag, this rank's whole tensor) from this rank's chunk of it, under ZeRO."""
    shape = list(tag.shape)
    shape[tag.dim] = sum(stop - start for start, stop in tag.ranges)
    if zero:
        full = torch.zeros(shape, dtype=tensor.dtype)
        own_chunk(full, tag.sum_over[0]).copy_(tensor)
        tensor = all_gather(full, tag.sum_over[0])
    return bare(tag), tensor.detach().clone().view(shape)


def _plain(rank, cfg):
    """What equals_one_process compares, from the page of plain.py. AdamW is where a step's raw
    gradients and new weights are seen."""
    trace = []
    seen = []

    class Recorded(plain.AdamW):
        def __init__(self, cfg, weights, tags):
            super().__init__(cfg, weights, tags)
            self.tags = tags
            trace.append({"weights": self.all(weights), "agree": True})

        def all(self, tensors):
            return [whole(x, tag, cfg.zero) for x, tag in zip(tensors, self.tags, strict=True)]

        def step(self, grads, norm):
            before = self.all(grads)
            super().step(grads, norm)
            seen.append({"grads": before,
                         "weights": self.all([state.weights for state in self.states])})

    steps = list(plain.training_steps(cfg, mesh_of_root(cfg), Data(cfg), optimizer=Recorded))
    trace += [{"loss": loss, "norm": norm, **more}
              for (loss, norm), more in zip(steps, seen, strict=True)]
    return trace


PAGES = [  # layouts with sizes that do not divide
    {}, {"microbatches": 3}, {"dp": 3}, {"dp": 4}, {"dp": 2, "microbatches": 3},
    {"dp": 3, "zero": 1}, {"dp": 4, "zero": 1, "tp": 2}, {"dp": 3, "zero": 2, "microbatches": 4},
    {"dp": 4, "zero": 2}, {"dp": 3, "zero": 3, "microbatches": 2}, {"dp": 4, "zero": 3},
    {"tp": 2}, {"tp": 3}, {"tp": 4, "microbatches": 2}, {"tp": 3, "dp": 2, "zero": 3},
    {"pp": 2, "microbatches": 3}, {"pp": 3, "microbatches": 4, "schedule": "gpipe"},
    {"pp": 4, "microbatches": 2}, {"pp": 4, "microbatches": 9, "schedule": "gpipe"},
    {"pp": 4, "n_layer": 2, "microbatches": 3},  # one layer for each stage
    {"dp": 2, "pp": 3, "zero": 1, "microbatches": 9},
    {"dp": 2, "tp": 2, "pp": 2, "zero": 1, "microbatches": 6},
    {"dp": 2, "tp": 2, "pp": 2, "zero": 2, "microbatches": 3, "schedule": "gpipe"},
    {"dp": 2, "tp": 2, "pp": 2, "zero": 3, "microbatches": 3}]


@pytest.mark.parametrize("flags", PAGES, ids=str)
def test_plain_py_equals_one_process_and_train_py(corpus, flags):
    """Losses, norms, raw gradients and weights of three steps, to 1e-10; and to 1e-12 where no Adam
    has divided by tiny numbers: losses and norms of all steps, raw gradients of the first."""
    cfg = config(corpus, **{"microbatches": 1, **flags})
    pages, want = equals_one_process(corpus, _plain, **{"microbatches": 1, **flags})
    for name, grad in assemble([page[1]["grads"] for page in pages]).items():
        close(grad, want[1]["grads"][name], name, 1e-12)
    traces = pool(check(cfg, 1), _train, cfg, STEPS, None, ())
    for page, trace in zip(pages, traces, strict=True):
        for step in range(1, STEPS + 1):
            for other in (want[step], trace[step]):
                close(page[step]["loss"], other["loss"], "loss", 1e-12)
                close(page[step]["norm"], other["norm"], "norm", 1e-12)


def _plain_losses(rank, cfg):
    return [loss for loss, _ in plain.training_steps(cfg, mesh_of_root(cfg), Data(cfg))]


def _fast_losses(rank, cfg):
    return [step["loss"] for step in _train(rank, cfg, cfg.steps, None, ())[1:]]


@pytest.mark.parametrize("dtype,bound", [("float32", 1e-5), ("bfloat16", 2**-8)])
@pytest.mark.parametrize("flags", [
    {"tp": 3, "dp": 2, "zero": 3}, {"pp": 2, "dp": 2, "zero": 2, "microbatches": 3}], ids=str)
def test_in_fewer_bits_plain_py_agrees_as_far_as_rounding_allows(corpus, flags, dtype, bound):
    """Eight steps. float32 keeps 24 bits and bfloat16 8: sums are rounded in other places."""
    cfg = config(corpus, **{"microbatches": 1, "dtype": dtype, "steps": 8, "lr": 3e-3, **flags})
    world = check(cfg, 1)
    for mine, other in zip(pool(world, _plain_losses, cfg)[0], pool(world, _fast_losses, cfg)[0],
                           strict=True):
        assert abs(mine - other) <= bound * abs(other)


def test_plain_py_has_train_pys_defaults():
    flags = {name: value for name, value in plain.FLAGS.items()
             if name not in ("dp", "microbatches", "steps")}
    assert flags == {name: getattr(Config(), name) for name in flags}


# ---- what ZeRO's plain stages send and hold ----


WIDE = GPTConfig(VOCAB, block_size=4, n_layer=6, n_head=5, n_embd=65)


def _reducer(rank, D, zero, m):
    """Of a step with m microbatches: (elements sent, peak of the bytes allocated in it, Psi,
    elements of the weights in memory before it)."""
    mesh = Mesh(Group, dp=D)
    group = mesh.group("dp")
    model = build(WIDE, dtype=torch.double)
    psi = sum(param.numel() for param in model.parameters())
    tag_whole(model, group)
    layers = model.layers
    reducer = plain.REDUCERS[zero](layers)
    held = sum(x.untyped_storage().nbytes() // 8 for x in {*model.parameters(), *reducer.params})
    ids = torch.randint(VOCAB, (1, 4), generator=torch.Generator().manual_seed(0))
    with torch.autograd.profiler.profile(profile_memory=True) as profile:
        plain.run_pipeline(layers, mesh.group("pp"), ["F0", "B0"] * m, [(ids, ids, None)] * m,
                           None, 1, torch.double)
    events = profile.kineto_results.events()
    memory = [event.nbytes() for event in events if event.name() == "[memory]"]
    reducer.gradients()
    reducer.publish()
    return group.bytes_sent // 8, max(itertools.accumulate(memory)), psi, held


def test_the_plain_stages_of_zero_send_and_hold_what_their_table_says():
    """The model is wide and its sequences are short, so that weights and gradients outweigh
    activations."""
    D, m = 3, 2
    tied = VOCAB * 65
    block = 12 * 65 * 65 + 13 * 65
    peaks = {}
    for zero in range(4):
        got = pool(D, _reducer, D, zero, m)
        psi = got[0][2]
        # ZeRO-3 sends the tied matrix for each of the two layers that share it
        want = {0: 2 * psi, 1: 2 * psi, 2: (1 + m) * psi, 3: 3 * m * (psi + tied)}[zero]
        assert sum(sent for sent, *_ in got) == (D - 1) * want
        peaks[zero] = max(peak for _, peak, *_ in got) / 8  # elements
        assert sum(held for *_, held in got) == (psi if zero == 3 else D * psi)
    # The peak of stages 0 and 1 has all gradients; of 2 this rank's chunks, and one block's; of 3
    # the block's gathered weights, too
    others = peaks[0] - psi
    assert peaks[1] == peaks[0]
    assert peaks[2] <= others + psi / D + 2 * block
    assert peaks[3] <= others + psi / D + 4 * block
    assert psi / D + 4 * block < psi, "the bound must be able to fail"


# ---- plain forms that plain.py leaves out ----


def _with_forms(rank, cfg):
    """One backward with the root's sequence, context and expert parallelism."""
    sizes = {"dp": cfg.dp // cfg.ep, "ep": cfg.ep, "cp": cfg.cp, "tp": cfg.tp}
    mesh = Mesh(Group, **sizes)
    shape = config_of(cfg, VOCAB)
    model = build(shape, cfg.seed, torch.double, kind_of(shape))
    tag_whole(model, mesh.group("dp", "ep", "cp"))
    attention = {"ring": context_parallel.ring_attention,
                 "all-to-all": context_parallel.all_to_all_attention}[cfg.cp_attention]
    positions = context_parallel.split_sequences(model, mesh.group("cp"), attention)
    if cfg.sp:
        sequence_parallel(model, mesh.group("tp"))
    if cfg.ep > 1:
        spread_experts(model, mesh.group("ep"), mesh.group("dp", "cp"))
    for block in model.layers[1:-1] if cfg.experts else ():
        block.mlp.balance_weight = cfg.balance
    loss = 0.0
    for ids, targets, _ in Data(cfg).training(cfg, 0, mesh):
        part = model(ids[:, positions], targets[:, positions])
        (part / (cfg.batch_size * cfg.block_size)).backward()
        loss += part.item()
    found = []
    for param in model.parameters():
        for group in param.shard.sum_over:
            plain.all_reduce(param.grad, group)
        found.append((bare(param.shard), param.grad))
    return found


@pytest.mark.parametrize("flags", [
    {"tp": 2, "sp": True}, {"tp": 4, "sp": True, "dp": 2}, {"cp": 2}, {"cp": 4, "dp": 2},
    {"cp": 2, "cp_attention": "all-to-all"}, {"cp": 4, "cp_attention": "all-to-all"},
    {"cp": 2, "tp": 2, "sp": True}, {"dp": 2, "ep": 2, "experts": 4}, {"dp": 4, "ep": 2,
                                                                      "experts": 6, "top_k": 3},
    {"dp": 4, "ep": 4, "experts": 8, "top_k": 1}], ids=str)
def test_plain_sequence_context_and_expert_parallelism_equal_one_process(corpus, flags):
    cfg = config(corpus, **{"microbatches": 3, **flags})
    got = assemble(pool(check(cfg, 1), _with_forms, cfg))
    want = reference(corpus, **same_model(cfg))[1]["grads"]
    assert got.keys() == want.keys()
    for name, value in want.items():
        close(got[name], value, name)


def _vocabulary_loss(rank, dtype):
    """(loss, gradient of this rank's logits) of 2 x 5 tokens, one of them padding."""
    generator = torch.Generator().manual_seed(0)
    logits = (9 * torch.randn(2, 5, VOCAB, generator=generator)).to(dtype)
    targets = torch.randint(VOCAB, (2, 5), generator=generator)
    targets[1, 3] = ABSENT
    group = Mesh(Group, tp=3).group("tp")
    words = (23 * rank, min(VOCAB, 23 * rank + 23))
    alone = logits.clone().requires_grad_()
    cross_entropy(alone, targets).backward()
    mine = logits[..., slice(*words)].clone().requires_grad_()
    loss = vocabulary_loss(mine, targets, words, group)
    loss.backward()
    return loss.detach(), cross_entropy(logits, targets), mine.grad, alone.grad[..., slice(*words)]


@pytest.mark.parametrize("dtype,bound", [(torch.double, 1e-14), (torch.bfloat16, 2e-7)])
def test_the_plain_vocabulary_loss_counts_no_padding_and_sums_in_32_bits(dtype, bound):
    """In bfloat16 the loss keeps 24 bits, like cross_entropy's; gradients are rounded to 8."""
    for loss, want, grad, whole_grad in pool(3, _vocabulary_loss, dtype):
        assert loss.dtype == torch.promote_types(dtype, torch.float)
        close(loss, want, "loss", bound)
        close(grad, whole_grad, "gradient", bound if dtype == torch.double else 2**-8)
        assert grad[1, 3].eq(0).all()


# ---- the engine's pipeline, with stages that the project does not have ----


class _Adds(engine.pipeline.Stage):
    """A stage before the last that has something to add to the loss."""

    def forward(self, x, targets):
        y, loss = super().forward(x, targets)
        return (y, y.square().sum()) if loss is None else (y, loss)


PLAIN_SHAPE = GPTConfig(VOCAB, block_size=8, n_layer=4, n_head=2, n_embd=12)


def _adding_pipeline(rank, P, m, name):
    """A pipeline's gradients against one process's; all stages add to the loss."""
    mesh = EngineMesh(pp=P)
    rows = torch.randint(VOCAB, (m, 1, 8), generator=torch.Generator().manual_seed(0))
    group = mesh.group("pp")
    batches, tokens = [(ids, ids, None) for ids in rows], rows.numel()
    alone, mine = (build(PLAIN_SHAPE, dtype=torch.double) for _ in range(2))
    cuts = schedules.cut(PLAIN_SHAPE.layer_costs(), P)
    total = 0.0
    for ids, targets, _ in batches:
        x = ids
        for a, b in cuts:
            x, loss = _Adds(alone.layers[a:b])(x, targets)
            total = total + (0.0 if loss is None else loss / tokens)
    total.backward()
    a, b = cuts[rank]
    deferred, where = engine.pipeline.Deferred(), schedules.placement(name, P)
    tag_whole(mine, group)
    parallelize(mine, EngineGroup(mesh, "solo", [0], 0), defer=deferred.add)
    lists = engine.pipeline.make_schedule(name, P, m)
    actions = engine.pipeline.lower(lists, where)[rank]
    pipe = engine.pipeline.Pipeline({rank: _Adds(mine.layers[a:b])}, where, group, (1, 8, 12),
                                    torch.double, NoReducer(), deferred, Dropout())
    loss = pipe.execute(actions, batches, tokens).item()
    loss = train.all_reduce(torch.tensor(loss, dtype=torch.double), group)
    close(loss, total.detach(), "loss")
    for p, q in zip(mine.layers[a:b].parameters(), alone.layers[a:b].parameters(), strict=True):
        if p.size(0) != VOCAB:  # the ends of the tied embedding hold a term each
            close(p.grad, q.grad, "gradient")


@pytest.mark.parametrize("P,m,name", [(3, 4, "1f1b"), (3, 4, "zb-h1")])
def test_pipelines_of_stages_that_add_to_the_loss_equal_one_process(P, m, name):
    pool(P, _adding_pipeline, P, m, name)


# ---- train.py --plain ----


@pytest.mark.parametrize("more,says", [
    ("--cp 2", "--plain has no --cp"), ("--sp", "--plain has no --sp"),
    ("--resume auto", "--plain has no --resume"), ("--save-interval 2", "has no --save-interval"),
    ("--schedule zb-h1", f"--plain has no --schedule zb-h1; try {PLAIN_SCHEDULES}"),
    ("--schedule interleaved", "--plain has no --schedule interleaved"),
    ("--optimizer lamb", "--plain has no --optimizer"), ("--experts 4", "has no --experts"),
    ("--dtype float16", "--plain has no loss scaling"), ("--device cuda", "--plain runs on CPUs")])
def test_what_plain_lacks_is_refused_in_one_line(more, says, capsys, monkeypatch):
    def main():
        train.read_command_line("")

    assert says in one_line(main, ["train.py", "--plain", *more.split()], capsys, monkeypatch)


def test_train_py_plain_prints_the_losses_of_train_py(corpus, tmp_path):
    words = [*flags_of(corpus, tmp_path / "out", dp=2, zero=3), "--verbose"]
    without_out = [word for word in words if word not in ("--out", tmp_path / "out")]
    printed = []
    for run in (command("train.py", *words), command("train.py", "--plain", *without_out)):
        assert run.returncode == 0, run.stderr
        # the first lines: all flags, as they were resolved (--microbatches was left open)
        assert "dp=2 tp=1 " in run.stdout and " microbatches=1 " in run.stdout, run.stdout
        printed.append([line.split("  lr")[0] for line in run.stdout.splitlines()
                        if "  loss " in line])
    assert printed[0] == printed[1] and len(printed[0]) == 4
