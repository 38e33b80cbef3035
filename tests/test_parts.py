"""What is read is what runs: train.py trains with the root's files or, with --fast, with engine/'s;
what the root's parts send and hold; the folders that train.py does not need."""

import gc
import importlib
import itertools
import json
import shutil
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F

import engine.expert_parallel as engine_experts
import expert_parallel
import schedules
from collectives import all_reduce
from data.batches import Data
from ddp import DDP
from engine.group import Group as EngineGroup
from engine.mesh import Mesh as EngineMesh
from engine.pipeline import Deferred, Pipeline, Stage
from engine.tensor_parallel import parallelize
from experts import kind_of
from group import Group
from mesh import Mesh
from model import build, cross_entropy
from pipeline import Pipeline as RootPipeline
from recompute import StandIn, recompute
from run.config import PARTS, check, choose_parts, needed_parts, words_of_parts
from sequence_parallel import sequence_parallel
from shard import tag_whole
from sizes import GPTConfig, LlamaConfig
from tensor_parallel import tensor_parallel, vocabulary_loss
from tests.cover import layouts
from tests.harness import HERE, VOCAB, _train, close, config, equals_one_process, pool
from tests.runs import command
from tests.runs import flags as flags_of
from train import Trainer
from zero import REDUCERS

# ---- whoever edits a file sees train.py act ----


def broken(*args, **more):
    raise ZeroDivisionError("this file runs")


def _with_broken(rank, cfg, place):
    """Two steps of train.py, while one function has the code of broken(). place: "MODULE.NAME" or
    "MODULE.CLASS.NAME". Every file that has imported the function calls the broken one."""
    file, *names = place.rsplit(".", 2) if place.split(".")[-2][0].isupper() else place.rsplit(
        ".", 1)
    owner = importlib.import_module(file)
    for name in names[:-1]:
        owner = vars(owner)[name]
    function = vars(owner)[names[-1]]
    function = getattr(function, "__func__", function)  # of a static method
    kept, function.__code__ = function.__code__, broken.__code__
    try:
        _train(rank, cfg, steps=2)
    finally:
        function.__code__ = kept


# A function of each file that trains, and a layout that needs it
ROOT_PLACES = """
    mesh.lay_out: microbatches 1
    group.Group.exchange: dp 2
    collectives.reduce_scatter: dp 2
    collectives.all_gather: dp 2
    collectives.all_to_all: cp 2 cp_attention all-to-all
    shard.split: tp 2
    ddp.DDP.gradients: dp 2
    zero.ZeRO1.summed: dp 2 zero 1
    zero.ZeRO2.keep_own_chunk: dp 2 zero 2
    zero.Gathered.run: dp 2 zero 3
    optimizer.AdamW.step: microbatches 1
    pipeline.Pipeline.run: pp 2
    schedules.one_f_one_b: pp 2
    schedules.gpipe: pp 2 schedule gpipe
    tensor_parallel.Column.forward: tp 2
    tensor_parallel.vocabulary_loss: tp 2
    sequence_parallel.scatter_tokens: tp 2 sp
    context_parallel.ring_attention: cp 2
    expert_parallel.dispatch_and_combine: dp 2 ep 2 experts 4
    experts.balance_loss: experts 4
    recompute.recompute: recompute
"""
ENGINE_PLACES = """
    engine.group.Group.exchange: dp 2
    engine.collectives.swap: dp 2
    engine.collectives.ring: dp 3
    engine.ddp.DDP.launch: dp 2
    engine.zero.ZeRO2.launch: dp 2 zero 2
    engine.zero.ZeRO3.gather_weights: dp 2 zero 3
    engine.optimizer.AdamW.scaled: microbatches 1
    engine.pipeline.Pipeline.run: pp 2
    engine.pipeline.finish_weights: pp 2 schedule zb-h1 microbatches 2
    engine.tensor_parallel.weight_gradients: tp 2
    engine.vocabulary_parallel.log_share: tp 2
    engine.sequence_parallel.Region.start_enter: tp 2 sp
    engine.context_parallel.visible: cp 2
    engine.expert_parallel.SpreadExperts.count: dp 2 ep 2 experts 4
    engine.compiled.compile_layer: compile
    engine.parts.Engine.Reducer: microbatches 1
"""


def places(table):
    rows = [line.split(":") for line in table.strip().splitlines()]
    return [(place.strip(), flags) for place, line in rows for flags in layouts(line)]


