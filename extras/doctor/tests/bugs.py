"""Bugs that trainers of this kind have had, or could have, each as a change of a line or a few: by
them the doctor (extras/doctor/) is judged, and the page "break it and see" is made.

    BUGS            a row per bug: its name; the stage in which it shows first; two layouts in which
                    it changes numbers; the changes. planted.py puts them into a running process
    MUTANTS         like BUGS: those rows of mutants.py that may change the numbers of two steps.
                    None was written with the doctor in mind
    RIGHT_RUNS      layouts and number formats in which nothing is wrong
    dump_of(...)    trains a layout with a bug in the pool, and writes its dump
"""

from dataclasses import fields
from typing import NamedTuple

import train
from data.batches import Data
from extras.doctor.record import random_value, write_run
from extras.exercises.planted import planted
from run.config import Config, check
from tests import mutants
from tests.cover import layouts
from tests.harness import VOCAB, config, mesh_of
from tests.pool import HANG, pool

STAGES = ("data", "initial values", "loss", "gradients", "norm", "update")  # in a run's order

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


def flags_of(layout):
    """The flags of a line such as "dp 2 sp". With "root" at the end it is a run of the root's
    parts, else of engine/'s."""
    line = layout.removesuffix(" root")
    (flags,) = layouts(line)
    parts = {} if line == layout else {"fast": ""}
    return {**SIZES, "microbatches": 1, **flags, **parts}


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
    Bug("each data rank draws a batch of its own", "data",
        ("dp 2 microbatches 5", "dp 3 pp 2 microbatches 5"),
        change("data/batches.py", "default_rng([cfg.seed, step])",
               'default_rng([cfg.seed, step, mesh.place("dp")[0]])')),
    Bug("tensor and pipeline ranks draw batches of their own", "loss",
        ("tp 3 microbatches 2", "tp 3 pp 2 microbatches 5"),
        change("data/batches.py", "default_rng([cfg.seed, step])",
               "default_rng([cfg.seed, step, mesh.rank])")),
    Bug("targets are not shifted", "data", ("dp 2", "tp 3 microbatches 2"),
        change("data/batches.py", "windows[:, 1:]  # (B", "windows[:, :-1]  # (B")),
]

# ---- initial values ----

DRAW = "draw(tag.name, tag.shape, config, cfg.seed)"
INITIAL_VALUES = [
    Bug("each rank draws with a seed of its own", "initial values",
        ("tp 3 microbatches 2", "dp 2 pp 3 microbatches 5"),
        change("run/weights.py", DRAW, DRAW.replace("cfg.seed", "cfg.seed + mesh.rank"))),
    Bug("each tensor rank draws a slice instead of slicing the full draw", "initial values",
        ("tp 3 microbatches 2", "dp 2 tp 3 microbatches 5"),
        change("run/weights.py", "return tag.slice(full).to(",
               f"return {DRAW.replace('tag.shape', 'tag.slice_shape')}.to(")),
    Bug("matrices are not scaled to the model's width", "initial values",
        ("dp 2", "tp 3 microbatches 2"),
        change("model.py", "std = 0.02 * math.sqrt(768 / config.n_embd)", "std = 0.02")),
    Bug("projections into the residual stream are not divided by sqrt(2 L)", "initial values",
        ("dp 2", "pp 2 microbatches 5"),
        change("model.py", "std /= math.sqrt(2 * config.n_layer)", "pass")),
    Bug("projections into the residual stream are divided by sqrt(L)", "initial values",
        ("dp 2", "tp 3 microbatches 2"),
        change("model.py", "math.sqrt(2 * config.n_layer)", "math.sqrt(config.n_layer)")),
    Bug("all tensors are drawn from one seed", "initial values", ("dp 2", "pp 2 microbatches 5"),
        change("model.py", 'f"{seed} {name}"', 'f"{seed}"')),
]

# ---- loss ----

TOKENS = "self.tokens = cfg.batch_size * cfg.block_size"
# Some targets are padding, and the loss is divided by the number of those that are not.
# Window i of a batch has i * i % 7 padding tokens at its end
PADDING = (
    ("data/batches.py", "            self.check_ids(windows, self.folder)\n",
     "            self.check_ids(windows, self.folder)\n"
     "            for window, start in zip(windows, part, strict=True):\n"
     "                place = list(starts).index(start)\n"
     "                window[self.block + 1 - place * place % 7 :] = ABSENT\n"),
    ("engine/pipeline.py", TOKENS,
     f"{TOKENS}\n        self.tokens -= sum(i * i % 7 for i in range(cfg.batch_size))"))
LOSS = [
    Bug("the loss is summed over the T ranks that all have it", "loss",
        ("tp 3 microbatches 2", "dp 2 tp 3 microbatches 5"),
        change("train.py", "loss / self.cfg.tp, asked", "loss, asked")),
    Bug("the loss of a microbatch is not divided by their number", "loss",
        ("dp 2 microbatches 5", "tp 2 pp 3 microbatches 5"),
        change("engine/pipeline.py", TOKENS, f"{TOKENS} // cfg.microbatches")),
    Bug("the loss of a microbatch is divided by their number twice", "loss",
        ("dp 2 microbatches 5", "tp 2 pp 3 microbatches 5"),
        change("engine/pipeline.py", TOKENS, f"{TOKENS} * cfg.microbatches")),
    Bug("the loss is a mean of each microbatch's mean", "loss",
        ("dp 2 microbatches 3", "pp 2 microbatches 5"),
        (("engine/pipeline.py", "self.tokens -= sum(", "self.tokens = cfg.dp * cfg.microbatches\n"
          "        0 * sum("),
         ("engine/pipeline.py", "        losses = [part /",
          "        if loss is not None:\n            loss = loss / (targets >= 0).sum()\n"
          "        losses = [part /")), PADDING),
    Bug("the loss is a mean of the data ranks' means", "loss",
        ("dp 2 microbatches 3", "dp 3 microbatches 5"),
        (("engine/pipeline.py", "self.tokens -= sum(", "self.dp = cfg.dp\n        0 * sum("),
         ("engine/pipeline.py", "        training = reducer is not None\n",
          "        training = reducer is not None\n"
          "        self.tokens = self.dp * sum((t >= 0).sum() for _, t, _ in batches)\n")),
        PADDING),
    Bug("padding tokens count in the mean", "loss",
        ("dp 2 microbatches 3", "tp 2 microbatches 5"),
        change("engine/pipeline.py", "self.tokens -= sum(", "0 * sum("), PADDING),
]

# ---- gradients: sums over ranks ----

REDUCE = "self.works.append(reduction(bucket.grad, bucket.group, async_op=True))"


