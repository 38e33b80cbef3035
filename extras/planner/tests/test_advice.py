"""The planner as an adviser: six jobs' first rows, other programs' words, mixtures, calibration."""

import contextlib
import io
import json
import math
import os
import re
import shlex
import subprocess
import sys
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest

import extras.planner.__main__ as plan
import schedules
from extras.planner import calibrate, costs, habits, memory, programs
from extras.planner.mixture import Mixture
from extras.planner.search import Search

# {job: its flags}
JOBS = {
    "175B": "--model gpt3-175b --gpus 1024 --gpu h100",
    "70B": "--model llama-70b --gpus 64 --gpu h100 --batch-size 1024",
    "mixtral": "--model mixtral-8x7b --gpus 32 --gpu h100 --batch-size 256",
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
    # NeMo's mixtral_8x7b: T 1, P 4, E 8. Megatron's guide, megatron/core/transformer/moe/README.md:
    # E 8 and T 1 is better than E 4 and T 2
    "mixtral": {"tp": (1,), "pp": (4,), "ep": (8,), "cp": (1,), "zero": (1, 2)},
    # NeMo's long sequences: T 4, C 4 on 128 GPUs; its llama3_8b_128k: T 4, P 2, C 8
    "131k": {"tp": (4,), "cp": (4, 8), "pp": (1, 2), "zero": (1,)},
    # Llama 3, arXiv 2407.21783, table 4: T 8, P 16. Megatron Bridge's recipe: T 8, P 8, C 2
    "405B": {"tp": (8,), "pp": (8, 16), "cp": (1, 2), "zero": (1,), "schedule": ("interleaved",)},
    # DeepSpeed's and Megatron's data parallelism with a distributed optimizer
    "7B": {"dp": (8,), "tp": (1,), "pp": (1,), "cp": (1,), "zero": (1, 2, 3)}}


@cache
def answer(flags):
    return answer_of(flags.split())


def answer_of(words):
    """What the planner prints."""
    asked = sys.argv
    sys.argv = ["planner", *words]
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
    assert max(row["memory_gb"]["total"] for row in rows) <= 0.93 * 80  # --reserve
    kinds = [habits.kind_of_layout(memory.Layout(*(row[name] for name in memory.Layout._fields)))
             for row in rows]
    assert len({*kinds}) == len(rows) == 6  # one row per kind
    assert all(row["trades"] for row in rows)
    assert all(re.match(r"\d+\.\d% (faster|slower), ", row["trades"]) for row in others)


# Recipes of Megatron Bridge for H100s in BF16, src/megatron/bridge/perf_recipes at 067f987: {flags
# of a job: layout of the recipe}. Whole experts are on E x T ranks here, so E is theirs / T
RECIPES = {
    "--model llama3-8b --gpus 8 --batch-size 128": "--cp 2 --microbatches 32",
    "--model llama3-70b --gpus 64 --batch-size 256":
        "--tp 4 --pp 4 --cp 2 --sp --schedule interleaved --chunks 5 --microbatches 128",
    "--model llama-405b --gpus 512 --batch-size 768":
        "--tp 8 --pp 8 --cp 2 --sp --schedule interleaved --chunks 8 --microbatches 192",
    "--model llama-405b --gpus 1024 --batch-size 1536":
        "--tp 8 --pp 8 --cp 2 --sp --schedule interleaved --chunks 8 --microbatches 192",
    "--model qwen3-30b-a3b --gpus 16 --batch-size 1024": "--ep 16 --microbatches 64",
    "--model qwen3-235b-a22b --gpus 256 --batch-size 8192":
        "--tp 2 --pp 8 --ep 16 --sp --schedule interleaved --chunks 4 --microbatches 512",
    "--model deepseek-v3 --gpus 1024 --batch-size 16384":
        "--tp 2 --pp 8 --ep 32 --sp --schedule interleaved --chunks 4 --microbatches 256"}