@pytest.mark.parametrize("place,flags", places(ROOT_PLACES), ids=lambda x: x if str(x) == x else "")
def test_train_py_runs_the_file_of_the_root(corpus, place, flags):
    cfg = config(corpus, **{"microbatches": 1, "fast": "", **flags})
    with pytest.raises(AssertionError, match="this file runs"):
        pool(check(cfg, 1), _with_broken, cfg, place)


@pytest.mark.parametrize("place,flags", places(ENGINE_PLACES),
                         ids=lambda x: x if str(x) == x else "")
def test_train_py_fast_runs_the_file_of_the_engine(corpus, place, flags):
    cfg = config(corpus, **{"microbatches": 1, **flags})
    with pytest.raises(AssertionError, match="this file runs"):
        pool(check(cfg, 1), _with_broken, cfg, place)


def test_on_the_roots_parts_no_file_of_the_engine_is_imported(corpus, tmp_path):
    run = command("-c", f"""
import sys
sys.argv = {["train.py", *map(str, flags_of(corpus, tmp_path / "out", steps=1))]!r}
import train
try:
    train.main()
except SystemExit as end:
    assert not end.code
print([name for name in sys.modules if name.split('.')[0] == 'engine'])
""")
    assert run.stdout.splitlines()[-1] == "[]", run.stdout + run.stderr


# ---- which flag needs which part ----


@pytest.mark.parametrize("flags,fast,says", [
    ({"schedule": "zb-v", "pp": 2}, "mesh,tp,ddp,pp", "--schedule zb-v"),
    ({"schedule": "interleaved", "pp": 2}, "mesh,pp", "--schedule interleaved"),
    ({"dtype": "float16"}, "mesh,optimizer,pp", "--dtype float16"),
    ({"fast": "tp", "zero": 3, "dp": 2}, "mesh,tp,ddp", "--zero 3 with --fast tp"),
    ({"recompute": True, "zero": 2, "dp": 2}, "", ""), ({"fast": "all"}, ",".join(PARTS), "all")],
    ids=str)
def test_a_flag_that_the_root_lacks_takes_the_engines_part_and_the_run_says_so(flags, fast, says):
    cfg = config("", **{"fast": "", **flags})
    choose_parts(cfg)
    assert cfg.fast == fast
    assert says in words_of_parts(cfg) and bool(words_of_parts(cfg)) == bool(fast)
    choose_parts(cfg)  # a second time changes nothing
    assert cfg.fast == fast


def test_an_unknown_part_is_refused():
    with pytest.raises(ValueError, match="^--fast zro is no part of engine/; try mesh, cp, tp,"):
        choose_parts(config("", fast="ddp,zro"))
    assert not needed_parts(config("", fast=""))


# ---- folders that train.py does not need ----

NEEDED = ("data", "run")


def test_without_engine_and_all_other_rooms_it_trains_resumes_and_samples(corpus, tmp_path):
    copy = tmp_path / "copy"
    hidden = shutil.ignore_patterns(".*", "__pycache__", "out", "stdlib", "shakespeare", "*.log")
    copy.mkdir()
    for path in HERE.glob("*.py"):
        shutil.copy(path, copy)
    for folder in NEEDED:
        shutil.copytree(HERE / folder, copy / folder, ignore=hidden)
    out = tmp_path / "out"
    data = shutil.copytree(corpus, tmp_path / "data")
    meta = json.loads((data / "meta.json").read_text())
    (data / "meta.json").write_text(json.dumps({**meta, "vocab_size": 256}))  # sample.py: all bytes
    words = flags_of(data, out, dp=2, tp=2, pp=2, zero=3, save_interval=1)
    run = command("train.py", *words, cwd=copy)
    assert run.returncode == 0 and "replicas agree" in run.stdout, run.stdout + run.stderr
    assert "  d=1 p=0  ranks  4  5\n" in run.stdout
    assert " parameters, float64 on the CPU; " in run.stdout
    again = command("train.py", *words, "--resume", out / "step-00000001", "--pp", 1, cwd=copy)
    losses = [[line.split()[3] for line in text.splitlines() if "  loss " in line]
              for text in (run.stdout, again.stdout)]
    assert losses[1] == losses[0][1:], again.stdout + again.stderr
    sample = command("sample.py", "--out", out, "--max-tokens", 4, cwd=copy)
    assert sample.returncode == 0, sample.stderr
    refused = command("train.py", *words, "--fast", cwd=copy)
    assert refused.returncode == 2 and "--fast needs the folder engine/" in refused.stderr


