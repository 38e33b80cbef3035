"""The exercises in order: which functions to write, where the repository has them, hints."""

from importlib import import_module
from typing import NamedTuple

RANKS = 4  # ranks of an attempt


class Exercise(NamedTuple):
    name: str  # the file's name, without .py
    title: str
    forms: tuple  # names of the functions and classes to write
    where: str  # where the repository has them: shown when the exercise is solved
    judged_by: str  # "FILE.FUNCTION": the function that judge() calls
    hints: tuple

    def judge(self, make_mesh, forms):
        """Judge an attempt. make_mesh(dp=4) makes a mesh whose messages are watched (board.py);
        forms: {name: the learner's function or class}. Returns lines, each with a figure next to
        its formula. Raises judge.Wrong, with one line, if the attempt is wrong."""
        file, function = self.judged_by.split(".")
        return getattr(import_module(f"extras.exercises.{file}"), function)(make_mesh, forms)


EXERCISES = (
    Exercise(
        "e01_reduce_scatter", "ring reduce-scatter", ("reduce_scatter",),
        "collectives.py: reduce_scatter", "messages.judge_reduce_scatter",
        ("Chunk r must finish on rank r, so rank r receives it in the last hop, and chunk r starts "
         "on rank r + 1.",
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
        "engine/ddp.py: DDP; ddp.py: DDP (without buckets)",
        "replicas.judge_buckets",
        ("One hook for all parameters: it appends the parameter to a list. If the parameter would "
         "not fit, first send the list as a bucket.",
         "flat = torch.cat([param.grad.flatten() for param in bucket]). Keep (bucket, flat, work).",
         "In gradients(): send what is left, wait() for each Work, and cut the flat tensors: "
         "flat.split([param.numel() for param in bucket]). Set param.grad = None for the next "
         "step.")),
    Exercise(
        "e04_zero1", "ZeRO-1's step", ("ZeRO1",),
        "zero.py: ZeRO1", "replicas.judge_zero1",
        ("self.weights = [own_chunk(param.data, ...) for param in self.params]: views, so a step "
         "in place changes the parameter.",
         "reduce_scatter(param.grad, replicas) sums in place; then take own_chunk of it.",
         "publish(): all_gather(param.data, replicas) for each parameter.")),
    Exercise(
        "e05_zero3", "ZeRO-3's gather and free", ("gather_weight", "Gathered"),
        "zero.py: gather_weight, Gathered", "replicas.judge_zero3",
        ("forward(chunk): an empty whole tensor; copy the chunk into own_chunk(whole, replicas); "
         "all_gather(whole, replicas).",
         "backward(grad): reduce_scatter a contiguous clone of grad; own_chunk of that is the "
         "chunk's gradient.",
         "Gather inside the function that recompute() runs: weights gathered before are kept.")),
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
        ("First write two functions without backward: one gathers, one scatters a sum. Each is the "
         "other's backward.",
         "Gather into a tensor (T, B, S/T, C), whose chunk t is rank t's; then "
         ".movedim(0, 1).flatten(1, 2) puts the tokens side by side.",
         "Scatter: x.unflatten(1, (T, -1)).movedim(1, 0), a contiguous clone of that, "
         "reduce_scatter, and take entry group.rank.")),
    Exercise(
        "e10_ring_attention", "zigzag, and two softmaxes merged in a ring",
        ("zigzag", "ring_attention"),
        "context_parallel.py: zigzag, ring_attention", "tokens.judge_ring_attention",
        ("torch.arange(S).tensor_split(2 * size) are the segments; rank r has segments r and "
         "2 * size - 1 - r.",
         "After `hop` hops a rank has the keys of rank (rank - hop) % N: their positions say what "
         "to hide (scores.masked_fill(later, -inf)). Stack k and v: one message.",
         "new = torch.maximum(largest, scores.detach().amax(-1, keepdim=True)); numerator = "
         "numerator * exp(largest - new) + exp(scores - new) @ v; the denominator likewise. (new "
         "cancels, so it needs no gradient: detach().)")),
    Exercise(
        "e11_experts", "dispatch and combine of experts", ("dispatch_and_combine",),
        "expert_parallel.py: dispatch_and_combine", "tokens.judge_experts",
        ("chosen.flatten().argsort(stable=True) sorts the B * S * k choices by expert; choice i is "
         "of token i // k.",
         "torch.bincount(chosen.flatten(), minlength=E * n).view(E, n) counts the rows for each "
         "rank's experts; one all_to_all(list(to_run), list(to_send), group) tells the others.",
         "send_rows there, run_by_expert, send_rows back with sent and received swapped; then "
         "y.index_add_(0, token, gate * output).")),
    Exercise(
        "e12_one_f_one_b", "the order of GPipe and 1F1B", ("gpipe", "one_f_one_b"),
        "schedules.py: gpipe, one_f_one_b", "orders.judge_orders",
        ("num_warmup = P - 1 - rank, but never more than m.",
         "Warm up num_warmup forwards; [\"F\", \"B\"] for the m - num_warmup others; then "
         "num_warmup backwards.")),
    Exercise(
        "e13_interleaved", "interleaved 1F1B", ("interleaved",),
        "schedules.py: interleaved", "orders.judge_interleaved",
        ("Forward i of the m * v forwards runs chunk i // P % v; backward i runs chunk "
         "v - 1 - i // P % v.",
         "num_warmup = (v - 1) * P + 2 * (P - 1 - rank); with v = 1 it is P - 1 - rank.")),
    Exercise(
        "e14_own_schedule", "a schedule of your own that beats 1F1B", ("own_schedule",),
        "schedules.py: zero_bubble (with depth 1: zb-h1)",
        "orders.judge_own_schedule",
        ("Start from 1F1B, with I and W instead of each B. Where does a rank wait?",
         "The last rank has work all the time. If it puts its Ws off, its Is come earlier, and the "
         "ranks before it wait less.",
         "Rank r puts off r Ws: W of microbatch k comes after I of microbatch k + r; the Ws that "
         "are left come at the end.")),
    Exercise(
        "e15_tied_norm", "the tied matrix, and the global norm", ("tie_ends", "square"),
        "pipeline.py: tie_ends; optimizer.py: square, of the class AdamW",
        "states.judge_tied_norm",
        ("Append to both tuples: tag.sum_over += (group,). But first ask: are the two matrices one "
         "Parameter, and is group.size > 1?",
         "Square in float64, add up, divide by n, add that to the sum so far.")),
    Exercise(
        "e16_checkpoint", "a checkpoint for another layout", ("runs",),
        "shard.py: runs, of the class Tag", "states.judge_checkpoint",
        ("One index along dim has inner = shape[dim + 1:].numel() elements side by side; there are "
         "shape[:dim].numel() rows of shape[dim] * inner elements.",
         "Walk over rows, then ranges. Keep `position`, the place in the flattened slice: a range "
         "covers position to position + (end - begin) * inner. Cut that by start and stop.",
         "It starts in the full tensor at (row * shape[dim] + begin) * inner + what was cut off.")),
)
