"""Bugs that trainers of this kind have had, or could have, each as a change of a line or a few: by
them the doctor (run/doctor/) is judged, and the page "break it and see" is made.

    BUGS            a row per bug: its name; the stage in which it shows first; two layouts in which
                    it changes numbers; the changes. planted.py puts them into a running process
    RIGHT_RUNS      layouts and number formats in which nothing is wrong
    run_with(...)   trains a layout with a bug in the pool

Stages, in the order in which a run goes through them:
    data, initial values, loss, gradients, norm, update
"""

from typing import NamedTuple

from run.config import check
from tests.cover import layouts
from tests.harness import _train, config
from tests.planted import planted
from tests.pool import pool

# D, T, P and m of a layout differ where they can, so that a ratio tells them apart: 30 sequences
# divide by 2, 3, 5 and 6; 12 tokens by 3 and, under --cp 2, by 4
SIZES = {"batch_size": 30, "block_size": 12}


class Bug(NamedTuple):
    name: str
    stage: str  # the first one in which a number is wrong
    layouts: tuple  # lines like those of test_layouts.py
    changes: tuple  # (file, old, new) each
    # Changes that make the bug possible, such as padding in the data. The right run has them, too
    setting: tuple = ()


def change(file, old, new):
    """The changes of a bug that is one place."""
    return ((file, old, new),)


# ---- data ----

DATA = [
    Bug("every data rank takes the same part of the batch", "data",
        ("dp 2 microbatches 5", "dp 3 pp 2 microbatches 5"),
        change("data/batches.py", "np.split(starts, n_data_ranks)[index]",
               "np.split(starts, n_data_ranks)[0]")),
    Bug("every microbatch is the first one", "data",
        ("dp 2 microbatches 5", "tp 2 microbatches 3"),
        change("data/batches.py", "np.split(own_starts, cfg.microbatches):",
               "np.split(own_starts, cfg.microbatches)[:1] * cfg.microbatches:")),
    Bug("every step has the first step's batch", "data",
        ("dp 2 microbatches 5", "pp 2 microbatches 3"),
        change("data/batches.py", "default_rng([cfg.seed, step])", "default_rng([cfg.seed])")),
    Bug("targets are not shifted", "data", ("dp 2", "tp 3 microbatches 5"),
        change("data/batches.py", "windows[:, 1:]  # (B", "windows[:, :-1]  # (B")),
]

# ---- initial values ----

DRAW = "initial_value(shard.name, shard.shape, config, cfg.seed)"
INITIAL_VALUES = [
    Bug("each rank draws with a seed of its own", "initial values",
        ("tp 3 microbatches 5", "dp 2 pp 3 microbatches 5"),
        change("train.py", DRAW, DRAW.replace("cfg.seed", "cfg.seed + self.mesh.rank"))),
    Bug("each tensor rank draws a slice instead of slicing the full draw", "initial values",
        ("tp 3 microbatches 5", "dp 2 tp 2 microbatches 5"),
        change("train.py", "return lambda shard: shard.slice(\n                " + DRAW + ")",
               "return lambda shard: initial_value(\n                shard.name, "
               "shard.slice(torch.empty(shard.shape)).shape, config, cfg.seed)")),
    Bug("matrices are not scaled to the model's width", "initial values",
        ("dp 2", "tp 3 microbatches 5"),
        change("model.py", "std = 0.02 * math.sqrt(768 / config.n_embd)", "std = 0.02")),
    Bug("projections into the residual stream are not divided by sqrt(2 L)", "initial values",
        ("dp 2", "pp 2 microbatches 5"),
        change("model.py", "std /= math.sqrt(2 * config.n_layer)", "pass")),
    Bug("projections into the residual stream are divided by sqrt(L)", "initial values",
        ("dp 2", "tp 3 microbatches 5"),
        change("model.py", "math.sqrt(2 * config.n_layer)", "math.sqrt(config.n_layer)")),
    Bug("all tensors are drawn from one seed", "initial values", ("dp 2", "pp 2 microbatches 5"),
        change("model.py", 'f"{seed} {name}"', 'f"{seed}"')),
]

# ---- loss ----

# Some targets are padding (-1), and the loss is divided by the number of those that are not.
# Window i of a batch has i * i % 7 padding tokens at its end
PADDING = (
    ("data/batches.py", "            self.check_ids(windows, self.folder)\n",
     "            self.check_ids(windows, self.folder)\n"
     "            for window, start in zip(windows, part, strict=True):\n"
     "                place = list(starts).index(start)\n"
     "                window[self.block + 1 - place * place % 7 :] = ABSENT\n"),
    ("train.py", "self.tokens = cfg.batch_size * cfg.block_size  #",
     "self.tokens = cfg.batch_size * cfg.block_size\n"
     "        self.tokens -= sum(i * i % 7 for i in range(cfg.batch_size))  #"))