def test_megatron_bridges_recipes_are_as_the_page_says():
    """Its table: first row, seconds of the recipe over the fastest's, GB as train.py holds them."""
    page = Path(__file__).parents[3].joinpath("docs/which-layout.md").read_text()
    table = page.split("| job | first row | recipe |")[1].split("\n\n")[0].splitlines()[2:]
    for (job, layout), line in zip(RECIPES.items(), table, strict=True):
        _, _, first, _, ratio, gb, _ = (cell.strip() for cell in line.split("|"))
        asked = job + " --gpu h100 --grad-dtype float32"
        found = json.loads(answer(f"{asked} {layout} --zero 1 --layout --json"))
        (row,), best = found["layouts"], found["best"]
        assert ratio == f"{row['step_s'] / best['step_s']:.2f}", job
        assert gb == f"{row['memory_gb']['total']:.1f}", job
        row = layouts(asked + " --for megatron --top 1")[0]
        words = [f"{letter} {row[name]}" for letter, name in zip("TPCE", ("tp", "pp", "cp", "ep"),
                                                                 strict=True) if row[name] > 1]
        words += [f"{row['chunks']} chunks"] if row["cp"] > 1 else []
        assert first == ", ".join(words + ["recompute"] * row["recompute"]), job


def test_the_first_rows_of_four_more_jobs_are_as_the_page_says():
    page = Path(__file__).parents[3].joinpath("docs/which-layout.md").read_text()
    table = page.split("| job | first row | its experts |")[1].split("\n\n")[0].splitlines()[2:]
    assert len(table) == 4
    for line in table:
        _, job, first, *_ = (cell.strip(" `") for cell in line.split("|"))
        row = layouts(job + " --top 1")[0]
        words = [f"{letter} {row[name]}" for letter, name in zip("TPCE", ("tp", "pp", "cp", "ep"),
                                                                 strict=True) if row[name] > 1]
        words += [f"ZeRO-{row['zero']}"] + ["recompute"] * row["recompute"]
        assert first == ", ".join(words), job


# ---- Megatron-LM's words ----


@cache
def written(flags):
    """(Job, the best layout that Megatron-LM has, its words as {option: value})."""
    job, device, fixed = plan.described(plan.flags().parse_args(flags.split()))
    gpus = plan.flags().parse_args(flags.split()).gpus
    (_, layout), = Search(job, gpus, device, fixed, programs.MEGATRON).best(1, plan.BAND)
    return job, layout, options(programs.MEGATRON.written(job, layout))


def words_after_the_script(text):
    words = shlex.split(text)
    return words[words.index("pretrain_gpt.py") + 1 :]


def options(text):
    """{name: its value, or True of a switch} of the words that are printed."""
    values = {}
    for word in words_after_the_script(text):
        if word.startswith("--"):
            name = word[2:]
            values[name] = True
        else:
            values[name] = word
    return values


@pytest.mark.parametrize("job", JOBS)
def test_a_layout_is_written_in_megatrons_words(job):
    """Each option says the layout: ranks, stages, sequences."""
    job, layout, said = written(JOBS[job])
    assert not programs.MEGATRON.lacks(job, layout)
    got = [int(said[key + "-parallel-size"]) for key in ("tensor-model", "pipeline-model",
                                                        "context")]
    assert got == [layout.tp, layout.pp, layout.cp]
    batch, b = int(said["global-batch-size"]), int(said["micro-batch-size"])
    assert batch == job.batch_size == b * layout.microbatches * layout.dp
    assert ("sequence-parallel" in said) == layout.sp
    assert ("use-distributed-optimizer" in said) == (layout.zero == 1)
    assert said["attention-dropout"] == said["hidden-dropout"] == "0"
    stages = said.get("pipeline-model-parallel-layout", "|" * (layout.chunks * layout.pp - 1))
    assert spelled_out(stages).count("|") == layout.chunks * layout.pp - 1


def spelled_out(stages):
    """Stages in Megatron-LM's letters without repeats: Et*2|(t|)*2L is Ett|t|t|L."""
    stages = re.sub(r"\(([^)]+)\)\*(\d+)", lambda found: found[1] * int(found[2]), stages)
    return re.sub(r"(.)\*(\d+)", lambda found: found[1] * int(found[2]), stages)


@pytest.mark.parametrize("layers,P,schedule,v", [
    (96, 8, "interleaved", 12), (7, 3, "1f1b", 1), (2, 4, "1f1b", 1), (61, 16, "interleaved", 2),
    (126, 16, "interleaved", 8), (12, 4, "1f1b", 1)])