def over(axes):
    """The reduction of a bucket, over the ranks along these axes."""
    return REDUCE.replace("bucket.group,", f"bucket.group.mesh.group({axes}),")


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
        change("engine/ddp.py", REDUCE, over('"dp"'))),
    Bug("gradients are summed over the context ranks, not over the data ranks", "gradients",
        ("dp 2 microbatches 5", "dp 2 cp 3 microbatches 5"),
        change("engine/ddp.py", REDUCE, over('"cp"'))),
    Bug("under --sp no gradient is summed over the T ranks", "gradients",
        ("tp 3 sp microbatches 2", "dp 2 tp 3 sp microbatches 5"),
        change("engine/tensor_parallel.py", "sum_gradients=sp", "sum_gradients=False")),
    Bug("under --sp LayerNorm's gradients are not summed over the T ranks", "gradients",
        ("tp 3 sp microbatches 2", "dp 2 tp 3 sp microbatches 5"),
        change("shard.py", "            if sum_gradients:",
               '            if sum_gradients and ".ln_" not in param.tag.name:')),
    Bug("under --sp row biases' gradients are not summed over the T ranks", "gradients",
        ("tp 3 sp microbatches 2", "tp 3 pp 2 sp microbatches 5"),
        change("shard.py", "            if sum_gradients:",
               '            if sum_gradients and "c_proj.bias" not in param.tag.name:')),
    Bug("under --sp the positions' gradients are not summed over the T ranks", "gradients",
        ("tp 3 sp microbatches 2", "tp 3 pp 2 sp microbatches 5"),
        change("shard.py", "            if sum_gradients:",
               '            if sum_gradients and "wpe" not in param.tag.name:')),
    Bug("Qwen3's norms of queries and keys are not summed over the T ranks", "gradients",
        ("arch qwen3 n_kv_head 6 tp 3 microbatches 2",
         "arch qwen3 n_kv_head 6 dp 2 tp 2 microbatches 5 root"),
        change("shard.py", 'elif hasattr(param, "sees_own_heads"):', "elif False:")),
    Bug("under ZeRO-3 each rank keeps the chunk of its own gradient", "gradients",
        ("dp 2 zero 3 microbatches 5 root", "dp 3 zero 3 microbatches 2 root"),
        change("zero.py", "return own_chunk(reduce_scatter(whole, replicas), replicas).clone()",
               "return own_chunk(whole, replicas).clone()")),
    Bug("gradients of replicated parameters are summed over the T ranks, without --sp",
        "gradients", ("tp 3 microbatches 2", "dp 2 tp 3 microbatches 5"),
        change("shard.py", "            if sum_gradients:", "            if True:")),
]

# ---- gradients: microbatches ----

# The loss is scaled as for float16, in any number format
SCALED = change("engine/optimizer.py", "2.0**16 if self.changes else 1.0,", "2.0**16,")
# The loss that backward starts from
LOSS_OF_BACKWARD = "sum(losses) * self.scale.value"
# The pipeline knows the number of microbatches
WITH_M = ("engine/pipeline.py", "        self.group = group  #",
          "        self.m = cfg.microbatches\n        self.group = group  #")
MICROBATCHES = [
    Bug("only the last microbatch's gradients count", "gradients",
        ("dp 2 microbatches 5", "pp 2 microbatches 3"),
        change("engine/pipeline.py", "            reducer.expect(s, last=",
               "            for param in reducer.home:\n                param.grad = None\n"
               "            reducer.expect(s, last=")),
    Bug("only the last microbatch's gradients count, under ZeRO-2", "gradients",
        ("dp 2 zero 2 microbatches 5", "dp 3 tp 2 zero 2 microbatches 5"),
        change("engine/zero.py", "grad_shard.add_(", "grad_shard.copy_(")),
    Bug("only the first microbatch's gradients count", "gradients",
        ("dp 2 microbatches 5", "tp 2 pp 3 microbatches 5"),
        change("engine/pipeline.py", LOSS_OF_BACKWARD, f"{LOSS_OF_BACKWARD} * (k == 0)")),
    Bug("only the first microbatch's gradients are summed over the replicas", "gradients",
        ("dp 2 microbatches 5", "dp 3 pp 2 microbatches 5"),
        (("engine/pipeline.py", "for action in self.actions if action.kind in",
          "for action in reversed(self.actions) if action.kind in"),
         ("engine/ddp.py", REDUCE, "reduction(bucket.grad, bucket.group)"))),
    Bug("the sum so far is summed over the replicas after each microbatch", "gradients",
        ("dp 2 microbatches 5", "dp 3 tp 2 microbatches 5"),
        (("engine/ddp.py", "every_microbatch = False", "every_microbatch = True"),
         ("engine/ddp.py", REDUCE, "reduction(bucket.grad, bucket.group)"))),
    Bug("gradients are times m, of a loss that is right", "gradients",
        ("dp 2 microbatches 5", "tp 2 pp 3 microbatches 5"),
        (WITH_M, ("engine/pipeline.py", LOSS_OF_BACKWARD, f"{LOSS_OF_BACKWARD} * self.m"))),
    Bug("gradients are divided by m once more, of a loss that is right", "gradients",
        ("dp 2 microbatches 5", "tp 2 pp 3 microbatches 5"),
        (WITH_M, ("engine/pipeline.py", LOSS_OF_BACKWARD, f"{LOSS_OF_BACKWARD} / self.m"))),
    Bug("gradients are not zeroed between steps", "gradients",
        ("microbatches 5", "tp 3 microbatches 2"),
        change("engine/ddp.py", "        for param in self.home:\n            param.grad = None\n",
               "")),
    Bug("gradients are not zeroed between steps, under ZeRO-2", "gradients",
        ("dp 2 zero 2 microbatches 5", "dp 3 zero 3 microbatches 5"),
        change("engine/zero.py", "bucket.grad_shard.zero_()", "pass")),
    Bug("the loss scale is applied twice, and taken out once", "gradients",
        ("dp 2 microbatches 5", "pp 2 microbatches 3"),
        change("engine/pipeline.py", LOSS_OF_BACKWARD, f"{LOSS_OF_BACKWARD} * self.scale.value"),
        SCALED),
]

# ---- gradients: f and g of tensor parallelism ----

COLUMN = "leaving = ctx.region.start_leave(grad_x)"
ROW = "return region.leave(F.linear(region.by_rank(x), weight))"
ROW_BACKWARD = "grad = ctx.region.enter(grad.contiguous())"


def without_f(layer):
    """The columns of these layers do not sum their input's gradient."""
    return change("engine/tensor_parallel.py", COLUMN,
                  f'skip = "{layer}" in ctx.weight.tag.name\n        {COLUMN} if not skip else '
                  "lambda kept=grad_x: kept")


def without_g(layer):
    """The rows of these layers do not sum their output."""
    return change("engine/tensor_parallel.py", ROW,
                  f'y = F.linear(x, weight)\n        return y if "{layer}" in weight.tag.name '
                  "else region.leave(y)")


def g_twice(layer):
    """The rows of these layers sum the gradient of their output, too."""
    return change("engine/tensor_parallel.py", ROW_BACKWARD,
                  f'{ROW_BACKWARD}\n        if "{layer}" in ctx.weight.tag.name:\n'
                  "            grad = ctx.region.leave(grad.clone())")


