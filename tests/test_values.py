"""Known values of what `reference` in harness.py shares with the code, and of 16-bit training:
initial values, the model's formulas, learning rate, clipping, loss scale, defaults, the log."""

import io
import itertools
import json
import math
from functools import partial
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F

import train
from collectives import Group
from data.batches import Data
from mesh import Mesh
from model import ABSENT, Head, build, initial_value
from optimizer import AdamW, LossScale, clip_coefficient, learning_rate, sum_of_squares
from pipeline import Pipeline
from run import checkpoint
from run import log as log_file
from run.config import check_layout
from run.log import Log, open_metrics
from sizes import GPTConfig
from tensor_parallel import VocabularyHead, copy_to_ranks
from tests.harness import BATCH, SHAPE, VOCAB, Raw, close, config
from tests.isolation import as_it_was

# ---- the model ----


def test_initial_values_are_gpt_2s_and_depend_on_seed_and_name():
    shape = GPTConfig(n_layer=8, n_embd=192)  # a quarter of GPT-2's width: twice its 0.02
    value = partial(initial_value, shape=torch.Size((500, 192)), config=shape)
    for name, std in (("wte.weight", 0.04), ("wpe.weight", 0.04), ("h.0.attn.c_attn.weight", 0.04),
                      ("h.0.mlp.c_fc.weight", 0.04), ("h.0.mlp.router.weight", 0.04),
                      ("h.0.attn.c_proj.weight", 0.01),  # by sqrt(2 * 8 layers) smaller
                      ("h.7.mlp.c_proj.weight", 0.01)):
        drawn = value("transformer." + name, seed=1)
        assert abs(drawn.std() / std - 1) < 0.01 and abs(drawn.mean()) < std / 50, name
    assert value("h.0.ln_1.weight", seed=1).eq(1).all()
    assert value("ln_f.bias", seed=1).eq(0).all()
    first = value("h.0.mlp.c_fc.weight", seed=1)
    assert torch.equal(first, value("h.0.mlp.c_fc.weight", seed=1))
    for name, seed in (("h.0.mlp.c_fc.weight", 2), ("h.1.mlp.c_fc.weight", 1)):
        assert not torch.equal(first, value(name, seed=seed))


def logits_by_formula(p, ids, n_head):
    """GPT-2's logits (S, V) of one sequence, from {nanoGPT's name: parameter}, by matrix products
    and exponentials alone."""
    def linear(name, x):
        return x @ p[name + ".weight"].T + p[name + ".bias"]

    def layer_norm(name, x):
        x = x - x.mean(1, keepdim=True)
        x = x / (x.square().mean(1, keepdim=True) + 1e-5).sqrt()
        return x * p[name + ".weight"] + p[name + ".bias"]

    def attention(name, x):
        parts, heads = linear(name + ".c_attn", x).chunk(3, 1), []
        for q, k, v in zip(*(part.chunk(n_head, 1) for part in parts), strict=True):
            weights = (q @ k.T / math.sqrt(q.size(1))).exp().tril()  # a token sees no later one
            heads.append(weights @ v / weights.sum(1, keepdim=True))
        return linear(name + ".c_proj", torch.cat(heads, 1))

    def gelu(x):
        return x / 2 * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))

    x = p["transformer.wte.weight"][ids] + p["transformer.wpe.weight"][: len(ids)]
    for i in range(sum(name.endswith("ln_1.bias") for name in p)):
        block = f"transformer.h.{i}"
        x = x + attention(block + ".attn", layer_norm(block + ".ln_1", x))
        hidden = gelu(linear(block + ".mlp.c_fc", layer_norm(block + ".ln_2", x)))
        x = x + linear(block + ".mlp.c_proj", hidden)
    return layer_norm("transformer.ln_f", x) @ p["transformer.wte.weight"].T


