"""Layouts in other programs' words: python -m extras.planner --for
megatron|torchtitan|deepspeed|nanotron

A Program says which layouts it can run (the search leaves out the others), and writes one as its
own flags, TOML, JSON or YAML. Names of options are those of these versions:

    megatron     Megatron-LM core_v0.14.0, megatron/training/arguments.py
    torchtitan   torchtitan 0.2.2, torchtitan/config/job_config.py
    deepspeed    DeepSpeed 0.16.5, docs/_pages/config-json.md, docs/_tutorials/pipeline.md,
                 blogs/huggingface-tp/README.md (tensor ranks)
    nanotron     nanotron 0.4, src/nanotron/config

Seconds and bytes stay train.py's: each program holds and sends somewhat more, or less.
"""

import json
from collections.abc import Callable
from typing import NamedTuple

from extras.planner.memory import is_tied, shape_of
from extras.planner.mixture import splits_experts
from sizes import LlamaConfig


class Program(NamedTuple):
    name: str
    version: str  # empty: this repository's
    zero: tuple  # the ZeRO stages that it has
    cannot: tuple  # (text, text, ...): features that train.py has and the program lacks
    # lacks(job, layout): [text], one for each thing in the layout that the program cannot do: a
    # feature ("--sp"), or two together ("ZeRO-3 with --tp"); [] if it can run the layout.
    # (lacks_stage tells of a ZeRO stage that the program lacks altogether)
    lacks: Callable
    # written(job, layout): the layout in the program's words
    written: Callable
    # notes(job, layout): [text], things that the user has to add to these words
    notes: Callable


def applying(*cases):
    """The texts of those cases, (condition, text), whose condition holds."""
    return [text for condition, text in cases if condition]


def lacks_stage(program, layout):
    """[text] if the program does not have a layout's ZeRO stage, else []. Without replicas there is
    nothing to shard, and every program has ZeRO-0."""
    replicas = layout.dp * layout.cp
    if layout.zero in program.zero or (layout.zero == 0 and replicas == 1):
        return []
    stages = " and ".join(f"ZeRO-{stage}" for stage in program.zero)
    return [f"ZeRO-{layout.zero}: {program.name} has {stages}"]


def sequences_of(job, layout):
    """Sequences of a microbatch."""
    return job.batch_size // layout.dp // layout.microbatches


def is_llama(model):
    return isinstance(model, LlamaConfig)


# ---- Megatron-LM: flags of pretrain_gpt.py ----


def megatron_ends(job, layout):
    """Megatron's stages all have the same number of layers. Returns 0 if the blocks alone can be
    cut so, 2 if embedding and head have to count as a layer each, None if neither helps."""
    for ends in (0, 2):
        if (job.model.n_layer + ends) % (layout.pp * layout.chunks) == 0:
            return ends
    return None


def megatron_lacks(job, layout):
    stages = layout.pp * layout.chunks
    return applying(
        (layout.schedule not in ("1f1b", "interleaved"),
         f"{layout.schedule}: Megatron-LM has 1F1B and its interleaved form"),
        (layout.pp > 1 and megatron_ends(job, layout) is None,
         f"{job.model.n_layer} layers in {stages} stages: Megatron-LM's stages all have the same "
         "number of layers (embedding and head may count as one layer each)"),
        (layout.tp > 1 and not layout.sp and job.model.n_experts > 0,
         "experts and --tp without --sp"))