TENSOR = [
    Bug("f is missing in attention: its backward does not sum", "gradients",
        ("tp 3 microbatches 2", "dp 2 tp 3 microbatches 5"), without_f("c_attn")),
    Bug("f is missing in the MLP", "gradients",
        ("tp 3 microbatches 2", "tp 3 pp 2 microbatches 5"), without_f("c_fc")),
    Bug("f is missing in all columns of blocks", "gradients",
        ("tp 3 microbatches 2", "dp 2 tp 3 microbatches 5"), without_f("")),
    Bug("f is missing in the head", "gradients",
        ("tp 3 microbatches 2", "tp 3 pp 2 microbatches 5"),
        change("engine/vocabulary_parallel.py",
               "leaving = region.start_leave(grad_inputs.view(parts * B, -1, C))",
               "leaving = lambda kept=grad_inputs.view(parts * B, -1, C): kept")),
    Bug("g is missing in attention: its forward does not sum", "loss",
        ("tp 3 microbatches 2", "dp 2 tp 3 microbatches 5"), without_g("attn.c_proj")),
    Bug("g is missing in the MLP", "loss",
        ("tp 3 microbatches 2", "tp 3 pp 2 microbatches 5"), without_g("mlp.c_proj")),
    Bug("g is missing in the embedding", "loss",
        ("tp 3 microbatches 2", "tp 3 pp 2 microbatches 5"),
        change("engine/vocabulary_parallel.py", "return leave_region(x, self.region)", "return x")),
    Bug("the sum of the loss over the T ranks is missing", "loss",
        ("tp 3 microbatches 2", "dp 2 tp 3 microbatches 5"),
        change("engine/vocabulary_parallel.py", "return all_reduce(loss, group)[0]",
               "return loss[0]")),
    Bug("the softmax is over a rank's own words", "loss",
        ("tp 3 microbatches 2", "tp 3 pp 2 microbatches 5"),
        change("engine/vocabulary_parallel.py", "if self.region.group.size > 1:",
               "if False:")),
    Bug("g's backward sums too, in attention", "gradients",
        ("tp 3 microbatches 2", "dp 2 tp 3 microbatches 5"), g_twice("attn.c_proj")),
    Bug("g's backward sums too, in the MLP", "gradients",
        ("tp 3 microbatches 2", "tp 3 pp 2 microbatches 5"), g_twice("mlp.c_proj")),
    Bug("g's backward sums too, in all rows of blocks", "gradients",
        ("tp 3 microbatches 2", "dp 2 tp 3 microbatches 5"), g_twice("c_proj")),
    Bug("g's backward sums too, in the embedding", "gradients",
        ("tp 3 microbatches 2", "tp 3 pp 2 microbatches 5"),
        change("engine/sequence_parallel.py",
               "x.clone(memory_format=torch.contiguous_format)), region.enter)",
               "x.clone(memory_format=torch.contiguous_format)),\n"
               "        lambda grad: region.leave(grad.clone()))")),
    Bug("g's backward sums too, after the loss: all gradients times T", "gradients",
        ("tp 3 microbatches 2", "tp 3 pp 2 microbatches 5"),
        (("engine/vocabulary_parallel.py", "ctx.dtype = x.dtype",
          "ctx.dtype = x.dtype\n        ctx.ranks = group.size"),
         ("engine/vocabulary_parallel.py", "grad = grad.view(1)  #",
          "grad = grad.view(1) * ctx.ranks  #"))),
    Bug("under --sp the reduce-scatter scatters, and sums nothing", "loss",
        ("tp 3 sp microbatches 2", "tp 3 pp 2 sp microbatches 5"),
        change("engine/sequence_parallel.py",
               "summed = self.start(reduce_scatter, parts, async_op)", "summed = lambda: parts")),
    Bug("the row bias is added on each of the T ranks", "loss",
        ("tp 3 microbatches 2", "dp 2 tp 3 microbatches 5"),
        change("engine/tensor_parallel.py", "else y.add_(self.bias)",
               "else y.add_(self.bias).add_(self.bias.detach(), "
               "alpha=self.region.group.size - 1)")),
    Bug("the row bias is added on each of the T ranks, and its gradient summed", "loss",
        ("tp 3 microbatches 2", "tp 3 pp 2 microbatches 5"),
        change("engine/tensor_parallel.py", "else y.add_(self.bias)",
               "else y.add_(self.bias * self.region.group.size)")),
    Bug("q, k and v are split as one matrix", "loss",
        ("tp 3 microbatches 2", "tp 2 microbatches 3 arch llama n_kv_head 4"),
        change("engine/tensor_parallel.py", "now_or_later, attn.parts)", "now_or_later)")),
    Bug("a Llama's gate and up are split as one matrix", "loss",
        ("tp 3 microbatches 2 arch llama n_hidden 48",
         "tp 2 pp 3 microbatches 5 arch llama n_kv_head 4"),
        change("engine/tensor_parallel.py", "now_or_later, mlp.parts)", "now_or_later)")),
]

# ---- the vocabulary in slices ----

OWN_WORDS = "start, stop = weight.tag.ranges[0]  # this rank's words"
VOCABULARY = [
    Bug("the embedding's slices begin at rank * rows, where the first ranks have a row more",
        "loss", ("tp 3 microbatches 2", "tp 3 pp 2 microbatches 5"),
        change("engine/vocabulary_parallel.py",
               "local, outside = to_local(idx, *self.weight.tag.ranges[0])",
               "rows = self.weight.size(0)\n"
               "        start = self.region.group.rank * rows\n"
               "        local, outside = to_local(idx, start, start + rows)")),
    Bug("the embedding's words are off by one", "loss",
        ("tp 3 microbatches 2", "dp 2 tp 3 microbatches 5"),
        change("engine/vocabulary_parallel.py", "to_local(idx, *self.weight.tag.ranges[0])",
               "to_local(idx, *(word + 1 for word in self.weight.tag.ranges[0]))")),
    Bug("the head's words are off by one", "loss",
        ("tp 3 microbatches 2", "tp 3 pp 2 microbatches 5"),
        change("engine/vocabulary_parallel.py", OWN_WORDS,
               "start, stop = (word + 1 for word in weight.tag.ranges[0])")),
    Bug("words of other ranks are not masked in the embedding", "loss",
        ("tp 3 microbatches 2", "tp 3 pp 2 microbatches 5"),
        change("engine/vocabulary_parallel.py", ".masked_fill(outside.unsqueeze(-1), 0)\n", "\n")),
    Bug("words of other ranks are not masked in the loss", "loss",
        ("tp 3 microbatches 2", "dp 2 tp 3 microbatches 5"),
        change("engine/vocabulary_parallel.py", "of_target.masked_fill(outside, 0).sum()",
               "of_target.sum()")),
    Bug("each rank takes the target for its own in the gradient of the logits", "gradients",
        ("tp 3 microbatches 2", "tp 3 pp 2 microbatches 5"),
        change("engine/vocabulary_parallel.py",
               "torch.where(outside, of_target.exp(), of_target.expm1())", "of_target.expm1()")),
    Bug("each rank subtracts its own largest logit", "loss",
        ("tp 2 microbatches 3 root", "tp 3 pp 2 microbatches 5 root"),
        change("tensor_parallel.py", "all_reduce(logits.detach().amax(-1), group, maximum)",
               "logits.detach().amax(-1)")),
    Bug("rows that pad the vocabulary are words", "loss",
        ("tp 3 microbatches 2 pad_vocab 8", "dp 2 microbatches 5 pad_vocab 16"),
        change("engine/vocabulary_parallel.py", "logits[:, num_words:] = -torch.inf", "pass")),
]

# ---- pipeline ----

PIPELINE = [
    Bug("the tied matrix's two terms are not summed", "gradients",
        ("pp 2 microbatches 5", "pp 3 microbatches 5"),
        change("pipeline.py", "weight.tag.sum_over += (group,)", "pass")),
    Bug("the tied matrix's two terms are summed twice", "gradients",
        ("pp 2 microbatches 5", "pp 3 microbatches 5"),
        change("engine/ddp.py", "for group in bucket.sum_at_end:",
               "for group in bucket.sum_at_end * 2:")),
    Bug("the tied matrix lacks the head's term", "gradients",
        ("dp 2 microbatches 5", "pp 2 microbatches 5"),
        change("engine/vocabulary_parallel.py", "return grad_x, grad_weight, None",
               "return grad_x, None, None")),
    Bug("the tied matrix lacks the embedding's term", "gradients",
        ("dp 2 microbatches 5", "tp 3 microbatches 2"),
        change("model.py", "return self.wte(idx) + self",
               "return self.wte(idx).detach() + self")),
    Bug("the gradient is averaged over the stages at each boundary", "gradients",
        ("pp 2 microbatches 5", "pp 3 microbatches 5"),
        change("engine/pipeline.py", 'self.leaving["B", s, k] = x.grad  #',
               'self.leaving["B", s, k] = x.grad / self.group.size  #')),
    Bug("the gradient is divided by m at each boundary", "gradients",
        ("pp 2 microbatches 5", "tp 2 pp 3 microbatches 5"),
        (WITH_M, ("engine/pipeline.py", 'self.leaving["B", s, k] = x.grad  #',
                  'self.leaving["B", s, k] = x.grad / self.m  #'))),
    Bug("the activation is detached at a boundary: no gradient goes back", "gradients",
        ("pp 2 microbatches 5", "pp 3 microbatches 5"),
        change("engine/pipeline.py", 'self.leaving["B", s, k] = x.grad  #',
               'self.leaving["B", s, k] = torch.zeros_like(x.grad)  #')),
    Bug("a gradient meets the activation of the newest microbatch in flight", "gradients",
        ("pp 2 microbatches 5", "pp 3 microbatches 5"),
        change("engine/pipeline.py", "x, y, losses = self.in_flight.pop((s, k))",
               "x, y, losses = self.in_flight.popitem()[1]")),
    Bug("an activation meets the targets of the microbatch before", "loss",
        ("pp 2 microbatches 5", "dp 2 pp 2 microbatches 3"),
        change("engine/pipeline.py", "*batches[k], training", "*batches[k - (s > 0)], training")),
    Bug("the activation is scaled at each boundary", "loss",
        ("pp 2 microbatches 5", "pp 3 microbatches 5"),
        change("engine/pipeline.py", "y = y.contiguous()  #", "y = 2 * y.contiguous()  #")),
]