def test_megatrons_stages_are_train_pys(layers, P, schedule, v):
    """Each letter a layer, each part between bars a stage, in the order of the stages."""
    job = memory.Job(replace(plan.MODELS["llama-7b"], n_layer=layers), 64)
    layout = memory.Layout(pp=P, schedule=schedule, chunks=v, microbatches=64)
    got = spelled_out(programs.megatron_stages(job, layout)).split("|")
    where = schedules.placement(schedule, P, v)
    assert where == [stage % P for stage in range(P * v)]  # Megatron-LM's ranks, too
    of_ranks = memory.stages_of(job.model, schedule, P, v)
    for stage, text in enumerate(got):
        part = of_ranks[where[stage]][stage]
        assert text == "E" * part.embedding + "t" * part.blocks + "L" * part.head
    assert "".join(got) == "E" + "t" * layers + "L"


MORE_JOBS = ["--model gpt2 --gpus 8", "--model gpt3-13b --gpus 48 --pp 6 --batch-size 96",
             "--model llama-70b --gpus 32 --recompute --tp 8 --gpu h100 --batch-size 64",
             "--model llama-7b --gpus 16 --cp 2 --cp-attention all-to-all --batch-size 32",
             "--model llama-7b --gpus 16 --experts 8 --tp 2 --ep 4 --shared-width 512 "
             "--batch-size 64 --gpu h200",
             "--model llama-7b --gpus 16 --experts 8 --tp 2 --ep 4 --split-experts "
             "--batch-size 64 --gpu h200"]


# Reads [[ranks, {variable: value}, words]]. Of each: Megatron-LM's parser and its checks, then its
# configuration of the model, on an H100 without Transformer Engine
PARSER = """
import json, os, sys, torch
jobs = json.load(sys.stdin)
try:
    from megatron.training import arguments
except ImportError as error:
    sys.exit(f"not installed: {error}")
arguments.get_device_arch_version = lambda: 9
torch.cuda.get_device_capability = lambda *_: (9, 0)
for ranks, variables, words in jobs:
    os.environ.pop("CUDA_DEVICE_MAX_CONNECTIONS", None)
    os.environ.update(variables, RANK="0", WORLD_SIZE=str(ranks))
    sys.argv = ["pretrain_gpt.py", *words]
    args = arguments.parse_args()
    arguments.validate_args(args)
    args.apply_rope_fusion = False
    config = arguments.core_transformer_config_from_args(args)
    print("said", args.world_size, config.num_layers, args.data_parallel_size,
          args.virtual_pipeline_model_parallel_size or 1)
"""


def test_megatrons_own_parser_takes_the_words():
    """(On Python 3.12 and later `pip install megatron-core` brings the parser; else put a checkout
    of Megatron-LM on PYTHONPATH.)"""
    jobs = []
    for flags in [*JOBS.values(), *MORE_JOBS]:
        job, layout, _ = written(flags)
        text = programs.MEGATRON.written(job, layout)
        before = text.split("torchrun")[0].split()
        variables = dict(each.split("=") for each in before)
        jobs.append([layout.ranks, variables, words_after_the_script(text)])
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", PARSER], input=json.dumps(jobs),
                          capture_output=True, text=True, timeout=300)
    if "not installed" in done.stderr:
        pytest.skip(f"Megatron-LM's parser is {done.stderr.strip()}")
    assert done.returncode == 0, done.stderr[-3000:]
    said = [line.split()[1:] for line in done.stdout.splitlines() if line.startswith("said ")]
    for flags, numbers in zip([*JOBS.values(), *MORE_JOBS], said, strict=True):
        job, layout, _ = written(flags)
        want = [layout.ranks, job.model.n_layer, layout.dp, layout.chunks]
        assert numbers == [str(number) for number in want], flags


def test_megatrons_variable_is_printed_where_it_is_asserted():
    """arguments.py asserts CUDA_DEVICE_MAX_CONNECTIONS == 1 if T or C > 1, before Blackwell."""
    model = "--model llama-70b --gpus 64 --gpu h100 --batch-size 1024 --for megatron"
    text = answer(model + " --tp 4 --sp")
    assert "CUDA_DEVICE_MAX_CONNECTIONS=1 torchrun" in text
    assert "tensor-model-parallel-size 4" in text
    assert "CUDA_DEVICE" not in answer("--model gpt2 --gpus 8 --tp 1 --cp 1 --for megatron")