def test_the_model_is_gpt_2_by_its_formulas():
    model = build(GPTConfig(VOCAB, **SHAPE), dtype=torch.double)
    p, rng = {name: x.detach() for name, x in model.canonical_parameters()}, torch.Generator()
    for x in p.values():  # so that no bias is 0 and no LayerNorm is 1
        x.add_(0.3 * torch.randn(x.shape, dtype=torch.double, generator=rng.manual_seed(len(x))))
    ids = torch.arange(8) * 5 % VOCAB
    logits, targets = logits_by_formula(p, ids, SHAPE["n_head"]), ids + 1
    close(model(ids.view(1, 8)).detach()[0], logits, "logits")
    loss = sum(row.exp().sum().log() - row[i] for row, i in zip(logits, targets, strict=True))
    close(model(ids.view(1, 8), targets.view(1, 8)).detach(), loss, "summed loss")


def chunked(head, x, targets):
    """The loss of a head as train.py computes it: in chunks of at least 256 tokens."""
    head.lm_head.weight.tag = SimpleNamespace(ranges=((0, VOCAB),))
    solo = Group("solo", torch.device("cpu"), [0], 0)
    return VocabularyHead(head, solo, copy_to_ranks)(x, targets)


def test_losses_of_16_bit_models_are_summed_in_32():
    """In 16 bits a loss would have two or three digits."""
    generator = torch.Generator().manual_seed(0)
    head = Head(GPTConfig(VOCAB, 8, n_embd=64)).bfloat16()
    torch.nn.init.normal_(head.lm_head.weight, generator=generator)
    x = torch.randn(64, 8, 64, generator=generator).bfloat16()
    targets = torch.randint(VOCAB, (64, 8), generator=generator)
    logits = head(x).double()  # rounded to 16 bits, as in both forms of the loss
    want = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum")
    close(head(x, targets), want, "plain loss", 1e-6)
    close(chunked(head, x, targets), want, "loss in chunks", 1e-6)


@pytest.mark.parametrize("dtype", [torch.double, torch.bfloat16, torch.float16], ids=str)
def test_the_loss_in_chunks_is_the_plain_loss(dtype):
    """Also with padding tokens, a last chunk that is smaller, and targets that are almost certain:
    of a probability near 1 the gradient p - 1 keeps few digits if p is rounded to 16 bits first."""
    generator = torch.Generator().manual_seed(0)
    head = Head(GPTConfig(VOCAB, 100, n_embd=24)).double()
    torch.nn.init.normal_(head.lm_head.weight, std=1.0, generator=generator)
    head.to(dtype)
    x = torch.randn(3, 100, 24, generator=generator).to(dtype).requires_grad_()
    targets = head(x).argmax(-1)  # likely ones
    targets[1] = torch.randint(VOCAB, (100,), generator=generator)
    targets[:, 90:] = ABSENT
    results = {}
    for name, loss in (("plain", head), ("chunks", partial(chunked, head))):
        head.zero_grad()
        x.grad = None
        value = loss(x, targets)
        (value / 300).backward()
        results[name] = [value, x.grad, head.lm_head.weight.grad, head.ln_f.weight.grad]
    tolerance = 1e-14 if dtype == torch.double else 1e-2
    for name, got, want in zip(("loss", "x", "lm_head", "ln_f"), *results.values(), strict=True):
        close(got, want, f"gradient of {name}", tolerance)
    assert x.grad[:, 90:].eq(0).all()


# ---- a step ----


def test_the_learning_rate_warms_up_and_falls_along_a_cosine():
    cfg = config("", lr=1.0, min_lr=0.1, warmup_steps=4, steps=12)
    want = {0: 0.2, 1: 0.4, 3: 0.8, 4: 1.0, 6: 0.1 + 0.9 * (1 + 0.5**0.5) / 2, 8: 0.55,
            10: 0.1 + 0.9 * (1 - 0.5**0.5) / 2, 12: 0.1}
    for step, lr in want.items():
        close(learning_rate(cfg, step), lr, f"learning rate of step {step}")