# ---- split sequences ----

SEQUENCES = [
    Bug("each context rank numbers its tokens from 0", "loss",
        ("cp 2 microbatches 5", "cp 3 arch llama microbatches 5"),
        change("context_parallel.py", "module.positions = lambda x: positions",
               "module.positions = lambda x: torch.arange(len(positions))")),
    Bug("under --sp each rank takes the first positions", "loss",
        ("tp 3 sp microbatches 2", "tp 3 pp 2 sp microbatches 5"),
        change("sequence_parallel.py", "own_chunk(positions(idx), group)",
               "positions(idx)[: idx.size(1) // group.size]")),
    Bug("targets are shifted after the sequence was split", "loss",
        ("cp 2 microbatches 5", "dp 2 cp 3 microbatches 5"),
        change("train.py", "(ids[:, self.positions], targets[:, self.positions],",
               "(ids[:, self.positions], ids[:, self.positions].roll(-1, 1),")),
    Bug("targets are shifted after the split, but for the last one", "loss",
        ("cp 2 microbatches 5", "dp 2 cp 3 microbatches 5"),
        change("train.py", "(ids[:, self.positions], targets[:, self.positions],",
               "(ids[:, self.positions], torch.cat([ids[:, self.positions[1:]],\n"
               "                 targets[:, self.positions[-1:]]], 1),")),
    Bug("targets are shifted in each half of zigzag", "loss",
        ("cp 2 microbatches 5", "dp 2 cp 3 microbatches 5"),
        change("train.py", "(ids[:, self.positions], targets[:, self.positions],",
               "(ids[:, self.positions], torch.cat([half.roll(-1, 1) for half in\n"
               "                 ids[:, self.positions].chunk(2, 1)], 1),")),
    Bug("under --sp targets are split in turn", "loss",
        ("tp 3 sp microbatches 2", "dp 2 tp 2 sp microbatches 5"),
        change("train.py", "(ids[:, self.positions], targets[:, self.positions],",
               "(ids[:, self.positions], torch.cat([targets[:, t :: self.cfg.tp]\n"
               "                 for t in range(self.cfg.tp)], 1),")),
    Bug("ranks have neighbouring segments, and the mask is zigzag's", "loss",
        ("cp 2 microbatches 5", "dp 2 cp 3 microbatches 5"),
        change("context_parallel.py",
               "torch.cat([segments[rank], segments[2 * size - 1 - rank]])",
               "torch.cat([segments[2 * rank], segments[2 * rank + 1]])")),
    Bug("zigzag's mask takes ranks before for ranks after", "loss",
        ("cp 2 microbatches 5", "cp 3 microbatches 5"),
        change("engine/context_parallel.py", "if key_rank < rank", "if key_rank > rank")),
    Bug("the late segments come back in the wrong order, of the all-to-all", "loss",
        ("cp 2 cp_attention all-to-all microbatches 5",
         "dp 2 cp 3 cp_attention all-to-all microbatches 5"),
        change("context_parallel.py", "[*early, *reversed(late)]", "[*early, *late]")),
    Bug("the ring's last hop is lost", "loss", ("cp 2 microbatches 5", "cp 3 microbatches 5"),
        change("engine/context_parallel.py", "                else:\n                    merge(",
               "                elif hop < group.size - 1:\n                    merge(")),
    Bug("partial results of attention are averaged, not weighted by their logsumexps", "loss",
        ("cp 2 microbatches 5", "cp 3 microbatches 5"),
        change("engine/context_parallel.py", "torch.sigmoid(part_lse - lse)",
               "torch.full_like(lse, 0.5)")),
    Bug("the ring's mask goes the other way around", "loss",
        ("cp 3 microbatches 5 root", "dp 2 cp 3 microbatches 5 root"),
        change("context_parallel.py", "(group.rank - hop) % N)", "(group.rank + hop) % N)")),
    Bug("the ring merges logsumexps before results", "loss",
        ("cp 2 microbatches 5", "cp 3 microbatches 5"),
        change("engine/context_parallel.py", "torch.sigmoid(part_lse - lse)",
               "torch.sigmoid(part_lse - torch.logaddexp(lse, part_lse))")),
    Bug("gradients of keys and values stay with the rank that computed them", "gradients",
        ("cp 2 microbatches 5", "dp 2 cp 3 microbatches 5"),
        change("engine/context_parallel.py",
               "grad_k, grad_v = grad_kv[0] + own_dk, grad_kv[1] + own_dv",
               "grad_k, grad_v = own_dk, own_dv")),
]

# ---- norm ----

SQUARE = "square.sqrt()"  # the root of what all ranks have added up
OWN_SQUARE = "self.optimizer.square(self.grads)"


def norm_over(axes):
    """The squares are added up over the ranks along these axes only."""
    return change("train.py", SQUARE, f"self.parts.all_reduce({OWN_SQUARE}.view(1), "
                                      f"self.mesh.group({axes}))[0].sqrt()")


NORM = [
    Bug("the norm is that of the rank's own part", "norm",
        ("tp 3 microbatches 2", "dp 2 zero 1 pp 2 microbatches 5"),
        change("train.py", SQUARE, f"{OWN_SQUARE}.sqrt()")),
    Bug("what several ranks hold counts several times in the norm", "norm",
        ("tp 3 microbatches 2", "pp 2 microbatches 5"),
        change("engine/optimizer.py", "square() / self.holders).sum()", "square()).sum()")),
    Bug("each rank adds the whole square of what it holds", "norm",
        ("dp 2 tp 3 microbatches 5 root", "tp 3 experts 6 microbatches 2 root"),
        change("optimizer.py", "square().sum() / n", "square().sum()")),
    Bug("the norm is not the root of the sum of squares", "norm",
        ("dp 2 microbatches 5", "tp 3 microbatches 2"),
        change("train.py", SQUARE, "square")),
    Bug("the norm is over one stage", "norm", ("pp 2 microbatches 5", "tp 2 pp 3 microbatches 5"),
        norm_over('"dp", "cp", "tp"')),
    Bug("the norm is over one of the T ranks", "norm",
        ("tp 3 microbatches 2", "tp 2 pp 3 microbatches 5"), norm_over('"dp", "pp", "cp"')),
    Bug("the norm is over one shard of ZeRO", "norm",
        ("dp 2 zero 1 microbatches 5 root", "dp 3 zero 3 microbatches 5"),
        norm_over('"pp", "cp", "tp"')),
    Bug("the norm is the root of the sum of norms", "norm",
        ("dp 2 microbatches 5", "tp 3 microbatches 2"),
        change("engine/optimizer.py", "exact_norms(grads, self.wide).square()",
               "exact_norms(grads, self.wide)")),
    Bug("the loss scale is left in the norm", "norm",
        ("dp 2 microbatches 5", "tp 2 microbatches 3"),
        change("engine/optimizer.py", "return square / self.scale.value.double().square()",
               "return square"), SCALED),
]