def test_no_layout_is_written_for_a_program_that_cannot_run_it():
    """One line says so, if flags ask for one."""
    model = "--model gpt3-1.3b --gpus 8 --batch-size 64 --for "
    for flags, says in (("megatron --pp 4 --schedule zb-v", "zb-v: Megatron-LM has 1F1B"),
                        ("megatron --zero 3", "run ZeRO-3: Megatron-LM has ZeRO-0 and ZeRO-1"),
                        ("megatron --tp 2 --no-sp --experts 8", "experts and --tp without --sp")):
        with contextlib.redirect_stderr(io.StringIO()) as err, pytest.raises(SystemExit):
            answer(model + flags)
        assert says in err.getvalue() and err.getvalue().count("\n") == 1, flags
    text = answer(model + "megatron --pp 2")
    assert "for Megatron-LM core_v0.19.0, planned with" in text and "train.py --" not in text


# Pairs of what Megatron-LM cannot run: (fields of a layout, words of its line)
CANNOT = [({"pp": 4, "schedule": "zb-h1"}, "zb-h1, zb-h2 and zb-v"), ({"zero": 2}, "ZeRO-2"),
          ({"pp": 4, "schedule": "gpipe"}, "gpipe")]


def test_what_megatron_cannot_run_has_a_line():
    """... below its words; and a layout of that kind is not among those that are searched."""
    program = programs.MEGATRON
    text = answer("--model gpt3-1.3b --gpus 8 --batch-size 64 --for megatron")
    lines = re.findall(rf"^\(not searched: {program.name} cannot run (.+)\)$", text, re.MULTILINE)
    assert lines == [*program.cannot]
    job = memory.Job(plan.MODELS["gpt3-1.3b"], 64)
    for fields, words in CANNOT:
        layout = memory.Layout(**{"dp": 4, **fields})
        staged = layout.zero in program.zero or "zero" not in fields
        assert program.lacks(job, layout) or not staged, fields
        assert any(words in line for line in lines), words


# ---- mixtures of experts ----


def test_mixtures_have_their_published_sizes():
    """Mixtral 8x7B, 46.7 billion (arXiv 2401.04088); Qwen3-30B-A3B 30.5 billion, 3.3 of them for a
    token (arXiv 2505.09388); Qwen1.5-MoE-A2.7B 14.3 billion, with shared experts (its model card).
    """
    mixtral = memory.n_parameters(plan.model_of_flags("llama-7b", {
        "n_kv_head": 8, "experts": 8, "expert_width": 14336}))
    assert round(mixtral / 1e9, 1) == 46.7
    qwen3 = plan.model_of_flags("llama-7b", {
        "n_layer": 48, "n_embd": 2048, "n_head": 32, "head_width": 128, "n_kv_head": 4,
        "experts": 128, "top_k": 8, "expert_width": 768, "vocab_size": 151936})
    assert round(memory.n_parameters(qwen3) / 1e9, 1) == 30.5
    active = qwen3.n_layer * sum(memory.matrices(qwen3)) + 2 * qwen3.vocab_size * qwen3.n_embd
    assert round(active / 1e9, 1) == 3.3
    qwen15 = plan.model_of_flags("llama-7b", {
        "n_layer": 24, "n_embd": 2048, "n_head": 16, "n_kv_head": 16, "experts": 60, "top_k": 4,
        "expert_width": 1408, "shared_width": 5632, "vocab_size": 151936})
    assert round(memory.n_parameters(qwen15) / 1e9, 1) == 14.3