def megatron_written(job, layout):
    model = job.model
    words = {"tensor-model-parallel-size": layout.tp, "pipeline-model-parallel-size": layout.pp,
             "context-parallel-size": layout.cp}
    if layout.schedule == "interleaved":
        words["num-virtual-stages-per-pipeline-rank"] = layout.chunks
    if layout.pp > 1 and megatron_ends(job, layout) == 2:
        words |= {"account-for-embedding-in-pipeline-split": "",
                  "account-for-loss-in-pipeline-split": ""}
    if layout.sp:
        words["sequence-parallel"] = ""
    if layout.cp > 1:
        words["cp-comm-type"] = "p2p" if layout.cp_attention == "ring" else "a2a"
    if layout.zero:
        words |= {"use-distributed-optimizer": "", "overlap-param-gather": ""}
        if layout.copies > 1:
            words["num-distributed-optimizer-instances"] = layout.copies
    words["overlap-grad-reduce"] = ""
    if layout.recompute:
        words |= {"recompute-granularity": "full", "recompute-method": "uniform",
                  "recompute-num-layers": 1}
    words |= {"micro-batch-size": sequences_of(job, layout), "global-batch-size": job.batch_size,
              "bf16": ""}
    if job.grad_width == 2:
        words["grad-reduce-in-bf16"] = ""
    words |= {"num-layers": model.n_layer, "hidden-size": model.n_embd,
              "num-attention-heads": model.n_head, "seq-length": model.block_size,
              "max-position-embeddings": model.block_size}
    if is_llama(model):
        words |= {"group-query-attention": "", "num-query-groups": model.n_kv_head,
                  "kv-channels": model.kv_width // model.n_kv_head, "swiglu": "",
                  "normalization": "RMSNorm", "position-embedding-type": "rope",
                  "rotary-base": int(model.rope_theta), "disable-bias-linear": "",
                  "ffn-hidden-size": model.n_hidden}
    if not is_tied(model):
        words["untie-embeddings-and-output-weights"] = ""
    if model.n_experts:
        # train.py spreads whole experts over E x T ranks: to Megatron all of these are expert ranks
        split = splits_experts(model)
        words |= {"num-experts": model.n_experts, "moe-router-topk": model.top_k,
                  "moe-ffn-hidden-size": expert_width(model),
                  "expert-model-parallel-size": layout.ep * (1 if split else layout.tp),
                  "expert-tensor-parallel-size": layout.tp if split else 1,
                  "moe-token-dispatcher-type": "alltoall", "moe-grouped-gemm": ""}
        if shape_of(model).shared:
            words["moe-shared-expert-intermediate-size"] = shape_of(model).shared
    return " ".join(["pretrain_gpt.py", *(f"--{name} {value}".strip()
                                          for name, value in words.items())])


def expert_width(model):
    """Hidden units of an expert."""
    return (model.n_hidden if is_llama(model) else 4 * model.n_embd) // model.top_k


def megatron_notes(job, layout):
    return ["add --tokenizer-type, --data-path, --lr, --train-iters: the vocabulary is the "
            "tokenizer's"]


MEGATRON = Program(
    "Megatron-LM", "core_v0.14.0", zero=(0, 1),
    cannot=("gpipe, zb-h1, zb-h2 and zb-v",
            "ZeRO-2 and 3 (--use-megatron-fsdp starts another engine)",
            "stages with different numbers of layers",
            "experts and --tp without --sp"),
    lacks=megatron_lacks, written=megatron_written, notes=megatron_notes)


# ---- torchtitan: a TOML file ----

# (blocks, width, heads, heads of keys, MLP's width): the name that torchtitan's llama3 has for a
# model of these sizes
FLAVORS = {(32, 4096, 32, 8, 14336): "8B", (80, 8192, 64, 8, 28672): "70B",
           (126, 16384, 128, 8, 53248): "405B"}
TITAN_SCHEDULES = {"1f1b": "1F1B", "interleaved": "Interleaved1F1B", "zb-v": "ZBVZeroBubble",
                   "gpipe": "GPipe"}


def flavor(model):
    """The name of a model's sizes in torchtitan/models/llama3/__init__.py; "" if that file has no
    name for them."""
    if not is_llama(model) or model.n_experts:
        return ""
    return FLAVORS.get((model.n_layer, model.n_embd, model.n_head, model.n_kv_head,
                        model.n_hidden), "")