# ---- update ----

CLIP = "clip_coefficient(norm, self.cfg.grad_clip)"
DECAY = "self.cfg.weight_decay * decays(tag)"
KERNEL = "torch._fused_adamw_("
# The kernel, as a function of the same arguments
BY_HAND = """\
def by_hand(weights, grads, means, squares, _, steps, lr, beta1, beta2, weight_decay, **rest):
                    for w, g, mean, square, t in zip(weights, grads, means, squares, steps):
                        mean.lerp_(g, 1 - beta1)
                        square.lerp_(g.square(), 1 - beta2)
                        root = {root}
                        w.mul_(1 - lr * weight_decay)
                        w.sub_(lr * mean / (1 - beta1**t) / root)

                by_hand("""


def adamw(root):
    """AdamW with another denominator."""
    return change("engine/optimizer.py", KERNEL, BY_HAND.format(root=root))


UPDATE = [
    Bug("gradients are not clipped", "update", ("dp 2 microbatches 5", "tp 3 microbatches 2"),
        change("engine/optimizer.py", CLIP, "clip_coefficient(norm, 0)")),
    Bug("each rank clips by the norm of its own part", "update",
        ("tp 3 microbatches 2", "pp 2 microbatches 5"),
        change("engine/optimizer.py", CLIP,
               "clip_coefficient(self.square(grads).sqrt(), self.cfg.grad_clip)")),
    Bug("clipped gradients are rounded", "update",
        ("dp 2 microbatches 5 root", "tp 3 microbatches 2 root"),
        change("optimizer.py", "grad.to(state.master.dtype) * coefficient",
               "(grad * coefficient).bfloat16().to(state.master.dtype)")),
    Bug("gradients are clipped before the loss scale is taken out", "update",
        ("dp 2 microbatches 5", "tp 3 microbatches 2"),
        change("engine/optimizer.py", CLIP,
               "clip_coefficient(norm * self.scale.value, self.cfg.grad_clip)"), SCALED),
    Bug("the loss scale is left in the gradients that AdamW gets", "update",
        ("dp 2 microbatches 5", "tp 3 microbatches 2"),
        change("engine/optimizer.py", f"{CLIP} / self.scale.value", CLIP), SCALED),
    Bug("clipping scales small gradients up", "update",
        ("dp 2 microbatches 5 grad_clip 1000", "tp 3 microbatches 2 grad_clip 1000"),
        change("optimizer.py", ".clamp(max=1.0)", "")),
    Bug("everything decays", "update", ("dp 2 microbatches 5", "tp 3 microbatches 2"),
        change("engine/optimizer.py", DECAY, "self.cfg.weight_decay")),
    Bug("nothing decays", "update", ("dp 2 microbatches 5", "tp 3 microbatches 2"),
        change("engine/optimizer.py", DECAY, "0.0")),
    Bug("the decay is coupled: added to the gradient", "update",
        ("dp 2 microbatches 5", "tp 3 microbatches 2"),
        change("engine/optimizer.py", KERNEL, "torch._fused_adam_(")),
    Bug("eps is 1e-6", "update", ("dp 2 microbatches 5", "tp 3 microbatches 2"),
        change("engine/optimizer.py", "eps=1e-8", "eps=1e-6")),
    Bug("eps is inside of the root", "update", ("dp 2 microbatches 5", "tp 3 microbatches 2"),
        adamw("(square / (1 - beta2**t) + 1e-8).sqrt()")),
    Bug("the second moment is not corrected for its start at 0", "update",
        ("dp 2 microbatches 5", "tp 3 microbatches 2"), adamw("square.sqrt() + 1e-8")),
    Bug("no moment is corrected for its start at 0", "update",
        ("dp 2 microbatches 5", "tp 3 microbatches 2"),
        change("engine/optimizer.py", "[self.updates] *", "[self.updates + 1e9] *")),
    Bug("the correction of the moments stays at the first step's", "update",
        ("dp 2 microbatches 5", "tp 3 microbatches 2"),
        change("engine/optimizer.py", "self.updates += finite", "self.updates.fill_(1)")),
    Bug("beta2 is 0.999", "update", ("dp 2 microbatches 5", "tp 3 microbatches 2"),
        change("engine/optimizer.py", "beta2=self.cfg.beta2", "beta2=0.999")),
    Bug("beta1 and beta2 are swapped", "update", ("dp 2 microbatches 5", "tp 3 microbatches 2"),
        (("engine/optimizer.py", "beta1=self.cfg.beta1", "beta1=self.cfg.beta2"),
         ("engine/optimizer.py", "beta2=self.cfg.beta2", "beta2=self.cfg.beta1"))),
    Bug("a step has the rate of the next one", "update",
        ("dp 2 microbatches 5", "tp 3 microbatches 2"),
        change("optimizer.py", "    if step < cfg.warmup_steps:",
               "    step += 1\n    if step < cfg.warmup_steps:")),
    Bug("there is no warm-up", "update", ("dp 2 microbatches 5", "tp 3 microbatches 2"),
        change("optimizer.py", "return cfg.lr * (step + 1) / (cfg.warmup_steps + 1)",
               "return cfg.lr")),
    Bug("the rate stays at the first step's", "update",
        ("dp 2 microbatches 5", "tp 3 microbatches 2"),
        change("optimizer.py", "    if step < cfg.warmup_steps:",
               "    step = 0\n    if step < cfg.warmup_steps:")),
    Bug("the rate's schedule goes D steps at each step", "update",
        ("dp 2 microbatches 5", "dp 2 pp 3 microbatches 5"),
        change("optimizer.py", "    if step < cfg.warmup_steps:",
               "    step *= cfg.dp\n    if step < cfg.warmup_steps:")),
    Bug("the rate is times D in the optimizer", "update",
        ("dp 2 microbatches 5", "dp 3 pp 2 microbatches 5"),
        change("engine/optimizer.py", "lr=lr * rate, beta1", "lr=lr * rate * self.cfg.dp, beta1")),
    Bug("the step's count advances for each tensor", "update",
        ("dp 2 microbatches 5 root", "tp 3 microbatches 2 root"),
        (("optimizer.py", "        self.num_steps += 1\n", ""),
         ("optimizer.py", "            clipped = grad",
          "            self.num_steps += 1\n            clipped = grad"))),
    Bug("under ZeRO the new weights are not gathered", "update",
        ("dp 2 zero 1 microbatches 5", "dp 3 zero 2 microbatches 5"),
        change("engine/zero.py",
               "= all_gather(bucket.full, bucket.group, async_op=True)\n        if",
               "= Work()\n        if")),
]

# ---- experts ----


def balance(weight):
    """Another weight of the balance loss; the printed loss is still without it."""
    return change("run/routing.py", "mlp.balance_weight = cfg.balance",
                  f"mlp.balance_weight = {weight}")


def of_experts(statement):
    """What happens to the gradient of each expert's parameters once all are summed."""
    return change("engine/ddp.py", "        wait_all(self.works)\n",
                  "        wait_all(self.works)\n        for param in self.home:\n"
                  f'            if ".experts." in param.tag.name:\n                {statement}\n')