def test_tensor_ranks_split_experts_or_share_their_list():
    """Either way a rank holds as many parameters; split experts also gather their tokens."""
    flags = {"n_kv_head": 8, "experts": 8, "expert_width": 14336}
    whole = plan.model_of_flags("llama-7b", flags)
    split = plan.model_of_flags("llama-7b", {**flags, "split_experts": True})
    assert isinstance(split, Mixture)
    assert memory.block_parameters(whole, 2, 4) == memory.block_parameters(split, 2, 4)
    layout = memory.Layout(dp=8, tp=2, ep=4, sp=True)
    times = [costs.Costs(memory.Job(model, 64), plan.DEVICES["h100"]).breakdown(layout)
             for model in (whole, split)]
    assert times[1]["ep"] > 1.2 * times[0]["ep"] and times[1]["compute"] == times[0]["compute"]
    # 4 experts, 8 ranks: only if tensor ranks split them
    flags = "--model llama-7b --experts 4 --gpus 8 --dp 4 --tp 2 --ep 4 --batch-size 64 --layout"
    assert "does not" not in answer(flags + " --split-experts")
    with pytest.raises(SystemExit), contextlib.redirect_stderr(io.StringIO()):
        answer(flags)


def test_routing_costs_bytes():
    """Each choice reads and writes its token's row on its way out and back."""
    dense = plan.MODELS["llama-7b"]
    experts = plan.model_of_flags("llama-7b", {"experts": 8})
    times = [costs.Costs(memory.Job(model, 8), plan.DEVICES["h100"]).block(
        4096, memory.Layout(), split=False)[0].compute for model in (dense, experts)]
    moved = 4096 * 2 * (7 * 2 * dense.n_embd + 12 * 8)
    at_least = moved / (1e9 * 3350 * 0.66)
    assert times[1] - times[0] > at_least


# ---- a device calibrated by own runs ----


def test_an_own_run_is_then_predicted_as_it_was_measured():
    """Compute takes a factor longer, messages as long: so the order may change."""
    job = memory.Job(plan.MODELS["llama-7b"], 512)
    device = plan.DEVICES["h100"]
    layout = memory.Layout(dp=4, tp=2, sp=True, zero=1, microbatches=32)
    for share in (0.7, 1.5, 4):
        seconds = share * costs.Costs(job, device).step_time(layout)
        factor = calibrate.factor_of_runs(job, device, [calibrate.Measured(seconds, layout)])
        own = costs.Costs(job, calibrate.slower(device, factor))
        assert math.isclose(own.step_time(layout), seconds, rel_tol=1e-9)
        before, after = (each.breakdown(layout) for each in (costs.Costs(job, device), own))
        assert math.isclose(after["compute"], factor * before["compute"])
        # A message beside no compute takes as long
        assert own.all_reduce(1, 2, 1e9) == costs.Costs(job, device).all_reduce(1, 2, 1e9)
        # An MFU is still a share of the data sheet's peak
        assert own.device.tflops == device.tflops


def test_of_several_own_runs_the_median_counts():
    job, device = memory.Job(plan.MODELS["gpt2"], 64), plan.DEVICES["a100-80"]
    layouts = [memory.Layout(dp=8), memory.Layout(dp=8, zero=1), memory.Layout(dp=4, tp=2)]
    runs = [calibrate.Measured(costs.Costs(job, calibrate.slower(device, factor)).step_time(layout),
                               layout) for layout, factor in zip(layouts, (1, 3, 2), strict=True)]
    assert math.isclose(calibrate.factor_of_runs(job, device, runs), 2, rel_tol=1e-9)


def test_own_runs_are_flags_or_a_file_of_metrics(tmp_path):
    model = "--model gpt2 --gpus 8 --batch-size 512 --top 3"
    file = tmp_path / "metrics.jsonl"
    steps = [{"step": i, "ms": 9000.0 if i < 3 else 900.0 + i} for i in range(8)]
    lines = map(json.dumps, [*steps, {"step": 8, "val_loss": 1.0}])
    file.write_text("\n".join(lines))
    text = answer_of([*model.split(), "--dp", "4", "--tp", "2", "--calibrate", str(file)])
    assert "measured 0.905 s, predicted " in text and "places before own runs: " in text
    assert text.splitlines()[2].split()[:2] == ["8", "1"]  # flags named the run, not the answer
    same = answer_of([*model.split(), "--measured", "0.905 s: dp 4 tp 2"])
    assert same == text
    for words, says in ((["--measured", "fast"], 'must be like "48.2 s: dp 8 tp 4 sp zero 1"'),
                        (["--measured", "3 s: dp 2"], "do not match --gpus 8"),
                        (["--measured", "3 s: dp"], "dp needs a value"),
                        (["--measured", "3 s: gpus 8"], "gpus is no flag of a layout"),
                        (["--measured", "1e9 s: dp 8"], "no speed of compute explains it"),
                        (["--measured", "1e-9 s: dp 8"], "s with compute 64 times as fast, "),
                        (["--calibrate", "/nowhere"], "No such file"),
                        (["--calibrate", __file__], "is not a file of train.py's --metrics")):
        with contextlib.redirect_stderr(io.StringIO()) as err, pytest.raises(SystemExit):
            answer_of([*model.split(), *words])
        assert says in err.getvalue() and err.getvalue().count("\n") == 1, words