# ---- what ZeRO's stages send and hold on the root's parts ----


WIDE = GPTConfig(VOCAB, block_size=4, n_layer=6, n_head=5, n_embd=65)


def _reducer(rank, D, zero, m):
    """Of a step with m microbatches: (elements sent, peak of the bytes allocated in it, Psi,
    elements of the weights in memory before it)."""
    mesh = Mesh(dp=D)
    group = mesh.group("dp")
    model = build(WIDE, dtype=torch.double)
    psi = sum(param.numel() for param in model.parameters())
    tag_whole(model, group)
    stages = {0: list(model.layers)}
    reducer = REDUCERS[zero](stages)
    held = sum(x.untyped_storage().nbytes() // 8 for x in {*model.parameters(), *reducer.params})
    ids = torch.randint(VOCAB, (1, 4), generator=torch.Generator().manual_seed(0))
    cfg = config("", microbatches=m, batch_size=1, block_size=1)
    pipeline = RootPipeline(stages, mesh.group("pp"), cfg, None, torch.double)
    with torch.autograd.profiler.profile(profile_memory=True) as profile:
        pipeline.run([(ids, ids, None)] * m, reducer)
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


def _sent(rank, cfg):
    """{group: bytes sent in a step}, and the numbers of elements of all slices of this rank."""
    mesh = Mesh(**{axis: getattr(cfg, axis) for axis in ("dp", "pp", "cp", "tp", "ep", "shard")})
    trainer = Trainer(cfg, mesh, VOCAB)
    trainer.step(Data(cfg).training(cfg, 0, mesh), 1e-3)
    return ({name: group.bytes_sent for name, group in mesh.groups.items()},
            [tag.slice_shape.numel() for tag in trainer.reducer.tags])


@pytest.mark.parametrize("zero", [0, 1, 2, 3])
def test_hybrid_sharding_sends_between_copies_only_the_sum_of_a_rank_s_chunks(corpus, zero):
    """--shard 2 of --dp 4: two copies of the shards. A rank all-reduces its chunk with its copy
    once a step: n/2 elements under ZeRO, n without (2 (N-1)/N = 1 for N = 2), whatever the stage
    and the number of microbatches."""
    cfg = config(corpus, dp=4, shard=2, zero=zero, microbatches=3, fast="")
    got = pool(check(cfg, 1), _sent, cfg)
    psi = sum(got[0][1])
    between_copies = sum(sent["rep"] for sent, _ in got)
    assert between_copies == 8 * 4 * psi // (2 if zero else 1)
    once = {0: 2, 1: 2, 2: 1 + 3, 3: 3 * 3}[zero] * psi  # the table of zero.py
    tied = VOCAB * 24 * 9 if zero == 3 else 0  # gathered for each of its two layers
    assert sum(sent["shard_ep_cp"] for sent, _ in got) == 8 * 2 * (once + tied)


# ---- plain forms by themselves ----


def _vocabulary_loss(rank, dtype):
    """(loss, gradient of this rank's logits) of 2 x 5 tokens, one of them padding."""
    generator = torch.Generator().manual_seed(0)
    logits = (9 * torch.randn(2, 5, VOCAB, generator=generator)).to(dtype)
    targets = torch.randint(VOCAB, (2, 5), generator=generator)
    targets[1, 3] = -100  # torch's ignore_index
    group = Mesh(tp=3).group("tp")
    words = (23 * rank, min(VOCAB, 23 * rank + 23))
    alone = logits.clone().requires_grad_()
    cross_entropy(alone, targets).backward()
    want = F.cross_entropy(logits.double().movedim(-1, 1), targets, reduction="sum")
    mine = logits[..., slice(*words)].clone().requires_grad_()
    loss = vocabulary_loss(mine, targets, words, group)
    loss.backward()
    return loss.detach(), want, mine.grad, alone.grad[..., slice(*words)]


@pytest.mark.parametrize("dtype,bound", [(torch.double, 1e-14), (torch.bfloat16, 2e-7)])
def test_the_plain_vocabulary_loss_counts_no_padding_and_sums_in_32_bits(dtype, bound):
    """In bfloat16 the loss keeps 24 bits, like cross_entropy's; gradients are rounded to 8."""
    for loss, want, grad, whole_grad in pool(3, _vocabulary_loss, dtype):
        assert loss.dtype == torch.promote_types(dtype, torch.float)
        close(loss, want, "loss", bound)
        close(grad, whole_grad, "gradient", bound if dtype == torch.double else 2**-8)
        assert grad[1, 3].eq(0).all()


SIZES = {"block_size": 4, "n_layer": 1, "n_head": 4, "n_embd": 16}


@pytest.mark.parametrize("split", [tensor_parallel, sequence_parallel, parallelize])
@pytest.mark.parametrize("config,says", [
    (GPTConfig(3, **SIZES), "^--tp 4 must be at most the 3 words of the vocabulary$"),
    (GPTConfig(67, **{**SIZES, "n_head": 2}), "^--tp 4 must divide the 2 heads$"),
    (LlamaConfig(67, **SIZES, n_kv_head=2, n_hidden=32), "^--tp 4 must divide the 2 heads$")],
    ids=["words", "heads", "heads of keys"])
def test_more_tensor_ranks_than_words_or_heads_are_refused(split, config, says):
    """Before a message: a rank without words failed in its first step, and its peers waited."""
    model = build(config, kind=kind_of(config))
    tag_whole(model, Group(Mesh(dp=1), "dp", [0], 0))
    with pytest.raises(ValueError, match=says):
        split(model, SimpleNamespace(rank=0, size=4))


@pytest.mark.parametrize("spread,says", [
    (expert_parallel.spread_experts, "^--ep 3 must divide the 4 experts$"),
    (engine_experts.spread_experts, "^--ep 3 x --tp 1 must divide the 4 experts$")],
    ids=["root", "engine"])
def test_ranks_that_cannot_share_the_experts_are_refused(spread, says):
    config = GPTConfig(67, **SIZES, n_experts=4)
    model = build(config, kind=kind_of(config))
    sizes = {"ep": 3}
    mesh = SimpleNamespace(group=lambda *axes: SimpleNamespace(
        rank=0, size=sizes.get(axes[0], 1), device="cpu"))
    tag_whole(model, mesh.group("dp"))
    with pytest.raises(ValueError, match=says):
        spread(model, mesh)


def _losses(rank, cfg):
    trace = _train(rank, cfg, steps=cfg.steps, kinds=())
    return [step["loss"] for step in trace[1:]]


@pytest.mark.parametrize("dtype,bound", [("float32", 1e-5), ("bfloat16", 2**-8)])
@pytest.mark.parametrize("flags", [
    {"tp": 3, "dp": 2, "zero": 3}, {"pp": 2, "dp": 2, "zero": 2, "microbatches": 3}], ids=str)
def test_in_fewer_bits_both_floors_agree_as_far_as_rounding_allows(corpus, flags, dtype, bound):
    """Eight steps. float32 keeps 24 bits and bfloat16 8: sums are rounded in other places."""
    flags = {"microbatches": 1, "dtype": dtype, "steps": 8, "lr": 3e-3, **flags}
    root, engine = config(corpus, fast="", **flags), config(corpus, **flags)
    world = check(root, 1)
    for mine, other in zip(pool(world, _losses, root)[0], pool(world, _losses, engine)[0],
                           strict=True):
        assert abs(mine - other) <= bound * abs(other)


@pytest.mark.parametrize("flags", [
    {"recompute": True, "pp": 2, "tp": 2, "sp": True, "microbatches": 2},
    {"recompute": True, "dp": 2, "zero": 2, "experts": 4, "microbatches": 2},
    {"recompute": True, "arch": "llama", "cp": 2}], ids=str)
def test_recomputed_blocks_of_the_root_equal_one_process(corpus, flags):
    equals_one_process(corpus, **{"microbatches": 1, "fast": "", **flags})


def test_recompute_repeats_a_layer_once_from_the_same_random_numbers():
    """... up to the last tensor that backward needs; a value is freed when backward has used it."""
    layers = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Dropout(0.5), torch.nn.GELU(),
                                 torch.nn.Linear(8, 8))
    calls = []
    for i, layer in enumerate(layers):
        layer.register_forward_hook(lambda layer, inputs, output, i=i: calls.append(i))
    x = torch.randn(4, 8, generator=torch.Generator().manual_seed(0), requires_grad=True)
    gradients = []
    for run in (layers, lambda x: recompute(layers, x)):
        torch.manual_seed(1)
        layers.zero_grad()
        x.grad = None
        y = run(x)
        after_forward = torch.rand(1)  # backward leaves the random numbers as they are
        calls.clear()
        y.sum().backward()
        gradients.append([x.grad, *(param.grad for param in layers.parameters()), after_forward,
                          torch.rand(1)])
    assert calls == [0, 1, 2]  # of the last layer backward needs the input only
    assert all(map(torch.equal, *gradients))

    held = []  # how many values are alive in the middle of the layer's backward

    def count(grad):
        held.append(sum(type(x) is StandIn and x.value is not None for x in gc.get_objects()))

    def four(x):
        middle = x.exp().exp()
        if not held and middle.requires_grad:
            middle.register_hook(count)
        return middle.exp().exp()

    recompute(four, x).sum().backward()
    assert held[0] <= 2, "of four"

    with pytest.raises(RuntimeError, match="changed in place"):
        z = x * 1.0
        y = recompute(layers, z)
        with torch.no_grad():
            z.mul_(2)
        y.sum().backward()


