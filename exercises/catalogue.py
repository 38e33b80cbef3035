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
)