@pytest.mark.parametrize("words,says", [
    ("1 s: schedule nope", "schedule nope is none of gpipe, 1f1b, "),
    ("1 s: zero 7 dp 8", "zero 7 is none of 0, 1, 2, 3"), ("1 s: zero -1", "zero -1 is none of"),
    ("1 s:", "say the layout, too"), ("1 s", "say the layout, too"),
    ("1 s: dp 8 cp-attention all", "none of ring, all-to-all"), ("1 s: dp -8", "--dp -8 must be"),
    ("nan s: dp 8", "must be like"), ("1e400 s: dp 8", "must be like"),
    ("1 s: dp 1e3", "dp needs a value"), ("1 s: pp 8 chunks 1000 microbatches 512", "a million")])
def test_a_wrong_text_of_a_run_is_answered_with_one_line(words, says):
    refuses(["--measured", words], says)


def refuses(words, says):
    with contextlib.redirect_stderr(io.StringIO()) as err, pytest.raises(SystemExit) as end:
        answer_of(["--model", "gpt2", "--gpus", "8", "--batch-size", "512", *words])
    said = err.getvalue()
    assert end.value.code == 2 and said.count("\n") == 1 and says in said, said[:500]


@pytest.mark.parametrize("ms,says", [
    ('"900"', "its ms is '900', not a number"), ("[900]", "its ms is [900]"),
    ('{"a": 900}', "its ms is {'a': 900}"), ("1" + 20 * "0", "no speed of compute explains it"),
    ("1e999", "its ms is inf"), ("NaN", "its ms is nan"), ("true", "its ms is True"),
    ("null", "its ms is None"), ("-900", "its ms is -900"), ("0", "its ms is 0"),
    ("[" * 10**5, "line 1: "), ("[" * 200 + "]" * 200, "nested too deep"),
    ("9" * 5000, "line 1: "), ('"' + "a" * (1 << 20) + '"', "more than 1,048,576 bytes")], ids=repr)
def test_seconds_in_a_file_of_metrics_are_numbers(ms, says, tmp_path):
    file = tmp_path / "metrics.jsonl"
    file.write_text(8 * f'{{"step": 1, "ms": {ms}}}\n')
    refuses(["--dp", "8", "--calibrate", str(file)], says)


def odd_files(folder):
    """{name: a path that is not a file of metrics}."""
    paths = {name: folder / name for name in ("pipe", "loop", "sparse", "binary", "list", "dir")}
    os.mkfifo(paths["pipe"])
    paths["loop"].symlink_to(paths["loop"])
    with open(paths["sparse"], "wb") as file:
        file.truncate(1 << 33)
    paths["binary"].write_bytes(bytes(range(256)))
    paths["list"].write_text("[1, 2]\n" * 9)
    paths["dir"].mkdir()
    return {**paths, "zero": "/dev/zero"}


@pytest.mark.parametrize("name,says", [
    ("pipe", "not a regular file"), ("zero", "not a regular file"), ("loop", "symbolic link"),
    ("sparse", "bytes"), ("binary", "line 1: "), ("list", "not a JSON object"),
    ("dir", "Is a directory")])
def test_only_a_regular_file_of_metrics_is_read(name, says, tmp_path):
    refuses(["--dp", "8", "--calibrate", str(odd_files(tmp_path)[name])], says)


# ---- the model of a folder ----