def test_recompute_repeats_autocast_and_takes_keywords_and_dicts():
    """... as any forward of your own. bfloat16 of autocast, all bits equal."""
    linear = torch.nn.Linear(8, 8)

    def run(x, *, more, scale=1.0):
        return (linear(x).tanh() * scale, linear(more["y"][0]).exp())

    grads = []
    for form in (run, lambda *args, **kwargs: recompute(run, *args, **kwargs)):
        generator = torch.Generator().manual_seed(0)
        x, y = (torch.randn(4, 8, generator=generator, requires_grad=True) for _ in range(2))
        linear.zero_grad()
        with torch.autocast("cpu", torch.bfloat16):
            a, b = form(x, more={"y": [y]}, scale=0.5)
        (a.sum() + b.sum()).float().backward()
        grads.append([x.grad, y.grad, linear.weight.grad.clone(), linear.bias.grad.clone()])
    assert all(map(torch.equal, *grads))


# ---- the engine's pipeline, with stages that the project does not have ----


class _Adds(Stage):
    """A stage before the last that has something to add to the objective."""

    def __call__(self, x, targets):
        y, loss, extra = super().__call__(x, targets)
        return (y, loss, y.square().sum()) if loss is None else (y, loss, extra)


PLAIN_SHAPE = GPTConfig(VOCAB, block_size=8, n_layer=4, n_head=2, n_embd=12)


