"""The planner as an adviser: six jobs' first rows, other programs' words, mixtures, calibration."""

import contextlib
import io
import json
import math
import re
import sys
from dataclasses import replace
from functools import cache

import pytest

import extras.planner.__main__ as plan
from extras.planner import calibrate, costs, habits, memory, programs
from extras.planner.mixture import Mixture
from extras.planner.search import Search

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
    "mixtral": {"tp": (1,), "pp": (2, 4), "ep": (8,), "cp": (1,), "zero": (1, 2)},
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


# ---- other programs' words ----

# Options of these versions, each looked up in the file that extras/planner/programs.py names
MEGATRON = {  # core_v0.14.0: options with a value; the others are switches
    "tensor-model-parallel-size", "pipeline-model-parallel-size", "context-parallel-size",
    "num-virtual-stages-per-pipeline-rank", "cp-comm-type", "recompute-granularity",
    "recompute-method", "recompute-num-layers", "micro-batch-size", "global-batch-size",
    "num-layers", "hidden-size", "num-attention-heads", "seq-length", "max-position-embeddings",
    "num-query-groups", "kv-channels", "normalization", "position-embedding-type", "rotary-base",
    "ffn-hidden-size", "num-experts", "moe-router-topk", "moe-ffn-hidden-size",
    "expert-model-parallel-size", "expert-tensor-parallel-size", "moe-token-dispatcher-type",
    "moe-shared-expert-intermediate-size", "num-distributed-optimizer-instances"}
SWITCHES = {
    "account-for-embedding-in-pipeline-split", "account-for-loss-in-pipeline-split",
    "sequence-parallel", "use-distributed-optimizer", "overlap-param-gather",
    "overlap-grad-reduce", "bf16", "grad-reduce-in-bf16", "group-query-attention", "swiglu",
    "disable-bias-linear", "untie-embeddings-and-output-weights", "moe-grouped-gemm"}
DOCUMENTED = {  # {program: {table: its options}}
    "torchtitan": {
        "model": {"name", "flavor"},
        "training": {"local_batch_size", "global_batch_size", "seq_len", "mixed_precision_param",
                     "mixed_precision_reduce"},
        "parallelism": {
            "data_parallel_replicate_degree", "data_parallel_shard_degree",
            "fsdp_reshard_after_forward", "tensor_parallel_degree", "context_parallel_degree",
            "context_parallel_rotate_method", "pipeline_parallel_degree",
            "pipeline_parallel_schedule", "pipeline_parallel_layers_per_stage",
            "pipeline_parallel_microbatch_size", "expert_parallel_degree",
            "expert_tensor_parallel_degree"},
        "activation_checkpoint": {"mode"}},
    "deepspeed": {
        "train_batch_size": {}, "train_micro_batch_size_per_gpu": {},
        "gradient_accumulation_steps": {}, "bf16": {"enabled"}, "data_types": {"grad_accum_dtype"},
        "tensor_parallel": {"autotp_size"},
        "zero_optimization": {"stage", "overlap_comm"}},
    "nanotron": {
        "parallelism": {"dp", "tp", "pp", "context_parallel_size", "pp_engine", "tp_mode",
                        "tp_linear_async_communication", "recompute_layer"},
        "optimizer": {"zero_stage", "accumulate_grad_in_fp32"},
        "tokens": {"sequence_length", "micro_batch_size", "batch_accumulation_per_replica"},
        "model": {"dtype", "model_config"}}}


def test_a_torchtitan_model_has_a_name_only_if_all_its_sizes_are_those_of_the_name():
    model = plan.MODELS["llama-70b"]
    assert programs.flavor(model) == "70B"
    for size in ("n_layer", "n_embd", "n_head", "n_kv_head", "n_hidden"):
        assert programs.flavor(replace(model, **{size: 2 * getattr(model, size)})) == ""


def read_megatron(text):
    file, *words = text.split()
    assert file == "pretrain_gpt.py"
    values = {}
    for word in words:
        if word.startswith("--"):
            name = word[2:]
            values[name] = True
            assert name in MEGATRON | SWITCHES, name
        else:
            values[name] = word
    assert all((values[name] is True) == (name in SWITCHES) for name in values)
    return values


def value_of(word):
    with contextlib.suppress(ValueError):
        return json.loads(word)
    return word


def read_toml(text):
    tables = {}
    for line in filter(None, text.splitlines()):
        if line.startswith("["):
            table = tables[line.strip("[]")] = {}
        else:
            key, value = line.split(" = ")
            table[key] = value_of(value)
    with contextlib.suppress(ImportError):  # Python 3.10 has none
        import tomllib
        assert tomllib.loads(text) == tables
    return tables