# From the config.json of these models, as published; and the billions of parameters that their
# weights have. (The planner prints four digits, and leaves out biases and norms of heads)
LLAMA31 = {"model_type": "llama", "hidden_size": 4096, "intermediate_size": 14336,
           "num_attention_heads": 32, "num_hidden_layers": 32, "num_key_value_heads": 8,
           "max_position_embeddings": 131072, "rope_theta": 500000.0, "vocab_size": 128256,
           "tie_word_embeddings": False, "torch_dtype": "bfloat16", "rope_scaling": {
               "factor": 8.0, "rope_type": "llama3"}}
QWEN25 = {"model_type": "qwen2", "hidden_size": 3584, "intermediate_size": 18944,
          "num_attention_heads": 28, "num_hidden_layers": 28, "num_key_value_heads": 4,
          "max_position_embeddings": 131072, "vocab_size": 152064, "rope_theta": 1000000.0,
          "tie_word_embeddings": False, "use_sliding_window": False}
QWEN3_SMALL = {"model_type": "qwen3", "head_dim": 128, "hidden_size": 1024, "vocab_size": 151936,
               "intermediate_size": 3072, "num_attention_heads": 16, "num_hidden_layers": 28,
               "num_key_value_heads": 8, "max_position_embeddings": 40960, "rope_theta": 1000000,
               "tie_word_embeddings": True, "sliding_window": None, "rope_scaling": None}
QWEN3_MOE = {"model_type": "qwen3_moe", "head_dim": 128, "hidden_size": 2048,
             "intermediate_size": 6144, "moe_intermediate_size": 768, "num_experts": 128,
             "num_experts_per_tok": 8, "num_attention_heads": 32, "num_hidden_layers": 48,
             "num_key_value_heads": 4, "vocab_size": 151936, "max_position_embeddings": 40960,
             "decoder_sparse_step": 1, "mlp_only_layers": [], "tie_word_embeddings": False}
MIXTRAL = {"model_type": "mixtral", "hidden_size": 4096, "intermediate_size": 14336,
           "num_attention_heads": 32, "num_hidden_layers": 32, "num_key_value_heads": 8,
           "num_local_experts": 8, "num_experts_per_tok": 2, "vocab_size": 32000,
           "max_position_embeddings": 32768, "rope_theta": 1e6, "tie_word_embeddings": False}
QWEN_SHARED = {"model_type": "qwen2_moe", "hidden_size": 2048, "intermediate_size": 5632,
               "moe_intermediate_size": 1408, "shared_expert_intermediate_size": 5632,
               "num_experts": 60, "num_experts_per_tok": 4, "num_attention_heads": 16,
               "num_hidden_layers": 24, "num_key_value_heads": 16, "vocab_size": 151936,
               "max_position_embeddings": 8192, "decoder_sparse_step": 1}
QWEN3 = {**QWEN3_SMALL, "hidden_size": 4096, "intermediate_size": 12288, "num_hidden_layers": 36,
         "num_attention_heads": 32, "tie_word_embeddings": False}
MISTRAL = {"model_type": "mistral", "hidden_size": 4096, "intermediate_size": 14336,
           "num_attention_heads": 32, "num_hidden_layers": 32, "num_key_value_heads": 8,
           "max_position_embeddings": 32768, "vocab_size": 32000, "rope_theta": 10000.0,
           "sliding_window": 4096, "tie_word_embeddings": False}
GPT2_XL = {"model_type": "gpt2", "n_layer": 48, "n_head": 25, "n_embd": 1600, "n_positions": 1024,
           "n_ctx": 1024, "vocab_size": 50257}
FOLDERS = [(LLAMA31, 8.0303), (QWEN25, 7.6156), (QWEN3, 8.1907), (MIXTRAL, 46.7028),
           (MISTRAL, 7.2417), (QWEN3_SMALL, 0.59605), (QWEN3_MOE, 30.5321), (QWEN_SHARED, 14.3158),
           (GPT2_XL, 1.5576)]


def folder_of(values, folder):
    (folder / "config.json").write_text(values if type(values) is str else json.dumps(values))
    return ["--model", str(folder)]