def _adding_pipeline(rank, P, m, name):
    """A pipeline's gradients against one process's; all stages add to the objective."""
    mesh = EngineMesh(pp=P)
    rows = torch.randint(VOCAB, (m, 1, 8), generator=torch.Generator().manual_seed(0))
    group = mesh.group("pp")
    cfg = config("", pp=P, schedule=name, microbatches=m, batch_size=m, block_size=8, chunks=1)
    batches, tokens = [(ids, ids, None) for ids in rows], rows.numel()
    alone, mine = (build(PLAIN_SHAPE, dtype=torch.double) for _ in range(2))
    cuts = schedules.cut(PLAIN_SHAPE.layer_costs(), P)
    total, losses = 0.0, 0.0
    for ids, targets, _ in batches:
        x = ids
        for s, (a, b) in enumerate(cuts):
            x, loss, extra = _Adds(alone.layers[a:b], s == P - 1)(x, targets)
            total = total + sum(part / tokens for part in (loss, extra) if part is not None)
        losses = losses + loss / tokens
    total.backward()
    a, b = cuts[rank]
    deferred = Deferred()
    tag_whole(mine, EngineGroup(mesh, "solo", [0], 0))
    parallelize(mine, EngineGroup(mesh, "solo", [0], 0), defer=deferred.add)
    stages = {rank: list(mine.layers[a:b])}
    pipe = Pipeline(stages, group, cfg, (1, 8, 12), torch.double, deferred)
    pipe.stages = {rank: _Adds(stages[rank], rank == P - 1)}
    reducer = Collects(stages)
    loss = all_reduce(pipe.run(batches, reducer), group)
    close(loss, losses.detach(), "loss")
    for p, q in zip(mine.layers[a:b].parameters(), alone.layers[a:b].parameters(), strict=True):
        if p.size(0) != VOCAB:  # the ends of the tied embedding hold a term each
            close(p.grad, q.grad, "gradient")


class Collects(DDP):
    """DDP that leaves all gradients in param.grad, also where the backward is split."""

    def expect(self, stage, last, params=None):
        pass

    def flush(self):
        pass

    def grad_added(self, param):
        pass


@pytest.mark.parametrize("P,m,name", [(3, 4, "1f1b"), (3, 4, "zb-h1")])
def test_pipelines_of_stages_that_add_to_the_loss_equal_one_process(P, m, name):
    pool(P, _adding_pipeline, P, m, name)