EXECUTE = "self.own(batches), self.tokens, scale)"
LOSS = [
    Bug("the loss is summed over the T ranks that all have it", "loss",
        ("tp 3 microbatches 5", "dp 2 tp 2 microbatches 5"),
        change("train.py", 'loss / self.mesh.sizes["tp"], asked', "loss, asked")),
    Bug("the loss of a microbatch is not divided by their number", "loss",
        ("dp 2 microbatches 5", "tp 2 pp 2 microbatches 3"),
        change("train.py", EXECUTE,
               "self.own(batches), self.tokens // self.cfg.microbatches, scale)")),
    Bug("the loss of a microbatch is divided by their number twice", "loss",
        ("dp 2 microbatches 5", "tp 2 pp 2 microbatches 3"),
        change("train.py", EXECUTE,
               "self.own(batches), self.tokens * self.cfg.microbatches, scale)")),
    Bug("the loss is a mean of each microbatch's mean", "loss",
        ("dp 2 microbatches 3", "pp 2 microbatches 5"),
        (("train.py", EXECUTE,
          "self.own(batches), self.cfg.dp * self.cfg.microbatches, scale)"),
         ("engine/pipeline.py", "loss = loss / tokens",
          "loss = loss / (targets >= 0).sum() / tokens")), PADDING),
    Bug("the loss is a mean of the data ranks' means", "loss",
        ("dp 2 microbatches 3", "dp 3 microbatches 5"),
        (("train.py", EXECUTE,
          "self.own(batches), self.cfg.dp * sum((t >= 0).sum() for _, t in batches), scale)"),),
        PADDING),
    Bug("padding tokens count in the mean", "loss",
        ("dp 2 microbatches 3", "tp 2 microbatches 5"),
        change("train.py", EXECUTE,
               "self.own(batches), self.cfg.batch_size * self.cfg.block_size, scale)"), PADDING),
]

# ---- gradients: sums over ranks ----

REDUCE = "self.works.append(reduction(bucket.grad, bucket.group, async_op=True))"
SUMS = [
    Bug("gradients are averaged over the replicas, of a loss that is a mean already", "gradients",
        ("dp 2 microbatches 5", "dp 3 tp 2 zero 1 microbatches 5"),
        change("engine/ddp.py", "reduction(bucket.grad, bucket",
               "reduction(bucket.grad.div_(bucket.group.size), bucket")),
    Bug("gradients are not summed over the replicas", "gradients",
        ("dp 2 microbatches 5", "dp 3 pp 2 microbatches 5"),
        change("engine/ddp.py", REDUCE, "pass")),
    Bug("gradients are summed over the data ranks, not over the context ranks", "gradients",
        ("cp 2 microbatches 5", "dp 2 cp 3 microbatches 5"),
        change("engine/mesh.py", 'self.group("dp", "ep", "cp")', 'self.group("dp", "ep")')),
    Bug("gradients are summed over the context ranks, not over the data ranks", "gradients",
        ("dp 2 microbatches 5", "dp 2 cp 3 microbatches 5"),
        change("engine/mesh.py", 'self.group("dp", "ep", "cp")', 'self.group("cp")')),
    Bug("under --sp no gradient is summed over the T ranks", "gradients",
        ("tp 3 sp microbatches 5", "dp 2 tp 2 sp microbatches 5"),
        change("engine/tensor_parallel.py", "sum_gradients=sp", "sum_gradients=False")),
    Bug("under --sp LayerNorm's gradients are not summed over the T ranks", "gradients",
        ("tp 3 sp microbatches 5", "dp 2 tp 2 sp microbatches 5"),
        change("shard.py", "            if sum_gradients:",
               '            if sum_gradients and ".ln_" not in param.shard.name:')),
    Bug("under --sp row biases' gradients are not summed over the T ranks", "gradients",
        ("tp 3 sp microbatches 5", "tp 2 pp 2 sp microbatches 5"),
        change("shard.py", "            if sum_gradients:",
               '            if sum_gradients and "c_proj.bias" not in param.shard.name:')),
    Bug("under --sp the positions' gradients are not summed over the T ranks", "gradients",
        ("tp 3 sp microbatches 5", "tp 2 pp 2 sp microbatches 5"),
        change("shard.py", "            if sum_gradients:",
               '            if sum_gradients and "wpe" not in param.shard.name:')),
    Bug("gradients of replicated parameters are summed over the T ranks, without --sp",
        "gradients", ("tp 3 microbatches 5", "dp 2 tp 2 microbatches 5"),
        change("shard.py", "            if sum_gradients:", "            if True:")),
]

BUGS = [*DATA, *INITIAL_VALUES, *LOSS, *SUMS]


# ---- running them ----


def flags_of(layout):
    """The flags of a line such as "dp 2 sp"."""
    (flags,) = layouts(layout)
    return {**SIZES, "microbatches": 1, **flags}


def _train_with(rank, cfg, changes):
    """Two steps of harness._train on one rank, with the changes."""
    with planted(*changes):
        return _train(rank, cfg, steps=2)


def run_with(corpus, changes, **flags):
    """Each rank's trace of two steps with the changes."""
    cfg = config(corpus, **flags)
    return pool(check(cfg, 1), _train_with, cfg, changes)