@pytest.mark.parametrize("values,billions", FOLDERS, ids=lambda each: str(each)[:30])
def test_a_folders_model_has_its_published_size_and_is_planned(values, billions, tmp_path):
    words = folder_of(values, tmp_path)
    rows = answer_of([*words, "--gpus", "16", "--gpu", "h100", "--batch-size", "256", "--top", "1"])
    found = float(rows.split()[0])
    assert math.isclose(found, billions, rel_tol=0.001), found
    assert f"of {min(4096, values.get('n_positions', 4096))} tokens a step" in rows
    flagged = answer_of([*words, "--n-layer", "2", "--gpus", "8", "--top", "1"])
    assert float(flagged.split()[0]) < found  # a flag still changes a size


def test_a_named_model_is_its_folders(tmp_path):
    for name, values in (("llama3-8b", LLAMA31), ("qwen3-30b-a3b", QWEN3_MOE),
                         ("mixtral-8x7b", MIXTRAL), ("gpt2-xl", GPT2_XL)):
        folder_of(values, tmp_path)
        named = replace(plan.MODELS[name], block_size=min(4096, plan.MODELS[name].block_size))
        got = plan.model_of_flags(str(tmp_path), {})
        assert replace(got, rope_theta=named.rope_theta) == named if name != "gpt2-xl" else (
            got == named)


def test_fewer_experts_per_token_are_as_wide():
    model = plan.model_of_flags("mixtral-8x7b", {"top_k": 1})
    assert (model.n_experts, model.top_k, model.n_hidden) == (8, 1, 14336)
    wider = plan.model_of_flags("mixtral-8x7b", {"expert_width": 512})
    assert wider.n_hidden == 2 * 512 and wider.n_experts == 8


@pytest.mark.parametrize("change,says", [
    ({"hidden_size": 4096.0}, "its hidden_size is 4096.0, not a whole number"),
    ({"hidden_size": [4096]}, "its hidden_size is [4096]"),
    ({"num_hidden_layers": {"a": 1}}, "its num_hidden_layers is {'a': 1}"),
    ({"vocab_size": None}, "its vocab_size is None"),
    ({"num_attention_heads": True}, "its num_attention_heads is True"),
    ({"intermediate_size": 0}, "its intermediate_size is 0"),
    ({"num_key_value_heads": 5}, "num_key_value_heads is 5, which does not divide"),
    ({"num_key_value_heads": "8"}, "its num_key_value_heads is '8'"),
    ({"rope_theta": -1}, "its rope_theta is -1"), ({"hidden_size": 10**400}, "its hidden_size is"),
    ({"model_type": "deepseek_v3"}, "its model_type is 'deepseek_v3'; the planner reads gpt2, "),
    ({"model_type": None}, "its model_type is None"), ({"model_type": ["llama"]}, "model_type is"),
    ({**GPT2_XL, "n_inner": 1600}, "its n_inner is 1600, not 4 n_embd"),
    ({"num_hidden_layers": 5000}, "--n-layer 5000 must be"),
    ({"tie_word_embeddings": "no"}, "its tie_word_embeddings is 'no'"),
    ({"model_type": "mixtral", "num_local_experts": 2, "num_experts_per_tok": 3}, "more than"),
    ({"model_type": "qwen3_moe", "num_experts": 8, "num_experts_per_tok": 2,
      "moe_intermediate_size": 8, "decoder_sparse_step": 2}, "some of its blocks have no experts"),
    ({"model_type": "mixtral"}, "it has no num_local_experts")], ids=str)
def test_a_wrong_config_json_is_answered_with_one_line(change, says, tmp_path):
    refuses(folder_of({**LLAMA31, **change}, tmp_path), says)


@pytest.mark.parametrize("text,says", [
    ("[1]", "not a JSON object"), ("{", "config.json: "), ("[" * 10**5, "nested too deep"),
    ('{"a": ' * 200 + "1" + "}" * 200, "nested too deep"), ("", "config.json: ")], ids=repr)
def test_a_folder_without_a_json_object_is_answered_with_one_line(text, says, tmp_path):
    refuses(folder_of(text, tmp_path), says)


def test_a_folders_config_json_is_a_regular_file(tmp_path):
    refuses(["--model", str(tmp_path)], "No such file")
    os.mkfifo(tmp_path / "config.json")
    refuses(["--model", str(tmp_path)], "not a regular file")