def layers_per_stage(job, layout):
    """Layers of a stage, where the two ends count as one each; the last stage may have fewer."""
    return -(-(job.model.n_layer + 2) // (layout.pp * layout.chunks))


def titan_lacks(job, layout):
    per_stage = layers_per_stage(job, layout)
    stages = -(-(job.model.n_layer + 2) // per_stage)  # torchtitan's count
    return applying(
        (layout.schedule not in TITAN_SCHEDULES,
         f"{layout.schedule}: torchtitan has {', '.join(TITAN_SCHEDULES.values())}"),
        (layout.pp > 1 and stages != layout.pp * layout.chunks,
         f"{layout.pp * layout.chunks} stages: {per_stage} layers each make {stages}"),
        (layout.tp > 1 and not layout.sp, "--tp without --sp"),
        (layout.cp_attention != "ring", "attention by all-to-all"),
        (layout.dp * layout.cp == 1 and layout.ranks > 1,
         "--tp or --pp alone: it computes in 16 bits only where data ranks shard the weights"))


def titan_written(job, layout):
    model = job.model
    b = sequences_of(job, layout)
    # Sequences of a data rank: with a pipeline torchtitan counts those of a step, without a
    # pipeline those of a microbatch
    local = b * layout.microbatches if layout.pp > 1 else b
    split = splits_experts(model)
    tables = {
        "model": {"name": "llama3", "flavor": flavor(model) or "YOURS"},
        "training": {"local_batch_size": local, "global_batch_size": job.batch_size,
                     "seq_len": model.block_size, "mixed_precision_param": "bfloat16",
                     "mixed_precision_reduce": "float32"},
        "parallelism": {
            "data_parallel_replicate_degree": layout.copies,
            "data_parallel_shard_degree": layout.dp // layout.copies,
            "fsdp_reshard_after_forward": "always" if layout.zero == 3 else "never",
            "tensor_parallel_degree": layout.tp, "context_parallel_degree": layout.cp,
            "pipeline_parallel_degree": layout.pp},
        "activation_checkpoint": {"mode": "full" if layout.recompute else "none"}}
    if layout.cp > 1:
        # "alltoall" is a ring, too: in each hop PyTorch passes keys and values on to the next rank
        # by an all-to-all. (The other value, "allgather", gathers all of them at once)
        tables["parallelism"]["context_parallel_rotate_method"] = "alltoall"
    if layout.pp > 1:
        tables["parallelism"] |= {
            "pipeline_parallel_schedule": TITAN_SCHEDULES[layout.schedule],
            "pipeline_parallel_layers_per_stage": layers_per_stage(job, layout),
            "pipeline_parallel_microbatch_size": b}
    if model.n_experts:
        tables["parallelism"] |= {
            "expert_parallel_degree": layout.ep * (1 if split else layout.tp),
            "expert_tensor_parallel_degree": layout.tp if split else 1}
    return "\n\n".join("\n".join([f"[{name}]", *(f"{key} = {json.dumps(value)}"
                                                  for key, value in values.items())])
                       for name, values in tables.items())


def titan_notes(job, layout):
    return applying(
        (job.grad_width == 2, "it sums gradients in 32 bits: plan with --grad-dtype float32, too"),
        (not flavor(job.model), "no flavor of llama3 has these sizes: add one to "
         "torchtitan/models (experts: qwen3 or deepseek_v3) and name it"))


TORCHTITAN = Program(
    "torchtitan", "0.2.2", zero=(2, 3),
    cannot=("zb-h1 and zb-h2",
            "ZeRO-1, or ZeRO-0 beside other axes (ZeRO-0 alone, its DDP, is not searched either)",
            "--tp without --sp",
            "--tp or --pp without data ranks, in 16 bits",
            "attention by all-to-all",
            "stages with different numbers of layers (only the last may have fewer)"),
    lacks=titan_lacks, written=titan_written, notes=titan_notes)


# ---- DeepSpeed: a JSON file, and code in the user's model (deepspeed_notes) ----


def deepspeed_lacks(job, layout):
    return applying(
        (layout.sp, "--sp: each of its tensor ranks has whole activations"),
        (layout.tp > 1 and layout.pp > 1, "--tp with --pp"),
        (layout.tp > 1 and layout.cp > 1, "--tp with --cp"),
        (layout.tp > 1 and layout.zero == 3, "ZeRO-3 with --tp"),
        (layout.tp > 1 and job.model.n_experts > 0, "experts and --tp"),
        (layout.schedule != "1f1b", f"{layout.schedule}: its pipeline is 1F1B"),
        (layout.pp > 1 and layout.cp > 1, "--pp with --cp"),
        (layout.pp > 1 and layout.ep > 1, "--pp with --ep"),
        (layout.pp > 1 and layout.zero > 1, "ZeRO-2 or 3 in its pipeline"),
        (layout.copies > 1, "--shard: shards over all data ranks"),
        (job.model.n_experts > 0 and layout.zero == 3, "experts under ZeRO-3"),
        (job.model.n_experts > 0 and job.model.top_k > 2, "more than 2 experts per token"),
        (layout.cp > 1 and layout.cp_attention == "ring", "ring attention: it has all-to-all"))


def deepspeed_written(job, layout):
    grads = "bf16" if job.grad_width == 2 else "fp32"
    values = {
        "train_batch_size": job.batch_size,
        "train_micro_batch_size_per_gpu": sequences_of(job, layout),
        "gradient_accumulation_steps": layout.microbatches,
        "bf16": {"enabled": True},
        "data_types": {"grad_accum_dtype": grads},
        "zero_optimization": {"stage": layout.zero, "overlap_comm": True}}
    if layout.tp > 1:
        values["tensor_parallel"] = {"autotp_size": layout.tp}
    return json.dumps(values, indent=2)


def deepspeed_notes(job, layout):
    return applying(
        (layout.tp > 1, "its tensor ranks (AutoTP) split models of Hugging Face's transformers"),
        (layout.pp > 1, f"in your model: PipelineModule(layers, num_stages={layout.pp})"),
        (layout.cp > 1, "in your model: DistributedAttention(attention, group), with "
         f"sequence_parallel_size {layout.cp} (DeepSpeed-Ulysses)"),
        (job.model.n_experts > 0, "in your model: deepspeed.moe.layer.MoE(hidden_size, expert, "
         f"num_experts={job.model.n_experts}, ep_size={layout.ep}, k={job.model.top_k})"),
        (layout.recompute, "in your model: deepspeed.checkpointing.checkpoint(block, x)"))


DEEPSPEED = Program(
    "DeepSpeed", "0.16.5", zero=(0, 1, 2, 3),
    cannot=("schedules other than 1F1B",
            "--sp",
            "--tp beside --pp, --cp, experts or ZeRO-3",
            "--pp beside --cp, --ep, ZeRO-2 or 3",
            "ring attention",
            "--shard (its MiCS and hpZ are other forms)",
            "experts under ZeRO-3, and more than 2 experts per token"),
    lacks=deepspeed_lacks, written=deepspeed_written, notes=deepspeed_notes)


# ---- nanotron: a YAML file ----


def nanotron_lacks(job, layout):
    return applying(
        (layout.schedule not in ("1f1b", "gpipe"),
         f"{layout.schedule}: nanotron has 1f1b and afab"),
        (layout.cp_attention != "ring", "attention by all-to-all"),
        (layout.copies > 1, "--shard"),
        (layout.ep > 1, "expert ranks: its ranks are tp x cp x dp x pp"),
        (layout.tp > 1 and job.model.n_experts > 0, "experts beside --tp"))


def nanotron_written(job, layout):
    model = job.model
    sizes = {"hidden_size": model.n_embd, "num_hidden_layers": model.n_layer,
             "num_attention_heads": model.n_head, "vocab_size": model.vocab_size,
             "max_position_embeddings": model.block_size,
             "tie_word_embeddings": is_tied(model)}
    if is_llama(model):
        # nanotron's class Qwen2Config is a Llama, too (no biases unless asked for), and unlike its
        # class LlamaConfig has experts
        sizes |= {"intermediate_size": model.n_hidden, "num_key_value_heads": model.n_kv_head,
                  "rope_theta": model.rope_theta, "is_qwen2_config": True}
    if layout.cp > 1:
        sizes |= {"_attn_implementation": "llama3_ring_attention", "ring_attn_heads_k_stride": 1}
    if model.n_experts:
        shared = shape_of(model).shared
        sizes["moe_config"] = {"num_experts": model.n_experts, "top_k": model.top_k,
                               "moe_intermediate_size": expert_width(model),
                               "enable_shared_expert": shared > 0}
        if shared:
            sizes["moe_config"]["shared_expert_intermediate_size"] = shared
    return yaml({
        "parallelism": {
            "dp": layout.dp, "tp": layout.tp, "pp": layout.pp,
            "context_parallel_size": layout.cp,
            "pp_engine": "afab" if layout.schedule == "gpipe" else "1f1b",
            "tp_mode": "REDUCE_SCATTER" if layout.sp else "ALL_REDUCE",
            "tp_linear_async_communication": layout.sp, "recompute_layer": layout.recompute},
        "optimizer": {"zero_stage": layout.zero, "accumulate_grad_in_fp32": job.grad_width == 4},
        "tokens": {"sequence_length": model.block_size,
                   "micro_batch_size": sequences_of(job, layout),
                   "batch_accumulation_per_replica": layout.microbatches},
        "model": {"dtype": "bfloat16", "model_config": sizes}})


def yaml(values, indent=""):
    """A dict of dicts, numbers and words, as YAML."""
    lines = []
    for key, value in values.items():
        if isinstance(value, dict):
            lines += [f"{indent}{key}:", yaml(value, indent + "  ")]
        else:
            lines.append(f"{indent}{key}: {value if isinstance(value, str) else json.dumps(value)}")
    return "\n".join(lines)


def nanotron_notes(job, layout):
    return applying((not is_llama(job.model), "it has no GPT-2 blocks: the sizes above are the "
                    "GPT's; for a Llama add intermediate_size and num_key_value_heads"))


NANOTRON = Program(
    "nanotron", "0.4", zero=(0, 1),
    cannot=("interleaved, zb-h1, zb-h2 and zb-v",
            "ZeRO-2 and 3",
            "attention by all-to-all",
            "--shard",
            "expert ranks, though it has a flag for them",
            "experts beside --tp"),
    lacks=nanotron_lacks, written=nanotron_written, notes=nanotron_notes)


# ---- this repository ----


def nothing(job, layout):
    return []


TRAIN_PY = Program("train.py", "", zero=(0, 1, 2, 3), cannot=(), lacks=nothing, written=nothing,
                   notes=nothing)
PROGRAMS = {"megatron": MEGATRON, "torchtitan": TORCHTITAN, "deepspeed": DEEPSPEED,
            "nanotron": NANOTRON}