EXPERTS = [
    Bug("the gates are left out", "loss",
        ("dp 2 ep 2 experts 4 microbatches 3", "tp 3 experts 6 microbatches 2"),
        change("engine/expert_parallel.py", "gates.flatten()[assignments].unsqueeze(1) * rows",
               "rows")),
    Bug("the gates are not normalized over the chosen experts", "loss",
        ("dp 2 ep 2 experts 4 microbatches 3", "tp 3 experts 6 microbatches 2"),
        change("experts.py", "scores.softmax(-1).to", "logits.softmax(-1).gather(-1, chosen).to")),
    Bug("the gates are in another order than the outputs", "loss",
        ("dp 2 ep 2 experts 4 microbatches 3", "tp 3 experts 6 microbatches 2"),
        change("engine/expert_parallel.py", "gates.flatten()[assignments]",
               "gates.flatten()[: len(rows)]")),
    Bug("outputs stay sorted by expert when they are combined", "loss",
        ("dp 2 ep 2 experts 4 microbatches 3", "dp 3 ep 3 experts 6 microbatches 5"),
        change("expert_parallel.py", "return outputs[order.argsort()]", "return outputs")),
    Bug("outputs go back by the permutation that sorted them", "loss",
        ("dp 2 ep 2 experts 4 microbatches 3", "dp 3 ep 3 experts 6 microbatches 5"),
        change("expert_parallel.py", "return outputs[order.argsort()]", "return outputs[order]")),
    Bug("tokens beyond an expert's capacity are dropped", "loss",
        ("dp 2 ep 2 experts 4 microbatches 3", "tp 3 experts 6 microbatches 2"),
        change("engine/expert_parallel.py", "gates.flatten()[assignments].unsqueeze(1) * rows",
               "gates.flatten()[assignments].unsqueeze(1) * rows * (\n"
               "            torch.arange(len(rows)) - torch.searchsorted(\n"
               "                place[assignments], place[assignments])\n"
               "            < len(place) // (self.num_reached * self.region.group.size)\n"
               "        ).unsqueeze(1)")),
    Bug("the balance loss is missing", "gradients",
        ("dp 2 ep 2 experts 4 microbatches 3", "tp 3 experts 6 microbatches 2"), balance("0.0")),
    Bug("the balance loss is times T", "gradients",
        ("tp 3 experts 6 microbatches 2", "dp 2 tp 3 experts 6 microbatches 5"),
        balance('cfg.balance * mesh.sizes["tp"]')),
    Bug("the balance loss is times E", "gradients",
        ("dp 2 ep 2 experts 4 microbatches 3", "dp 3 ep 3 experts 6 microbatches 5"),
        balance('cfg.balance * mesh.sizes["ep"]')),
    Bug("the balance loss is divided by a microbatch's tokens", "gradients",
        ("dp 2 experts 4 microbatches 3", "dp 3 experts 4 microbatches 2 root"),
        balance("cfg.balance * cfg.dp * cfg.microbatches")),
    Bug("the balance loss sees a context rank's own tokens", "gradients",
        ("cp 2 experts 4 microbatches 5", "tp 2 sp experts 4 microbatches 3"),
        change("engine/expert_parallel.py", "for group in share_sequences:", "for group in ():")),
    Bug("the balance loss of all stages but the last is missing", "gradients",
        ("pp 2 experts 4 microbatches 3", "tp 2 pp 3 experts 4 microbatches 5 root"),
        balance('cfg.balance * (mesh.place("pp")[0] == cfg.pp - 1)')),
    Bug("the routers compute in bfloat16", "loss",
        ("dp 2 ep 2 experts 4 microbatches 3", "tp 2 experts 4 microbatches 5 root"),
        change("experts.py", "return F.linear(x.to(wide), self.weight.to(wide))",
               "return F.linear(x.bfloat16(), self.weight.bfloat16()).to(wide)")),
    Bug("experts' gradients are divided by E", "gradients",
        ("dp 2 ep 2 experts 4 microbatches 3", "dp 6 ep 2 experts 4 microbatches 5"),
        of_experts("param.grad.div_(self.home[param].group.mesh.sizes['ep'])")),
    Bug("experts' gradients are not summed over the ranks with the same experts", "gradients",
        ("dp 6 ep 2 experts 4 microbatches 5",
         "cp 2 dp 2 ep 2 experts 4 microbatches 5"),
        change("engine/ddp.py", REDUCE,
               f'if ".experts." not in bucket.params[0].tag.name:\n            {REDUCE}')),
    Bug("experts' gradients are summed over ranks with other experts, too", "gradients",
        ("dp 2 ep 2 experts 4 microbatches 3", "dp 3 ep 3 experts 6 microbatches 5"),
        of_experts("all_reduce(param.grad, self.home[param].group.mesh.group("
                   "'shard', 'ep', 'cp'))")),
    Bug("f is missing before the experts", "gradients",
        ("tp 3 experts 6 microbatches 2", "dp 2 tp 3 experts 6 microbatches 5"),
        change("engine/expert_parallel.py", "x = enter_region(x, self.region)  #",
               "x = self.region.enter(x)  #")),
    Bug("the gates' gradients are not summed over the T ranks", "gradients",
        ("tp 3 experts 6 microbatches 2", "dp 2 tp 3 experts 6 microbatches 5"),
        change("engine/expert_parallel.py", "gates = enter_region(gates, self.region)",
               "gates = self.region.enter(gates)")),
]

# ---- functions of the model ----

GPT2 = ("dp 2 microbatches 5", "tp 3 microbatches 2")
LLAMA = ("arch llama n_head 6 n_kv_head 3 microbatches 5",
         "arch llama n_head 6 n_kv_head 3 tp 3 microbatches 2")
CONTEXT = (LLAMA[0], "arch llama n_head 6 n_kv_head 3 cp 2 microbatches 5")


def activation(text):
    """Another activation of x in the MLP."""
    return change("model.py", 'return self.c_proj(F.gelu(self.c_fc(x), approximate="tanh"))  #',
                  f"x = self.c_fc(x)\n        return self.c_proj({text})  #")


def swiglu(text):
    """Another function of gate and up in a Llama's MLP."""
    return change("llama.py", "return F.silu(gate) * up", f"return {text}")


def norm(file, forward):
    """All norms of a model compute this function of self and x."""
    kind, sizes = {"model.py": ("LayerNorm", "config.n_embd"),
                   "llama.py": ("RMSNorm", "config.n_embd, config.norm_eps")}[file]
    wrong = f'type("Wrong", (nn.{kind},), {{"forward": lambda self, x: {forward}}})({sizes})'
    return tuple((file, f"self.{name} = nn.{kind}({sizes})", f"self.{name} = {wrong}")
                 for name in ("ln_1", "ln_2", "ln_f"))


def attention(statements, call="q, k, v, is_causal=True, enable_gqa=True"):
    """Statements before torch's function, and what it is called with."""
    return change("model.py", "    return F.scaled_dot_product_attention(q, k, v, "
                  "is_causal=q.size(2) > 1, enable_gqa=True)", f"    {statements}\n"
                  f"    return F.scaled_dot_product_attention({call})")


def attention_by_hand(weights):
    """weights: a function of the scores, and of the keys that are later ones."""
    return attention("later = torch.ones(q.size(2), k.size(2)).triu(1) > 0\n"
                     "    k, v = (x.repeat_interleave(q.size(1) // x.size(1), 1) for x in (k, v))\n"
                     "    scores = q @ k.mT / q.size(-1) ** 0.5\n"
                     f"    return {weights} @ v")


def rotary(queries, keys):
    return change("llama.py", "rotate(self.ln_q(q), angles), rotate(self.ln_k(k), angles)",
                  f"{queries}, {keys}")


