"""plan.py as an adviser: six jobs' first rows, other programs' words, mixtures, calibration."""

import contextlib
import io
import json
import re
import sys
import tomllib
from functools import cache

import pytest

import plan
from planner import costs, habits, memory, programs
from planner.mixture import Mixture
from planner.search import Search

# {job: its flags}
JOBS = {
    "175B": "--model gpt3-175b --gpus 1024 --gpu h100",
    "70B": "--model llama-70b --gpus 64 --gpu h100 --batch-size 1024",
    "mixtral": "--model llama-7b --n-kv-head 8 --experts 8 --expert-width 14336 --gpus 64 "
               "--gpu h100 --batch-size 1024",
    "131k": "--model llama-7b --n-kv-head 8 --n-hidden 14336 --vocab-size 128256 "
            "--block-size 131072 --batch-size 64 --gpus 64 --gpu h100",
    "405B": "--model llama-405b --gpus 16384 --gpu h100 --batch-size 2048",
    "7B": "--model llama-7b --gpus 8 --gpu h100 --batch-size 512"}
# {job: {field: values of the first row}}, with who runs that. NeMo: nemo/collections/llm/recipes
RUN_BY = {
    # NeMo's gpt3_175b: T 4, P 8, 6 chunks. Megatron, arXiv 2104.04473: T 8, P 8 to 12
    "175B": {"tp": (4, 8), "pp": (8, 12), "cp": (1,), "zero": (0, 1), "schedule": ("interleaved",)},
    # NeMo's llama3_70b: T 4, P 4, 5 chunks
    "70B": {"tp": (4, 8), "pp": (4,), "cp": (1,), "zero": (1,),
            "schedule": ("1f1b", "interleaved")},
    # Megatron's guide, megatron/core/transformer/moe/README.md: E 8 and T 1 is better than E 4 and
    # T 2; parallelism as small as memory allows
    "mixtral": {"tp": (1,), "pp": (1, 4), "ep": (8,), "cp": (1,), "zero": (1, 2)},
    # NeMo's long sequences: T 4, C 4 on 128 GPUs; its llama3_8b_128k: T 4, P 2, C 8
    "131k": {"tp": (4,), "cp": (4, 8), "pp": (1, 2), "zero": (1,)},
    # Llama 3, arXiv 2407.21783, table 4: T 8, P 16. Megatron Bridge's recipe: T 8, P 8, C 2
    "405B": {"tp": (8,), "pp": (8, 16), "cp": (1, 2), "zero": (1,), "schedule": ("interleaved",)},
    # DeepSpeed's and Megatron's data parallelism with a distributed optimizer
    "7B": {"dp": (8,), "tp": (1,), "pp": (1,), "cp": (1,), "zero": (1, 2, 3)}}


@cache
def answer(flags):
    """What plan.py prints."""
    asked = sys.argv
    sys.argv = ["plan.py", *flags.split()]
    try:
        with contextlib.redirect_stdout(io.StringIO()) as out:
            plan.main()
    finally:
        sys.argv = asked
    return out.getvalue()


def layouts(flags):
    return json.loads(answer(flags + " --json"))["layouts"]


@pytest.mark.parametrize("job", JOBS)
def test_the_first_row_is_what_people_run(job):
    first, *others = rows = layouts(JOBS[job])
    for name, values in RUN_BY[job].items():
        assert first[name] in values, (name, first["command"])
    assert first["sp"] == (first["tp"] > 1) and not first["recompute"]
    device = plan.DEVICES["h100"]
    assert max(row["memory_gb"]["total"] for row in rows) <= 80 * 0.93 == device.usable
    kinds = [habits.technique_of(memory.Layout(*(row[name] for name in memory.Layout._fields)))
             for row in rows]
    assert len({*kinds}) == len(rows) == 6  # one row per kind
    assert all(row["trades"] for row in rows)
    assert all(re.match(r"\d+\.\d% (faster|slower), ", row["trades"]) for row in others)
