"""Two whole trainers that a user might pick instead, for extras/bench.py: picotron and nanoGPT,
imported from folders that have their files. Nothing of theirs is in this repository or is changed.

    git clone https://github.com/huggingface/picotron; git clone https://github.com/karpathy/nanoGPT
    python -m extras.bench --picotron picotron --nanogpt nanoGPT --only picotron

picotron: its Llama, tensor-parallel layers, 1F1B, DataParallelBucket, train_step, and AdamW as its
train.py makes it (not fused, no clipping). nanoGPT: its GPT and its optimizer, stepped as its loop
does, clipping included. Both get our initial weights, so that bench.py can compare the losses.
"""

import importlib.util
import io
import itertools
import os
import sys
from contextlib import redirect_stdout
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import MagicMock

import torch
import torch.nn as nn

from optimizer import BETAS

# What picotron imports and a step on CPUs never calls: kernels, downloads, data sets, the log
STAND_INS = ("flash_attn.flash_attn_interface", "flash_attn.layers.rotary",
             "flash_attn.ops.triton.layer_norm", "huggingface_hub", "datasets", "transformers",
             "safetensors", "wandb")


def load(name, path):
    """The module in this file, under a name of ours: their model.py and train.py are not ours."""
    spec = importlib.util.spec_from_file_location(name, path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # where dataclasses look for it
    spec.loader.exec_module(module)
    return module


def load_picotron(folder, rank):
    """picotron's train.py, with all that it imports from its other files."""
    # picotron reads its choices from the environment
    os.environ.update(DEVICE="cpu", DTYPE="float32", FLASH_ATTEN="0", LOCAL_RANK=str(rank))
    for name in STAND_INS:
        sys.modules[name] = MagicMock()
    torch.cuda.synchronize = lambda: None  # picotron's pipeline calls this after each message
    sys.path.insert(0, str(folder))
    return load("picotron_train", folder / "train.py")


class Batches:
    """In the place of picotron's data loader: gives the microbatches of a step again and again."""

    def __init__(self, microbatches):
        self.grad_acc_steps = len(microbatches)
        self.microbatches = itertools.cycle(microbatches)

    def __next__(self):
        ids, targets = next(self.microbatches)
        return {"input_ids": ids, "target_ids": targets, "hidden_states": None,
                "position_ids": torch.arange(ids.size(1))}


def picotron_weights(ours):
    """{picotron's name of a module: (its whole matrix, the dim that tensor ranks split)}; a norm,
    which is not split, has None. ours: a whole Llama (llama.py)."""
    first, *blocks, last = ours.layers
    found = {"embedding": (first.wte.weight, 0), "final_norm": (last.ln_f.weight, None),
             "final_proj": (last.lm_head.weight, 0)}
    for i, block in enumerate(blocks):
        q, k, v = block.attn.c_attn.weight.split(block.attn.parts)
        gate, up = block.mlp.c_fc.weight.split(block.mlp.parts)
        here = {"input_layernorm": (block.ln_1.weight, None), "attention.q_proj": (q, 0),
                "attention.k_proj": (k, 0), "attention.v_proj": (v, 0),
                "attention.out_proj": (block.attn.c_proj.weight, 1),
                "post_attention_layernorm": (block.ln_2.weight, None),
                "mlp.gate_proj": (gate, 0), "mlp.up_proj": (up, 0),
                "mlp.down_proj": (block.mlp.c_proj.weight, 1)}
        found |= {f"decoder_layers.{i}.{name}": pair for name, pair in here.items()}
    return found


def picotron(job):
    """A step of picotron on this rank. job: bench.Job."""
    cfg, config = job.cfg, job.config
    theirs = load_picotron(Path(job.args.picotron).resolve(), job.rank)
    theirs.setup_process_group_manager(cfg.tp, cfg.cp, cfg.pp, cfg.dp)
    ranks = theirs.pgm.process_group_manager
    model = theirs.Llama(SimpleNamespace(
        vocab_size=config.vocab_size, max_position_embeddings=config.block_size,
        hidden_size=config.n_embd, num_hidden_layers=config.n_layer,
        num_attention_heads=config.n_head, num_key_value_heads=config.n_kv_head,
        intermediate_size=config.n_hidden, rope_theta=config.rope_theta,
        rms_norm_eps=config.norm_eps))
    if cfg.tp > 1:
        model = theirs.apply_tensor_parallel(model)
    if cfg.pp > 1:
        model = theirs.PipelineParallel(model, model.model_config)
    weights = picotron_weights(job.whole_model())
    for name, param in model.named_parameters():
        whole, dim = weights[name.removesuffix(".weight")]
        mine = whole if dim is None else whole.chunk(cfg.tp, dim)[ranks.tp_rank]
        param.data.copy_(mine)
    del weights
    if cfg.dp > 1:
        model = theirs.DataParallelBucket(model)
    optimizer = theirs.AdamW(model.parameters(), lr=cfg.lr)
    batches = Batches(job.batches)
    device = torch.device("cpu")
    shape = (cfg.batch_size // cfg.dp // cfg.microbatches, config.block_size, config.n_embd)

    def step():
        optimizer.zero_grad()
        if cfg.pp > 1:
            loss = theirs.train_step_pipeline_1f1b(model, batches, shape, device, torch.float32)
        else:
            loss = theirs.train_step(model, batches, device)
        loss = theirs.average_loss_across_dp_cp_ranks(loss, device)
        optimizer.step()
        if cfg.dp > 1:
            model.reset()
        # All replicas and tensor ranks of the last stage have the same mean; others have 0
        return loss / (cfg.dp * cfg.tp)

    return step


def nanogpt(job):
    """A step of nanoGPT in one process."""
    cfg, config = job.cfg, job.config
    theirs = load("nanogpt_model", Path(job.args.nanogpt, "model.py"))
    with redirect_stdout(io.StringIO()):  # it prints its number of parameters
        model = theirs.GPT(theirs.GPTConfig(
            block_size=config.block_size, vocab_size=config.vocab_size, n_layer=config.n_layer,
            n_head=config.n_head, n_embd=config.n_embd, dropout=0.0, bias=True))
        optimizer = model.configure_optimizers(cfg.weight_decay, cfg.lr, BETAS, "cpu")
    params = dict(model.named_parameters())
    for name, param in job.whole_model().canonical_parameters():
        params[name].data.copy_(param)
    batches = [(ids.contiguous(), targets.contiguous()) for ids, targets in job.batches]

    def step():
        total = 0.0
        for ids, targets in batches:
            _, loss = model(ids, targets)
            loss = loss / len(batches)
            loss.backward()
            total += loss.item()
        nn.utils.clip_grad_norm_(model.parameters(), cfg.grad_clip)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return total

    return step