def test_clipping_shortens_long_gradients_and_leaves_short_ones():
    for norm, grad_clip, want in ((0.5, 1.0, 1.0), (1e-9, 1.0, 1.0), (4.0, 1.0, 0.25 - 6.25e-8),
                                  (4.0, 0.0, 1.0)):  # 0: no clipping
        close(clip_coefficient(torch.tensor(norm).double(), grad_clip), want, "coefficient", 1e-9)


def after_one_step(corpus, **flags):
    """A one-process trainer after one step, the step's loss and norm, and its raw gradients."""
    cfg = config(corpus, microbatches=2, **flags)
    mesh = Mesh(dp=1)
    trainer = train.Trainer(cfg, mesh, VOCAB)
    raw = Raw(trainer)
    norm, sums = trainer.step(Data(cfg).training(cfg, 0, mesh), 1e-2)
    return trainer, sums[0].item(), norm.item(), [grad for _, grad in raw.grads]


def norm_of(tensors):
    return math.hypot(*(x.double().norm() for x in tensors))


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("grad_clip", [0.2, 0.0])
def test_a_step_of_16_bits_is_float64s_as_far_as_rounding_allows(corpus, dtype, grad_clip):
    """Loss, norm, what AdamW got of the gradients (its mean has 1 - 0.9 of the first ones), and
    what became of the weights: no trace of float16's loss scale of 65536."""
    got, *numbers, _ = after_one_step(corpus, dtype=dtype, grad_clip=grad_clip)
    want, *exact, _ = after_one_step(corpus, dtype="float64", grad_clip=grad_clip)
    assert exact[1] > 0.2, "clipping must fire"
    for a, b in zip(numbers, exact, strict=True):
        assert math.isclose(a, b, rel_tol=2**-6), (numbers, exact)
    clipped = grad_clip or exact[1]
    for trainer in (got, want):
        states = trainer.optimizer.named_states()
        assert math.isclose(norm_of(states["exp_avg"]), 0.1 * clipped, rel_tol=2**-6)
        assert math.isclose(norm_of(states["exp_avg_sq"]),
                            norm_of(want.optimizer.named_states()["exp_avg_sq"]), rel_tol=2**-5)
    mine, other = (torch.cat([x.double().flatten() for x in trainer.reducer.weights])
                   for trainer in (got, want))
    # AdamW's first step is lr, 9% of the weights, times a sign; some signs are rounding's
    assert (mine - other).norm() < 2**-6 * other.norm()
    masters = got.optimizer.named_states()["master"]
    for weights, master in zip(got.reducer.weights, masters, strict=True):
        assert master.dtype == torch.float and torch.equal(weights, master.to(weights.dtype))


def test_small_steps_add_up_in_16_bits():
    """1 - 0.001 is 1 in bfloat16: the master copy of 32 bits takes the steps."""
    cfg = config("", dtype="bfloat16", weight_decay=0.0, grad_clip=0.0)
    tag = SimpleNamespace(name="weight", shape=torch.Size([3]), holders=lambda sharded: 1)
    reducer = SimpleNamespace(weights=[torch.ones(3).bfloat16()], tags=[tag], sharded=False)
    optimizer = AdamW(cfg, reducer, LossScale(torch.bfloat16, "cpu"))
    for _ in range(100):
        optimizer.step([torch.ones(3).bfloat16()], torch.tensor(1.0), 1e-3)
    assert (reducer.weights[0] - 0.9).abs().max() < 2**-8


def test_the_norm_of_16_bit_gradients_has_32_bits(corpus):
    _, _, norm, grads = after_one_step(corpus, dtype="bfloat16", grad_clip=0.0)
    assert grads[0].dtype == torch.bfloat16
    assert math.isclose(norm, norm_of(grads), rel_tol=1e-6)


def test_the_square_of_a_long_tensor_loses_no_digits():
    """One float32 sum of 2^25 ones is 2^24: there adding 1 changes nothing."""
    assert math.isclose(sum_of_squares(torch.full((1 << 25,), 1.0)), 2**25, rel_tol=1e-6)


