"""Layouts in another program's words: python -m extras.planner --for megatron

A Program says which layouts it can run (the search leaves out the others), and writes one as its
own flags. Megatron-LM's are those of core_v0.19.0 (and of 0.14.0 and 0.16.1); a
test gives them to Megatron-LM's own parser, where it is installed.

Seconds and bytes stay train.py's: the program holds and sends somewhat more, or less.
"""

import shlex
from collections.abc import Callable
from itertools import groupby
from typing import NamedTuple

from extras.planner.memory import is_tied, shape_of, stages_of
from extras.planner.mixture import splits_experts
from sizes import LlamaConfig


class Program(NamedTuple):
    name: str
    version: str  # empty: this repository's
    zero: tuple  # the ZeRO stages that it has
    cannot: tuple  # (text, text, ...): features that train.py has and the program lacks
    # lacks(job, layout): [text], one for each thing in the layout that the program cannot do: a
    # feature ("zb-v"), or two together ("experts and --tp without --sp"); [] if it can run the
    # layout. (lacks_stage tells of a ZeRO stage that the program lacks altogether)
    lacks: Callable
    # written(job, layout): the layout in the program's words
    written: Callable
    # notes(job, layout): [text], things that the user has to add to these words
    notes: Callable


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


def megatron_lacks(job, layout):
    lacking = []
    if layout.schedule not in ("1f1b", "interleaved"):
        lacking.append(f"{layout.schedule}: Megatron-LM has 1F1B and its interleaved form")
    if layout.tp > 1 and not layout.sp and job.model.n_experts:
        lacking.append("experts and --tp without --sp")
    return lacking


def megatron_stages(job, layout):
    """train.py's cut into stages, in Megatron-LM's letters: E the embedding, t a block, L the head,
    | a new stage; t*3 is ttt, and (tt|)*3 is tt|tt|tt|. Stage s is on pipeline rank s mod P, here
    and there. GPT-2's 12 blocks in 4 stages: Et*3|(t*3|)*2t*3L."""
    parts = {}  # stage -> its Part
    for stages in stages_of(job.model, layout.schedule, layout.pp, layout.chunks):
        parts.update(stages)
    texts = []  # of each stage
    for _, part in sorted(parts.items()):
        blocks = f"t*{part.blocks}" if part.blocks > 1 else "t" * part.blocks
        texts.append("E" * part.embedding + blocks + "L" * part.head)
    runs = []  # of equal stages
    for text, equal in groupby(texts):
        times = len(list(equal))
        runs.append(f"({text}|)*{times}" if times > 1 else f"{text}|")
    return "".join(runs).removesuffix("|")


def megatron_written(job, layout):
    model = job.model
    words = {"tensor-model-parallel-size": layout.tp, "pipeline-model-parallel-size": layout.pp,
             "context-parallel-size": layout.cp}
    if layout.pp > 1:
        words["pipeline-model-parallel-layout"] = shlex.quote(megatron_stages(job, layout))
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
              "max-position-embeddings": model.block_size,
              "attention-dropout": 0, "hidden-dropout": 0}  # Megatron-LM's default is 0.1
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
    # Megatron-LM asserts this variable where T or C > 1, on GPUs before Blackwell
    variable = "CUDA_DEVICE_MAX_CONNECTIONS=1 " if layout.tp > 1 or layout.cp > 1 else ""
    return variable + " ".join(["torchrun ... pretrain_gpt.py", *(
        f"--{name} {value}".strip() for name, value in words.items())])


def expert_width(model):
    """Hidden units of an expert."""
    return (model.n_hidden if is_llama(model) else 4 * model.n_embd) // model.top_k


def megatron_notes(job, layout):
    return ["in place of the dots torchrun's own flags, such as --nproc-per-node",
            "add --tokenizer-type, --data-path, --lr, --train-iters: the vocabulary is the "
            "tokenizer's"]


MEGATRON = Program(
    "Megatron-LM", "core_v0.19.0", zero=(0, 1),
    cannot=("gpipe, zb-h1, zb-h2 and zb-v",
            "ZeRO-2 and 3 (--use-megatron-fsdp starts another engine)",
            "experts and --tp without --sp"),
    lacks=megatron_lacks, written=megatron_written, notes=megatron_notes)


# ---- this repository ----


def nothing(job, layout):
    return []


TRAIN_PY = Program("train.py", "", zero=(0, 1, 2, 3), cannot=(), lacks=nothing, written=nothing,
                   notes=nothing)
PROGRAMS = {"megatron": MEGATRON}