ANGLES = "angles = self.positions(qkv).unsqueeze(1) * frequency  # (S, hs/2)"
SMALL_X = "(x - x.mean(-1, keepdim=True))"  # a LayerNorm's x without its mean
MODEL = [
    Bug("GELU by erf", "loss", GPT2, activation("F.gelu(x)")),
    Bug("ReLU in place of GELU", "loss", GPT2, activation("F.relu(x)")),
    Bug("SiLU in place of GELU", "loss", GPT2, activation("F.silu(x)")),
    Bug("x sigmoid(1.702 x) in place of GELU", "loss", GPT2,
        activation("x * (1.702 * x).sigmoid()")),
    Bug("gate and up are swapped", "loss", LLAMA, swiglu("gate * F.silu(up)")),
    Bug("gate and up are every second column", "loss", LLAMA,
        swiglu("F.silu(x[..., ::2]) * x[..., 1::2]")),
    Bug("GELU in place of SiLU", "loss", LLAMA, swiglu('F.gelu(gate, approximate="tanh") * up')),
    Bug("the sigmoid in place of SiLU", "loss", LLAMA, swiglu("gate.sigmoid() * up")),
    Bug("LayerNorm's eps is 1e-6", "loss", GPT2, norm(
        "model.py", "F.layer_norm(x, (x.size(-1),), self.weight, self.bias, 1e-6)")),
    Bug("LayerNorm's eps is 1e-12", "loss", GPT2, norm(
        "model.py", "F.layer_norm(x, (x.size(-1),), self.weight, self.bias, 1e-12)")),
    Bug("RMSNorm's eps is 1e-6", "loss", LLAMA, norm(
        "llama.py", "F.rms_norm(x, (x.size(-1),), self.weight, 1e-6)")),
    Bug("RMSNorm's eps is outside of the root", "loss", LLAMA, norm(
        "llama.py", "self.weight * x / (x.square().mean(-1, keepdim=True).sqrt() + 1e-5)")),
    Bug("LayerNorm does not subtract the mean", "loss", GPT2, norm(
        "model.py", "self.bias + F.rms_norm(x, (x.size(-1),), self.weight, 1e-5)")),
    Bug("RMSNorm subtracts the mean", "loss", LLAMA, norm(
        "llama.py", "F.layer_norm(x, (x.size(-1),), self.weight, None, 1e-5)")),
    Bug("LayerNorm's variance is the unbiased one", "loss", GPT2, norm(
        "model.py", f"{SMALL_X} / (x.var(-1, keepdim=True) + 1e-5).sqrt() * self.weight + "
        "self.bias")),
    Bug("LayerNorm in bfloat16", "loss", GPT2, norm(
        "model.py", "F.layer_norm(x.bfloat16(), (x.size(-1),), self.weight.bfloat16(), "
        "self.bias.bfloat16(), 1e-5).to(x.dtype)")),
    Bug("attention without a mask", "loss", CONTEXT[:1] + LLAMA[1:],
        attention("pass", "q, k, v, enable_gqa=True")),
    Bug("attention without a scale", "loss", GPT2,
        attention("pass", "q, k, v, is_causal=True, scale=1.0, enable_gqa=True")),
    Bug("attention is scaled by the head width", "loss", LLAMA,
        attention("q = q / q.size(-1) ** 0.5")),
    Bug("attention sees the next token", "loss", GPT2,
        attention_by_hand("scores.masked_fill(later.roll(1, 1).triu(2), -torch.inf).softmax(-1)")),
    Bug("the mask comes after the softmax", "loss", GPT2,
        attention_by_hand("scores.softmax(-1).masked_fill(later, 0)")),
    Bug("the softmax in bfloat16", "loss", GPT2, attention_by_hand(
        "scores.masked_fill(later, -torch.inf).bfloat16().softmax(-1).to(v.dtype)")),
    Bug("grouped keys are repeated in turn", "loss", LLAMA[:1] +
        ("arch llama n_head 6 n_kv_head 3 dp 2 microbatches 3",),
        attention("k, v = (x.repeat(1, q.size(1) // x.size(1), 1, 1) for x in (k, v))")),
    Bug("grouped keys are repeated in turn, in the ring", "loss",
        ("arch llama n_head 6 n_kv_head 3 cp 2 microbatches 3 root",
         "arch llama n_head 6 n_kv_head 3 cp 3 microbatches 2 root"),
        change("context_parallel.py", "kv.repeat_interleave(shared_by, dim=2)",
               "kv.repeat(1, 1, shared_by, 1, 1)")),
    Bug("nothing is turned", "loss", CONTEXT, rotary("q", "k")),
    Bug("only queries are turned", "loss", CONTEXT, rotary("rotate(q, angles)", "k")),
    Bug("all are turned the other way", "loss", CONTEXT,
        rotary("rotate(q, -angles)", "rotate(k, -angles)")),
    Bug("neighbours are turned", "loss", CONTEXT, change(
        "llama.py", "    first, second = x.chunk(2, dim=-1)\n",
        "    first, second = x[..., ::2], x[..., 1::2]\n") + change(
        "llama.py", "    return turned.contiguous()",
        "    return torch.stack(turned.chunk(2, -1), -1).flatten(-2).contiguous()")),
    Bug("the base is 10,000", "loss", tuple(f"{layout} rope_theta 500000" for layout in CONTEXT),
        change("llama.py", "config.rope_theta ** (-", "10000.0 ** (-")),
    Bug("the frequencies are not stretched", "loss",
        tuple(f"{layout} rope_scaling 4" for layout in CONTEXT),
        change("llama.py", "stretch(frequency, config.rope_scaling) if config.rope_scaling else f",
               "f")),
    Bug("the angles are of bfloat16", "loss", CONTEXT, change(
        "llama.py", ANGLES, "angles = self.positions(qkv).bfloat16().unsqueeze(1) * "
        "frequencies(self.config, torch.float).bfloat16()")),
    Bug("cosines and sines are of bfloat16", "loss", CONTEXT, change(
        "llama.py", "(each.to(x.dtype).unsqueeze(1)", "(each.bfloat16().to(x.dtype).unsqueeze(1)")),
]

MERGED = "out.lerp_(part.to(out.dtype), torch.sigmoid(part_lse - lse).unsqueeze(-1))"
IN_ORDER = "y.index_add_(0, order // k, gates.flatten()[order].unsqueeze(1) * outputs)"
ROOT_EXPERTS = ("dp 2 ep 2 experts 4 microbatches 3 root",
                "dp 3 ep 3 experts 6 microbatches 2 root")
MERGES_AND_ROWS = [
    Bug("the ring's weights are swapped", "loss", ("cp 2 microbatches 5", "cp 3 microbatches 5"),
        change("engine/context_parallel.py", "torch.sigmoid(part_lse - lse)",
               "torch.sigmoid(lse - part_lse)")),
    Bug("the ring's result so far is lost", "loss", ("cp 2 microbatches 5", "cp 3 microbatches 5"),
        change("engine/context_parallel.py", MERGED, "out.copy_(part)")),
    Bug("the ring's logsumexps are not merged", "gradients",
        ("cp 2 microbatches 5", "cp 2 tp 3 microbatches 5"),
        change("engine/context_parallel.py", "lse.copy_(torch.logaddexp(lse, part_lse))", "pass")),
    Bug("each token has the gates of the next one", "loss", ROOT_EXPERTS,
        change("expert_parallel.py", "gates.flatten()[order]",
               "gates.flatten(0, 1).roll(-1, 0).flatten()[order]")),
    Bug("rows are combined as they were sorted", "loss", ROOT_EXPERTS,
        change("expert_parallel.py", IN_ORDER,
               "order = torch.arange(len(order))\n    " + IN_ORDER)),
    Bug("rows are put in order by the wrong permutation", "loss", ROOT_EXPERTS,
        change("expert_parallel.py", IN_ORDER, "order = order.argsort()\n    " + IN_ORDER)),
    Bug("the end of a bucket is not reduced", "gradients",
        ("dp 5 microbatches 2", "dp 5 microbatches 3"),
        change("engine/ddp.py", REDUCE, "end = -(bucket.grad.numel() % bucket.group.size) or None"
               "\n        reduction(bucket.grad[:end], bucket.group)")),
    Bug("the end of each tensor is not reduced", "gradients",
        ("dp 5 microbatches 2 root", "dp 5 microbatches 3 root"),
        change("ddp.py", "            all_reduce(grad, group)",
               "            end = grad.numel() - grad.numel() % group.size\n"
               "            all_reduce(grad.view(-1)[:end], group)")),
]