def test_the_loss_scale_grows_after_1000_good_steps_and_halves_at_an_overflow():
    scale, other = (LossScale(dtype, "cpu") for dtype in (torch.float16, torch.bfloat16))

    def after(*finite, scale=scale):
        for each in finite:
            scale.update(torch.tensor(each))
        return scale.value.item()

    assert after(*[True] * 999) == 2.0**16 and after(True) == 2.0**17 and after(True) == 2.0**17
    assert after(*[True] * 500) == 2.0**17 and after(False) == 2.0**16
    assert after(*[True] * 999) == 2.0**16 and after(True) == 2.0**17
    assert after(*[False] * 20) == 1.0  # no less
    assert after(*[True] * 1000, scale=other) == 1.0


# ---- steps that are not finite ----


class LateLog(Log):
    """Leaves up to `late` steps unread, like on GPUs, where the host then posts a step while the
    device computes the one before."""

    def __init__(self, late, *args):
        super().__init__(*args)
        self.most_unread = late
        self.batches = []  # number of batches of each validation

    def validating(self, done, batches):
        super().validating(done, batches)
        if done == 1:
            self.batches.append(batches)


def ends_well(monkeypatch, corpus, folder, late=0, first=0, until=math.inf, **flags):
    """Did train() end well? In its steps from `first` to before `until` the loss is nan. late: how
    many steps may stay unread."""
    calls = itertools.count()

    def diverging(self, *args, usual=Pipeline.run):
        loss = usual(self, *args)
        return loss * math.nan if first <= next(calls) < until else loss

    monkeypatch.setattr(Pipeline, "run", diverging)
    monkeypatch.setattr(train, "Log", partial(LateLog, late))
    cfg = config(corpus, n_layer=1, microbatches=1, out=str(folder), **flags)
    mesh = Mesh(dp=1)
    with as_it_was():  # train() takes Ctrl-C, to save
        return train.train(cfg, Data(cfg), mesh).ended_well


@pytest.mark.parametrize("late", [0, 1])
def test_a_run_gives_up_after_five_steps_that_are_not_finite(corpus, tmp_path, late, monkeypatch,
                                                             capsys):
    """... and names the fifth of them, also where losses are read one step late. No validation
    follows."""
    monkeypatch.setattr("sys.argv", ["train.py"])
    assert not ends_well(monkeypatch, corpus, tmp_path, late, first=3, steps=50, save_interval=5,
                         eval_interval=50)
    said = capsys.readouterr()
    assert "validation" not in said.out
    last = tmp_path / "step-00000005"
    assert said.err == ("train.py: loss or gradient norm was not finite for 5 steps up to step 7; "
                        f"last good checkpoint: {last}; a lower --lr may help\n") and last.exists()


@pytest.mark.parametrize("first,until,well", [(0, 4, True), (1, 5, True), (3, 5, False)])
def test_fewer_steps_that_are_not_finite_end_a_run_only_at_its_end(corpus, tmp_path, first, until,
                                                                   well, monkeypatch, capsys):
    """Four are ridden over; a run whose last steps are not finite has not ended well."""
    steps = 5 if not well else 6
    assert ends_well(monkeypatch, corpus, tmp_path, 0, first, until, steps=steps) == well
    says = "was not finite for 2 steps up to step 4; last good checkpoint: "
    assert (says in capsys.readouterr().err) == (not well)


def test_float16_gives_up_only_once_its_loss_scale_is_down_to_1(corpus, tmp_path, monkeypatch,
                                                                capsys):
    """It begins at 2^16 and is halved by each such step. Step 15 makes it 1: the first of five."""
    flags = dict(dtype="float16", steps=50)
    assert not ends_well(monkeypatch, corpus, tmp_path, **flags)
    assert "not finite for 5 steps up to step 19; " in capsys.readouterr().err