def read_yaml(text):
    inside = [{}]  # the tables that are open, by their indent
    for line in text.splitlines():
        indent = (len(line) - len(line.lstrip())) // 2
        key, _, value = line.strip().partition(":")
        del inside[indent + 1 :]
        if value:
            inside[-1][key] = value_of(value.strip())
        else:
            inside.append({})
            inside[-2][key] = inside[-1]
    with contextlib.suppress(ImportError):
        import yaml
        assert yaml.safe_load(text) == inside[0]
    return inside[0]


READ = {"megatron": read_megatron, "torchtitan": read_toml, "deepspeed": json.loads,
        "nanotron": read_yaml}


@cache
def written(job, name):
    """(Job, the best layout that a program has, that layout in its words)."""
    args = plan.flags().parse_args(JOBS[job].split())
    job, device, fixed = plan.described(args)
    program = programs.PROGRAMS[name]
    (_, layout), = Search(job, args.gpus, device, fixed, program).best(1, plan.BAND)
    return job, layout, program.written(job, layout)


@pytest.mark.parametrize("name", programs.PROGRAMS)
@pytest.mark.parametrize("job", JOBS)
def test_a_layout_is_written_in_other_programs_words(name, job):
    """Each option is one of its documentation, and says the layout: ranks, and sequences."""
    job, layout, text = written(job, name)
    said = READ[name](text)
    assert not programs.PROGRAMS[name].lacks(job, layout)
    if name == "megatron":
        got = [int(said[key + "-parallel-size"])
               for key in ("tensor-model", "pipeline-model", "context")]
        assert got == [layout.tp, layout.pp, layout.cp]
        batch, b = int(said["global-batch-size"]), int(said["micro-batch-size"])
        assert ("sequence-parallel" in said) == layout.sp
        assert ("use-distributed-optimizer" in said) == (layout.zero == 1)
        assert int(said.get("num-virtual-stages-per-pipeline-rank", 1)) == layout.chunks
    else:
        assert said.keys() <= DOCUMENTED[name].keys()
        for table, options in DOCUMENTED[name].items():
            assert not options or said.get(table, {}).keys() <= options, table
    if name == "torchtitan":
        axes, training = said["parallelism"], said["training"]
        got = [axes[f"{axis}_degree"] for axis in ("tensor_parallel", "pipeline_parallel",
                                                   "context_parallel", "data_parallel_shard")]
        assert got == [layout.tp, layout.pp, layout.cp, layout.dp]
        batch = training["global_batch_size"]
        b = axes.get("pipeline_parallel_microbatch_size", training["local_batch_size"])
        assert axes["fsdp_reshard_after_forward"] == {2: "never", 3: "always"}[layout.zero]
    if name == "deepspeed":
        batch, b = said["train_batch_size"], said["train_micro_batch_size_per_gpu"]
        assert said["gradient_accumulation_steps"] == layout.microbatches
        assert said["zero_optimization"]["stage"] == layout.zero
        assert said.get("tensor_parallel", {}).get("autotp_size", 1) == layout.tp
    if name == "nanotron":
        axes, tokens = said["parallelism"], said["tokens"]
        assert [axes[axis] for axis in ("dp", "tp", "pp")] == [layout.dp, layout.tp, layout.pp]
        b = tokens["micro_batch_size"]
        batch = b * tokens["batch_accumulation_per_replica"] * layout.dp
        assert said["optimizer"]["zero_stage"] == layout.zero <= 1
        assert (axes["tp_mode"] == "REDUCE_SCATTER") == layout.sp
    assert batch == job.batch_size == b * layout.microbatches * layout.dp


def test_no_layout_is_written_for_a_program_that_cannot_run_it():
    """One line says so, if flags ask for one."""
    model = "--model gpt3-1.3b --gpus 8 --batch-size 64 --for "
    for flags, says in (("megatron --pp 4 --schedule zb-v", "zb-v: Megatron-LM has 1F1B"),
                        ("torchtitan --pp 2 --schedule zb-h1",
                         "cannot run zb-h1: torchtitan has 1F1B, Interleaved1F1B, ZBVZeroBubble, "
                         "GPipe"),
                        ("megatron --zero 3", "run ZeRO-3: Megatron-LM has ZeRO-0 and ZeRO-1"),
                        ("torchtitan --layout", "run ZeRO-0: torchtitan has ZeRO-2 and ZeRO-3"),
                        ("deepspeed --tp 2 --sp", "tensor ranks has whole activations"),
                        ("deepspeed --tp 2 --zero 3", "ZeRO-3 with --tp"),
                        ("nanotron --pp 4 --schedule interleaved", "nanotron has 1f1b and afab"),
                        ("megatron --pp 5 --gpus 40", "24 layers in 5 stages")):
        with contextlib.redirect_stderr(io.StringIO()) as err, pytest.raises(SystemExit):
            answer(model + flags)
        assert says in err.getvalue() and err.getvalue().count("\n") == 1, flags
    text = answer(model + "megatron --pp 2")
    assert "for Megatron-LM core_v0.14.0, planned with" in text and "train.py --" not in text