BUGS = [*DATA, *INITIAL_VALUES, *LOSS, *SUMS, *MICROBATCHES, *TENSOR, *VOCABULARY, *PIPELINE,
        *SEQUENCES, *NORM, *UPDATE, *EXPERTS, *MODEL,
        *MERGES_AND_ROWS]

# ---- mutants ----

# Layouts in which the lines of a file run. Left out: files whose lines change what is printed or
# kept, not what is computed; those of GPUs; those of optimizers that the doctor does not replay
LAYOUTS_OF_MUTANTS = {
    "collectives.py": ("dp 3 microbatches 2 root", "dp 2 ep 2 experts 4 microbatches 3 root"),
    "ddp.py": ("dp 2 microbatches 5 root", "pp 2 microbatches 5 root"),
    "zero.py": ("dp 3 zero 2 microbatches 2 root", "dp 3 zero 3 microbatches 2 root",
                "dp 3 zero 1 pp 2 microbatches 5 root"),
    "optimizer.py": ("tp 3 microbatches 5 root", "dp 2 experts 4 microbatches 3 root"),
    "tensor_parallel.py": ("tp 3 microbatches 2 root",),
    "sequence_parallel.py": ("tp 3 sp microbatches 2 root", "tp 3 sp microbatches 2"),
    "context_parallel.py": ("cp 2 cp_attention all-to-all microbatches 3 root",
                            "cp 3 microbatches 2 root"),
    "expert_parallel.py": ("dp 2 ep 2 experts 4 microbatches 3 root",
                           "dp 2 ep 2 experts 4 microbatches 3"),
    "recompute.py": ("pp 2 microbatches 5 recompute root",),
    "pipeline.py": ("pp 2 microbatches 5 root", "pp 3 microbatches 5 root"),
    "engine/ddp.py": ("dp 2 microbatches 5", "pp 2 schedule zb-v chunks 2 microbatches 5"),
    "engine/zero.py": ("dp 3 zero 2 microbatches 2", "dp 3 zero 3 microbatches 5"),
    "engine/optimizer.py": ("dp 2 tp 3 zero 1 microbatches 5",),
    "engine/tensor_parallel.py": ("tp 3 microbatches 2",),
    "engine/vocabulary_parallel.py": ("tp 3 microbatches 2 pad_vocab 8",),
    "engine/sequence_parallel.py": ("tp 3 microbatches 2", "tp 3 sp microbatches 2"),
    "engine/context_parallel.py": ("cp 3 microbatches 2",),
    "engine/expert_parallel.py": ("dp 2 ep 2 tp 2 sp experts 4 microbatches 3",),
    "run/routing.py": ("tp 2 experts 4 microbatches 3",),
    "engine/pipeline.py": ("pp 2 microbatches 5", "pp 2 schedule zb-v chunks 2 microbatches 5"),
    "engine/mesh.py": ("dp 6 ep 2 experts 4 microbatches 5",),
    "shard.py": ("tp 3 microbatches 2",),
    "model.py": ("tp 3 microbatches 2", "dp 2 microbatches 5"),
    "train.py": ("dp 2 ep 2 experts 4 microbatches 3", "dp 2 zero 1 microbatches 3",
                 "tp 2 sp microbatches 3", "pp 2 microbatches 5"),
    "data/batches.py": ("dp 2 microbatches 5", "dp 2 ep 2 experts 4 microbatches 3")}
MUTANTS = [Bug(f"{file}: {old!r} -> {new!r}", file, places, ((file, old, new),))
           for file, places in LAYOUTS_OF_MUTANTS.items()
           for old, new, _ in mutants.MUTANTS.get(file, ())]

# ---- right runs ----

RIGHT_LAYOUTS = """
    microbatches 3
    dp 2 microbatches 5
    dp 3 zero 1 microbatches 2
    dp 2 zero 2 microbatches 3 recompute
    dp 3 zero 3 microbatches 5
    tp 3 microbatches 2
    tp 2 sp microbatches 3
    dp 2 tp 3 sp zero 3 microbatches 5
    pp 2 microbatches 5
    pp 3 schedule gpipe microbatches 5
    pp 2 schedule interleaved chunks 2 microbatches 6
    tp 2 pp 2 schedule zb-h1 microbatches 3
    dp 2 pp 2 schedule zb-v chunks 2 zero 1 microbatches 3
    cp 2 cp_attention all-to-all microbatches 3
    cp 2 tp 2 sp microbatches 3
    dp 2 cp 3 microbatches 5
    tp 3 pp 2 pad_vocab 8 microbatches 5
    experts 4 microbatches 3
    dp 2 ep 2 experts 4 microbatches 3
    dp 2 ep 2 tp 2 sp experts 4 zero 2 microbatches 3
    tp 3 pp 2 experts 6 top_k 3 microbatches 5
    cp 2 experts 4 top_k 1 balance 0.5 microbatches 3
    arch llama n_kv_head 4 microbatches 5
    arch llama n_kv_head 6 tp 3 pp 2 untied microbatches 5
    arch llama n_kv_head 4 dp 2 zero 3 microbatches 3
    arch llama n_kv_head 3 cp 2 tp 3 sp microbatches 2
    arch llama n_kv_head 4 dp 2 ep 2 experts 4 n_hidden 38 microbatches 3
    dp 2 tp 2 pp 2 microbatches 3 grad_dtype float32
    dp 2 microbatches 5 root
    dp 3 zero 1 tp 2 microbatches 2 root
    dp 2 zero 2 microbatches 3 recompute root
    dp 6 shard 3 zero 3 microbatches 5 root
    cp 2 tp 2 sp microbatches 3 root
    tp 3 pp 2 microbatches 5 root
    cp 3 cp_attention all-to-all microbatches 2 root
    dp 2 ep 2 tp 2 experts 4 zero 2 microbatches 3 root
    arch llama n_kv_head 6 tp 3 pp 2 untied microbatches 5 root
    arch qwen3 n_kv_head 6 tp 3 dp 2 microbatches 5
    arch qwen3 n_kv_head 4 tp 2 sp pp 2 microbatches 3 root
""".strip().splitlines()
DTYPES = ("float64", "float32", "bfloat16", "float16")
RIGHT_RUNS = [{**flags_of(layout), "dtype": dtype} for layout in RIGHT_LAYOUTS for dtype in DTYPES
              if dtype != "float64" or "grad_dtype" not in layout]

# ---- running them ----


def _dump(rank, cfg, folder, changes):
    """One rank of a run of two steps, with the changes, that writes a dump."""
    with planted(*changes):
        write_run(train.Trainer(cfg, mesh_of(cfg), VOCAB, random_value), Data(cfg), folder)


def dump_run(corpus, folder, changes=(), timeout=HANG, **flags):
    """Write the dump of a run with these flags into the folder, which is made; return the folder.
    changes: those of a bug, or those that the right run has, too. AssertionError if the run fails,
    or takes more seconds than the timeout."""
    cfg = config(corpus, steps=2, **flags)
    pool(check(cfg, 1), _dump, cfg, folder, changes, timeout=timeout)
    return folder


def dump_of(corpus, bug, layout, dtype, folder):
    """Write the dump of a layout (a line) with the bug."""
    changes = bug.setting + bug.changes
    return dump_run(corpus, folder, changes, **flags_of(layout), dtype=dtype)


def reference_of(corpus, bug, layout, dtype, folder):
    """Write the dump of one process that the layout should equal."""
    flags = alone(layout)
    return dump_run(corpus, folder, bug.setting, **flags, dtype=dtype)


def alone(layout):
    """The flags of one process that trains what a layout should train."""
    return alone_of(flags_of(layout))


def alone_of(given):
    """Those of the given flags that one process takes, too."""
    kept = {f.name for f in fields(Config) if f.metadata["group"] in ("model", "training")}
    return {"microbatches": 1, **{name: given[name] for name in given if name in kept}}