def test_the_last_good_checkpoint_is_named_after_a_save_that_was_refused(corpus, tmp_path,
                                                                         monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", ["train.py"])
    answers = iter([True, False, False])
    monkeypatch.setattr(checkpoint, "is_finite", lambda trainer: next(answers))
    assert not ends_well(monkeypatch, corpus, tmp_path, first=99, steps=6, save_interval=2)
    said = capsys.readouterr()
    assert said.err == ("train.py: weights or moments are not finite after step 5; last good "
                        f"checkpoint: {tmp_path}/step-00000002; a lower --lr may help\n")
    assert said.out.count("saved nothing") == 2


# ---- checkpoints ----


def test_a_checkpoint_keeps_the_loss_scale_and_the_number_of_updates(corpus, tmp_path):
    """One of the three steps was skipped: Adam's bias correction must not count it."""
    flags = dict(dtype="float16", n_layer=1, microbatches=1, out=str(tmp_path))
    saved, loaded = (train.Trainer(config(corpus, **flags), Mesh(dp=1), VOCAB) for _ in range(2))
    saved.optimizer.scale.value.fill_(4096.0)
    saved.optimizer.scale.good_steps.fill_(7)
    saved.optimizer.numbers()["updates"].fill_(2)
    checkpoint.load(loaded, checkpoint.save(saved, 3))
    assert (loaded.optimizer.scale.value, loaded.optimizer.scale.good_steps) == (4096.0, 7)
    assert loaded.optimizer.numbers()["updates"] == 2


def test_a_checkpoint_past_the_last_step_is_refused_and_the_newest_was_written_last(
        corpus, tmp_path):
    cfg = config(corpus, n_layer=1, microbatches=1, out=str(tmp_path), steps=3)
    trainer = train.Trainer(cfg, Mesh(dp=1), VOCAB)
    folder = checkpoint.save(trainer, 3)
    assert checkpoint.load(trainer, folder) == 3
    checkpoint.save(trainer, 2)
    assert checkpoint.newest(tmp_path).name == "step-00000002"
    cfg.steps = 2
    with pytest.raises(checkpoint.CheckpointError, match="is at step 3, past --steps 2"):
        checkpoint.load(trainer, folder)


# ---- batches, defaults, the log ----


@pytest.mark.parametrize("flags,world,want", [
    ({}, 1, (1, 1)), ({"pp": 2}, 1, (1, 4)), ({"tp": 2, "pp": 2}, 8, (2, 3)),
    ({"pp": 3, "schedule": "interleaved"}, 3, (1, 6)), ({"pp": 2, "cp": 2}, 12, (3, 4)),
    ({"ep": 2, "experts": 4}, 1, (2, 1)), ({"dp": 4, "pp": 2}, 8, (4, 3))], ids=str)
def test_flags_that_are_left_out_are_chosen(flags, world, want):
    """Data ranks: all that the model does not need. Microbatches: the most that divide 36 sequences
    per data rank, up to 2 P; for interleaved, of the multiples of P."""
    cfg = config("", **{"dp": 0, "microbatches": 0, **flags})
    check_layout(cfg, world)
    assert (cfg.dp, cfg.microbatches) == want and BATCH == 36


def test_losses_that_are_read_one_step_late_are_the_same(corpus, tmp_path, monkeypatch):
    logs = []
    for late in (0, 1):
        written = []
        cfg = config(corpus, n_layer=1, microbatches=1, steps=7, eval_interval=3, save_interval=2,
                     eval_batches=2, out=str(tmp_path / str(late)))
        (tmp_path / str(late)).mkdir()
        monkeypatch.setattr(train, "Log", partial(LateLog, late))
        monkeypatch.setattr(Log, "write", lambda self, keep=written.append, **record: keep(record))
        with as_it_was():  # train() takes Ctrl-C, to save
            log = train.train(cfg, Data(cfg), Mesh(dp=1))
        assert log.batches == [2, 2, 3]  # the last validation takes all
        logs.append([{name: x for name, x in record.items() if name not in ("ms", "tokens_per_s")}
                     for record in written])
    assert logs[0] == logs[1] and [record["step"] for record in logs[0]] == [
        0, 1, 2, 3, 3, 4, 5, 6, 6, 7]


def test_a_step_begins_without_the_gradients_of_the_step_before(corpus):
    cfg = config(corpus, n_layer=1, microbatches=1)
    mesh = Mesh(dp=1)
    trainer, data, held = train.Trainer(cfg, mesh, VOCAB), Data(cfg), []
    run = trainer.pipeline.run
    trainer.pipeline.run = lambda *args: (held.append(len(trainer.grads)), run(*args))[1]
    for step in range(2):
        trainer.step(data.training(cfg, step, mesh), 1e-3)
    assert held == [0, 0] and trainer.grads


def test_checkpoints_name_the_folder_of_a_corpus(corpus, tmp_path):
    """... of which --data gives the name only: stdlib."""
    cfg = config(corpus, n_layer=1, microbatches=1, steps=2, save_interval=1, out=str(tmp_path))
    data = Data(cfg)
    data.folder = tmp_path / "stdlib"
    with as_it_was():  # train() takes Ctrl-C, to save
        train.train(cfg, data, Mesh(dp=1))
    for step in (1, 2):
        manifest = checkpoint.read_manifest(tmp_path / f"step-{step:08}")
        assert manifest["data"] == str(data.folder)


def test_a_signal_to_another_rank_ends_a_validation(corpus, monkeypatch):
    """All ranks leave it together: one that went on alone would wait forever."""
    cfg = config(corpus, n_layer=1, microbatches=1)
    trainer = train.Trainer(cfg, Mesh(dp=1), VOCAB)
    monkeypatch.setattr(train, "all_reduce", lambda asked, world: asked.fill_(1))
    log = SimpleNamespace(validating=lambda done, batches: None)
    assert trainer.validate(Data(cfg), log) is None


def test_the_log_has_bits_per_byte_and_loses_the_lines_to_be_written_again(tmp_path):
    written, said = [], []
    log = SimpleNamespace(write=lambda **record: written.append(record), say=said.append,
                          data=SimpleNamespace(meta={"bytes_per_token": 4.0}))
    Log.validation(log, 7, 6 * math.log(2))
    assert math.isclose(written[0]["val_bits_per_byte"], 1.5) and "1.5000 bits" in said[0]
    path = tmp_path / "log"
    kept = '{"step": 0}\n{"step": 1}\n'
    for rest in ('{"step": 2}\n{"step": 3}\n{"step": 1', '{"step": 1', '{"step": "1"}\n', "[1]\n",
                 '{"step": ' + "[" * 10**5 + "\n"):
        path.write_text(kept + rest)
        open_metrics(path, 2).close()
        assert path.read_text() == kept


def test_the_last_lines_are_of_the_fullest_rank(monkeypatch):
    """Rank 1 holds most, rank 2 has the highest peak."""
    ranks = [[50e6, 1e6, 1.5e6], [60e6, 2e6, 2.5e6], [70e6, 0.5e6, 2e6]]  # peak, formula, live
    monkeypatch.setattr(log_file, "all_gather_text", lambda text, world: [*map(json.dumps, ranks)])
    monkeypatch.setattr(log_file, "predicted_bytes", lambda trainer: 1)
    monkeypatch.setattr(log_file, "held_bytes", lambda trainer: 1)
    mesh = SimpleNamespace(device=torch.device("cpu"))
    log = SimpleNamespace(trainer=SimpleNamespace(mesh=mesh), world=None, metrics=None,
                          gave_up=False, skipped=0, healthy=True, stopping=False)
    for agree, says in ((True, "agree"), (False, "DISAGREE")):
        Log.end(log, agree)
        assert log.ended_well == agree and log.ending == (
            "model states: 2.50 MB on rank 1, the fullest, 2.00 predicted; peak of the process "
            f"70 MB, on rank 2\nreplicas {says}")


def test_kilobytes_of_the_process_status_are_1024_bytes(monkeypatch):
    status = "Name:\tx\nVmPeak:\t   9 kB\nVmHWM:\t   3 kB\nVmRSS:\t   2 kB\n"
    monkeypatch.setattr(log_file, "open", lambda path: io.StringIO(status), raising=False)
    assert log_file.peak_of_process() == 3 * 1024


@pytest.mark.parametrize("steps,every", [(12, 4), (12, 5), (13, 4), (3, 0), (3, 100)])
def test_seconds_left_are_those_of_all_steps_and_batches_to_come(steps, every):
    """train() said again: a validation of at most 3 batches before each step that eval_interval
    divides, but the first; after the last step one of all 10."""
    cfg = config("", steps=steps, eval_interval=every, eval_batches=3, batch_size=4)
    log = SimpleNamespace(cfg=cfg, recent=[2.0], batch_seconds=0.5,
                          data=SimpleNamespace(val=range(8 * 4 * 10 + 1)))
    for step in range(steps):
        left = 0.0
        for later in range(step + 1, steps):
            left += 2.0 + (3 * 0.5 if every and later % every == 0 else 0)
        left += 10 * 0.5 if every else 0
        assert Log.seconds_left(log, step) == left, step
    log.batch_seconds = 0.0  # none has been measured: a third of a step, for want of a backward
    assert math.isclose(Log.seconds_left(log, steps - 1), 10 * 2 / 3 if every else 0)


def test_a_metrics_file_has_null_for_what_is_not_finite(tmp_path):
    """JSON has no NaN: readers other than Python's refuse it."""
    with open(tmp_path / "log", "w") as file:
        log = SimpleNamespace(metrics=file)
        Log.write(log, step=1, loss=math.nan, grad_norm=math.inf, lr=0.5)
    line = (tmp_path / "log").read_text()
    found = json.loads(line, parse_constant=lambda name: pytest.fail(name))
    assert found == {"step": 1, "loss": None, "grad_norm": None, "lr": 0.5}


def test_mfu_is_that_of_all_gpus_and_gzip_stands_beside_the_last_validation(monkeypatch):
    """1000 tokens in 2 s of 6e9 FLOPs each, on GPUs of 1e13 FLOP/s together: 30%."""
    said = []
    config_of_model = SimpleNamespace(flops_per_token=lambda n_params: 6.0 * n_params)
    trainer = SimpleNamespace(model_config=config_of_model,
                              routing=SimpleNamespace(read=lambda statistics, tokens: {}))
    log = SimpleNamespace(
        cfg=config("", steps=100), trainer=trainer, tokens=1000, n_params=10**9, peak_flops=1e13,
        start=0, since=0.0, recent=[],
        write=lambda **record: None, say=lambda text, stays=True: said.append(text),
        seconds_left=lambda step: 125.2,
        data=SimpleNamespace(meta={"gzip_bits_per_byte": 2.0}))
    monkeypatch.setattr(log_file.time, "perf_counter", lambda: 2.0)
    Log.print_step(log, 3, 1.0, 1.0, 1.0, 1.0, [])
    assert said[0].endswith("2000 ms  500 tokens/s  mfu 30.0%  2 min 5 s left")
    log.start, log.say = 50, lambda text, stays: said.append(stays)
    for step in (59, 60, 61):  # the tenth of a resumed run; one that the log's interval divides
        log.since = 0.0
        Log.print_step(log, step, 1.0, 1.0, 1.0, 1.0, [])
    assert said[1:] == [True, True, False]
    said[1:], log.say = [], lambda text: said.append(text)
    Log.validation(log, 3, 1.0)
    Log.validation(log, 3, 1.0, last=True)
    assert said[1] + " (gzip -9: 2.0000)" == said[2]