# {program: pairs of what it cannot run: (fields of a layout, words of its line)}
CANNOT = {
    "megatron": [({"pp": 4, "schedule": "zb-h1"}, "zb-h1, zb-h2 and zb-v"), ({"zero": 2}, "ZeRO-2"),
                 ({"pp": 4, "schedule": "gpipe"}, "gpipe"),
                 ({"pp": 5, "dp": 1}, "different numbers of layers")],
    "torchtitan": [({"pp": 4, "schedule": "zb-h2"}, "zb-h1 and zb-h2"), ({"zero": 1}, "ZeRO-0"),
                   ({"tp": 2}, "--tp without --sp"), ({"tp": 8, "sp": True, "dp": 1}, "--tp or"),
                   ({"cp": 2, "cp_attention": "all-to-all"}, "all-to-all"),
                   ({"pp": 15, "dp": 1}, "only the last may have fewer")],
    "deepspeed": [({"pp": 4, "schedule": "zb-v", "chunks": 2}, "schedules other than 1F1B"),
                  ({"tp": 2, "sp": True}, "--sp"), ({"tp": 2, "pp": 2}, "--tp beside --pp"),
                  ({"pp": 2, "zero": 2}, "--pp beside"), ({"cp": 2}, "ring attention"),
                  ({"zero": 3, "shard": 2}, "--shard")],
    "nanotron": [({"pp": 2, "schedule": "interleaved", "chunks": 2}, "interleaved"),
                 ({"zero": 3}, "ZeRO-2 and 3"), ({"ep": 2}, "expert ranks"),
                 ({"zero": 1, "shard": 2}, "--shard"),
                 ({"cp": 2, "cp_attention": "all-to-all"}, "all-to-all")]}


def test_deepspeeds_tensor_ranks_are_in_its_file():
    job = memory.Job(plan.MODELS["gpt3-1.3b"], 64)
    layout = memory.Layout(dp=4, tp=2, zero=1, microbatches=4)
    assert not programs.DEEPSPEED.lacks(job, layout)
    said = json.loads(programs.DEEPSPEED.written(job, layout))
    assert said["tensor_parallel"] == {"autotp_size": 2}
    # "dp_size = num_gpus / tp_size", and the batch is dp_size times the others
    assert said["train_batch_size"] == 64 == (
        4 * said["train_micro_batch_size_per_gpu"] * said["gradient_accumulation_steps"])


@pytest.mark.parametrize("name", programs.PROGRAMS)
def test_what_a_program_cannot_run_has_a_line(name):
    """... below its words; and a layout of that kind is not among those that are searched."""
    program = programs.PROGRAMS[name]
    text = answer(f"--model gpt3-1.3b --gpus 8 --batch-size 64 --for {name}")
    lines = re.findall(rf"^\(not searched: {program.name} cannot run (.+)\)$", text, re.MULTILINE)
    assert lines == [*program.cannot]
    job = memory.Job(plan.MODELS["gpt3-1.3b"], 64)
    for fields, words in CANNOT[name]:
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
                        (["--measured", "3 s: dp 2"], "does not match the 8 processes"),
                        (["--measured", "3 s: dp"], "dp needs a value"),
                        (["--measured", "3 s: gpus 8"], "gpus is no flag of a layout"),
                        (["--measured", "1e9 s: dp 8"], "no speed of compute explains it"),
                        (["--measured", "1e-9 s: dp 8"], "s with compute 64 times as fast, "),
                        (["--calibrate", "/nowhere"], "No such file"),
                        (["--calibrate", __file__], "is not a file of train.py's --metrics")):
        with contextlib.redirect_stderr(io.StringIO()) as err, pytest.raises(SystemExit):
            answer_of([*model.split(), *words])
        assert says in err.getvalue() and err.getvalue().count("\n") == 1, words
