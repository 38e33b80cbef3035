"""Fifteen wrong lines in this repository's own files, for python -m extras.exercises break: bugs
that trainers have had."""

from typing import NamedTuple


class WrongLine(NamedTuple):
    name: str
    layout: dict  # {flag: value}
    file: str
    right: str  # text that is in the file exactly once
    wrong: str  # the text that takes its place


REPLICAS = {"dp": 2}
SLICES = {"tp": 2}
STAGES = {"pp": 2, "microbatches": 3}
WRONG_LINES = (
    WrongLine("the loss is divided by a replica's own tokens", REPLICAS, "pipeline.py",
              "self.tokens = cfg.batch_size * cfg.block_size",
              "self.tokens = cfg.batch_size * cfg.block_size // cfg.dp"),
    WrongLine("every replica takes the same part of the batch", REPLICAS, "data/batches.py",
              "own_starts = np.split(starts, n_data_ranks)[index]",
              "own_starts = np.split(starts, n_data_ranks)[0]"),
    WrongLine("gradients are averaged, of a loss that is a mean", REPLICAS, "ddp.py",
              "all_reduce(grad, group)", "all_reduce(grad, group).div_(group.size)"),
    WrongLine("gradients are not summed over the replicas", REPLICAS, "ddp.py",
              "for group in param.tag.sum_over:", "for group in param.tag.sum_over[1:]:"),
    WrongLine("gradients are not zeroed between steps", SLICES, "ddp.py",
              "grad, param.grad = param.grad, None", "grad = param.grad"),
    WrongLine("ZeRO-2 keeps only the last microbatch's gradient",
              {"dp": 2, "zero": 2, "microbatches": 3}, "zero.py",
              "self.sums[param] = self.sums.get(param, 0) + chunk",
              "self.sums[param] = chunk.clone()"),
    WrongLine("f is missing: its backward sums nothing", SLICES, "tensor_parallel.py",
              "return WithBackward.apply(x, lambda x: x, lambda grad: sum_of_copy(grad, group))",
              "return x"),
    WrongLine("g's backward sums, too, after a row", SLICES, "tensor_parallel.py",
              "y = self.g(partial_y, self.group)",
              "y = self.g(copy_to_ranks(partial_y, self.group), self.group)"),
    WrongLine("the row bias is added on each of the T ranks", SLICES, "tensor_parallel.py",
              "partial_y = F.linear(x, self.weight)  # (B, S, out), partial over tp\n"
              "        y = self.g(partial_y, self.group)\n"
              "        return y if self.bias is None else y + self.bias",
              "partial_y = F.linear(x, self.weight, self.bias)\n"
              "        return self.g(partial_y, self.group)"),
    WrongLine("--sp: LayerNorm's gradients are not summed", {"tp": 2, "sp": True}, "shard.py",
              "if sum_gradients:", 'if sum_gradients and ".ln_" not in param.tag.name:'),
    WrongLine("--cp: each rank counts positions from 0", {"cp": 2}, "context_parallel.py",
              "module.positions = lambda x: positions",
              "module.positions = lambda x: torch.arange(len(positions))"),
    WrongLine("the tied matrix's two terms are not summed", STAGES, "pipeline.py",
              "weight.tag.sum_over += (group,)", "pass"),
    WrongLine("what T ranks hold counts T times in the norm", {**SLICES, "grad_clip": 1.0},
              "optimizer.py", "square += grad.double().square().sum() / n",
              "square += grad.double().square().sum()"),
    WrongLine("LayerNorms and biases decay, too", SLICES, "optimizer.py",
              'return len(tag.shape) > 1 and tag.name.endswith("weight")', "return True"),
    WrongLine("the second moment is not corrected", {}, "optimizer.py",
              "square = self.square / (1 - beta2**num_steps)", "square = self.square"),
)
