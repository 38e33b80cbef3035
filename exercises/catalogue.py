"""The exercises in order: what is to be written, where the repository has it, hints."""

from importlib import import_module
from typing import NamedTuple

RANKS = 4  # of each attempt


class Exercise(NamedTuple):
    name: str  # of its file, without .py
    title: str
    forms: tuple  # names of the functions and classes to write
    where: str  # where the repository has them: shown when the exercise is solved
    judged_by: str  # the file and function that judge an attempt: judge(make_mesh, forms)
    hints: tuple

    def judge(self, make_mesh, forms):
        """Returns lines of figures beside their formulas. Raises judge.Wrong: one line."""
        file, function = self.judged_by.split(".")
        return getattr(import_module(f"exercises.{file}"), function)(make_mesh, forms)


EXERCISES = (
    Exercise(
        "e01_reduce_scatter", "ring reduce-scatter", ("reduce_scatter",),
        "collectives.py: reduce_scatter", "messages.judge_reduce_scatter",
        ("Chunk r has to end its way on rank r. So in the last hop rank r receives chunk r, and "
         "chunk r starts its way on rank r + 1.",
         "In hop h rank r sends chunk (r - 1 - h) % N and receives chunk (r - 2 - h) % N.",
         "Receive into a new tensor (torch.empty_like), wait, then combine(chunk, received).")),
    Exercise(
        "e02_all_gather", "ring all-gather", ("all_gather",),
        "collectives.py: all_gather", "messages.judge_all_gather",
        ("In the first hop only a rank's own chunk is valid: send that.",
         "In hop h rank r sends chunk (r - h) % N, and receives chunk (r - h - 1) % N.",
         "Receive straight into the chunk: nothing is added.")),
    Exercise(
        "e03_all_reduce", "all-reduce in buckets, while backward goes on", ("BucketDDP",),
        "engine/ddp.py: DDP (ddp.py has the plain form, without buckets)",
        "replicas.judge_buckets",
        ("One hook for all parameters: append the parameter to a list; when the next would not "
         "fit, send the list as a bucket.",
         "flat = torch.cat([param.grad.flatten() for param in bucket]). Keep (bucket, flat, work).",
         "In gradients(): send what is left, wait() for each Work, and cut the flat tensors: "
         "flat.split([param.numel() for param in bucket]). Set param.grad = None for the next "
         "step.")),
    Exercise(
        "e04_zero1", "ZeRO-1's step", ("ZeRO1",),
        "zero.py: ZeRO1", "replicas.judge_zero1",
        ("self.weights = [own_chunk(param.data, ...) for param in self.params]: views, so that a "
         "step in place changes the parameter.",
         "reduce_scatter(param.grad, replicas) sums in place; then own_chunk(param.grad, replicas).",
         "publish(): all_gather(param.data, replicas) for each parameter.")),
    Exercise(
        "e05_zero3", "ZeRO-3's gather and free", ("gather", "Gathered"),
        "zero.py: gather, Gathered", "replicas.judge_zero3",
        ("forward(chunk): an empty whole tensor; copy the chunk into own_chunk(whole, replicas); "
         "all_gather(whole, replicas).",
         "backward(grad): reduce_scatter a contiguous clone of grad; its own_chunk is the chunk's.",
         "Gather inside of the function that checkpoint() runs. What is gathered outside is kept.")),
    Exercise(
        "e06_f_and_g", "f and g of tensor parallelism", ("copy_to_ranks", "sum_over_ranks"),
        "tensor_parallel.py: copy_to_ranks, sum_over_ranks", "slices.judge_f_and_g",
        ("Every rank used x: by the chain rule the gradient of x is the sum over all its uses.",
         "WithBackward.apply(x, lambda x: ..., lambda grad: ...): one of the two is an all-reduce, "
         "the other returns what it gets.",
         "all_reduce(x.clone(memory_format=torch.contiguous_format), group).")),
    Exercise(
        "e07_column_and_row", "column- and row-parallel layers", ("Column", "Row"),
        "tensor_parallel.py: Column, Row", "slices.judge_linear",
        ("Rows of W are dim 0: split(linear.weight, 0, group, parts); the bias likewise.",
         "Row: split(linear.weight, 1, group); the bias stays linear.bias.",
         "Row: y = g(F.linear(x, weight), group), then the bias, if there is one.")),
    Exercise(
        "e08_vocabulary_loss", "cross-entropy of split logits", ("vocabulary_loss",),
        "tensor_parallel.py: vocabulary_loss", "slices.judge_vocabulary_loss",
        ("largest = all_reduce(logits.detach().amax(-1), group, maximum): it cancels, so it needs "
         "no gradient.",
         "local, outside = to_local(targets, *words); logits.gather(-1, local.unsqueeze(-1)) has "
         "each target's logit, or nonsense where `outside` says so: mask that with 0.",
         "sum_over_ranks(torch.stack([sum_exp, at_target]), group) sums both in one message. The "
         "loss of a token is sum_exp.log() + largest - at_target.")),
    Exercise(
        "e09_sequence_parallel", "sequence parallelism: enter and leave",
        ("gather_tokens", "scatter_tokens"),
        "sequence_parallel.py: gather_tokens, scatter_tokens", "slices.judge_sequence",
        ("Write two functions without backward first: one gathers, one scatters a sum. Each is the "
         "other's backward.",
         "Gather into a tensor (T, B, S/T, C), whose chunk t is rank t's; then "
         ".movedim(0, 1).flatten(1, 2) puts the tokens side by side.",
         "Scatter: x.unflatten(1, (T, -1)).movedim(1, 0), a contiguous clone of that, "
         "reduce_scatter, and take entry group.rank.")),
)
