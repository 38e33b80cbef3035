"""The planner: published figures, memory against measured runs, the search, its command line."""

import itertools
import json
import math
import operator
import re
import sys
import weakref
from collections import Counter
from contextlib import contextmanager
from dataclasses import asdict, replace
from functools import cache
from statistics import median
from types import SimpleNamespace
from unittest.mock import patch
from xml.etree import ElementTree

import pytest
import torch
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._python_dispatch import TorchDispatchMode

import engine.collectives as c
import engine.optimizer
import extras.planner.__main__ as plan
import recompute
import schedules
import sizes
from data.batches import Data
from engine.ddp import DDP
from engine.expert_parallel import spread_experts
from engine.group import Group, Work
from engine.mesh import Mesh
from engine.tensor_parallel import parallelize
from experts import kind_of
from extras.planner import costs, habits, hardware, measure, memory, published, report, traffic
from extras.planner import search as search_file
from extras.planner.mixture import Mixture
from extras.show import draw, pictures
from mesh import lay_out
from model import Block
from optimizer import decays
from run.config import check, check_layout, parse
from run.log import predicted_bytes
from schedules import make_schedule, simulate
from shard import tag_whole
from sizes import GPTConfig
from tests.harness import VOCAB, config, mesh_of, pool
from tests.trainer import Trainer, live_bytes

SVG = "{http://www.w3.org/2000/svg}"

# ---- the planner ----


def test_published_runs_are_predicted_better_than_by_one_mfu():
    """Held-out sources are within 14% in the median, half of their runs within 15%. One
    constant MFU for each kind of GPU has four times the error on fitted sources, 1.5 times there.
    (Not so on the fourth and the sixth hold-out: the tests below.)"""
    found = published.errors(published.RUNS)
    for status in {run.status for run in published.RUNS} - {"held out fourth", "held out sixth"}:
        errors, baseline = ([abs(row[i]) for row in found if row[0].status == status]
                            for i in (1, 2))
        most, share, times = (0.04, 0.85, 4) if status == "fitted" else (0.14, 0.5, 1.5)
        assert round(median(errors), 2) <= most and median(errors) * times < median(baseline)
        assert sum(error <= 0.15 for error in errors) >= share * len(errors)
    fitted = [run for run in published.RUNS if run.status == "fitted"]
    assert len({run.source for run in fitted}) == 24 and len(fitted) == 190


def test_thirty_more_runs_are_predicted_within_the_band_in_the_median():
    """Nothing is fitted to them. Of the fourth hold-out half of the rows are within 15%; there the
    constant MFU of an H100 is as good."""
    for status, count in (("held out fourth", 20), ("held out fifth", 10)):
        runs = [run for run in published.RUNS if run.status == status]
        errors = [abs(error) for _, error, _ in published.errors(runs)]
        assert len(runs) == count and median(errors) <= plan.BAND
        assert sum(error <= 0.15 for error in errors) >= count / 2
    wide = [run for run in published.RUNS if "SmolLM3" in run.source or "2019" in run.source]
    for run, error, _ in published.errors(wide):  # plain data parallelism, D = 192 and 64
        assert run.layout.zero == 0 and abs(error) < 0.18


def test_the_band_is_the_median_error_of_all_runs_that_were_held_out():
    """84 of 141 are within 15%; of one constant MFU for each kind of GPU 58 are."""
    found = [row for row in published.errors(published.RUNS) if row[0].status != "fitted"]
    errors, baseline = ([abs(row[i]) for row in found] for i in (1, 2))
    assert round(median(errors), 2) == plan.BAND and median(errors) < 0.75 * median(baseline)
    near, as_near = (sum(error <= 0.15 for error in each) for each in (errors, baseline))
    assert (len(found), near, as_near) == (141, 84, 58)


def test_of_the_sixth_hold_out_less_than_half_is_within_15_percent():
    """The constant MFU is worse, but for NeMo's 175 billion and for torchtitan's compiled runs."""
    found = [row for row in published.errors(published.RUNS) if row[0].status == "held out sixth"]
    errors, baseline = ([abs(row[i]) for row in found] for i in (1, 2))
    assert len(found) == 54 and median(errors) < 0.17 < 0.2 < median(baseline)
    assert sum(error <= 0.15 for error in errors) == 24
    worse = set()
    for source in {run.source for run, _, _ in found}:
        of_source = [row for row in found if row[0].source == source]
        planned, constant = (median(abs(row[i]) for row in of_source) for i in (1, 2))
        if planned > constant:
            worse.add(source.split(",")[-1].strip().split(" |")[0])
    assert worse == {"175B", "compiled"}


def test_of_the_seventh_hold_out_all_dense_runs_are_within_15_percent():
    """Each publisher alone is well predicted: Aleph Alpha, of whom no run was known before, and
    FlagPerf, whose runs of other models are fitted."""
    runs = [run for run in published.RUNS if run.status == "held out seventh"]
    found = published.errors(runs)
    assert len(found) == 23
    assert all(abs(error) <= 0.15 for run, error, _ in found if not run.job.model.n_experts)
    for publisher in ("Aleph Alpha", "FlagPerf"):
        errors, baseline = ([abs(row[i]) for row in found if row[0].source.startswith(publisher)]
                            for i in (1, 2))
        assert median(errors) < 0.065 and 2 * median(errors) < median(baseline), publisher


def test_of_nine_sheets_of_trials_the_fastest_is_chosen_seven_times():
    """Of 6 to 27 layouts. A rule that predicts nothing chooses as well: the fewest T x P."""
    plans, rules = zip(*(row[2:] for row in published.choices()), strict=True)
    assert len(published.TRIALS) == 133 and len(plans) == 9
    assert plans.count(0) == 7 and sorted(plans)[-2] < 0.07 and max(plans) < 0.26
    assert rules.count(0) == 8 and max(rules) < 0.06
    errors = [abs(error) for _, error, _ in published.errors(published.TRIALS)]
    assert median(errors) < 0.09 and sum(error <= 0.15 for error in errors) == 104


def test_each_published_run_that_is_off_by_15_percent_has_a_reason():
    for run, error, _ in published.errors(published.RUNS):
        assert (abs(error) > 0.15) == bool(run.reason), (run, error)


def test_each_trait_of_a_published_program_is_known():
    known = {*"""naive flash1 flash fa3 eager fused compiled even counted alone overlapped after
             4ports hsdp inplace""".split()}
    assert {trait for run in published.RUNS for trait in run.traits} <= known


def test_no_source_is_fitted_and_held_out():
    names = {status: {run.source.split(",")[0] for run in published.RUNS if run.status == status}
             for status in {run.status for run in published.RUNS}}
    assert not names["fitted"] & names["held out third"] and len(names["held out third"]) == 8
    assert not names["fitted"] & (names["held out fourth"] | names["held out fifth"])
    assert names["fitted"] & names["held out seventh"] == {"FlagPerf"}  # other models
    assert names["fitted"] & names["held out sixth"] == {"torchtitan"}  # other runs of it
    assert names["known publisher"] <= names["fitted"]


def saved_by_naive(model, layout, recompute):
    """Bytes per token that a block of 2021 saves beyond memory.saved_by_block: masks of dropout
    and, unless they are recomputed, scores; not the logsumexp (arXiv 2205.05198: 34 h + 5 S heads
    at T = 1)."""
    T, scores = layout.tp, 0 if recompute == "selective" else 5 * model.block_size
    masks = 2 * model.n_embd / (T if layout.sp else 1)
    return masks + model.n_head * (scores - 4) / T


def held(run):
    """Bytes on the fullest rank. Published programs hold other things than train.py: the logits of
    all tokens and not of a chunk, in 16 bits, in 32, and a gradient ("inplace": the first only);
    under ZeRO-3 no 16-bit copy of the master weights."""
    model, layout, most = run.job.model, run.layout, 0
    n, of_logit = memory.tokens_of(run.job, layout), 2 if "inplace" in run.traits else 2 + 4 + 4
    for rank in (0, layout.pp - 1):
        parts = memory.memory_of_rank(run.job, layout, rank)
        head = memory.parts_of(model, layout.schedule, layout.pp, layout.chunks)[rank].head
        need = parts["total"] + head * n * model.vocab_size / layout.tp * of_logit
        need -= parts["weights"] * (layout.zero == 3)
        if "naive" in run.traits:
            saved = memory.saved_by_block(run.job, layout, layout.recompute)
            more = saved_by_naive(model, layout, run.recompute) / saved
            need += n * saved_by_naive(model, layout, "none")  # of a block under way
            need += (run.recompute != "full") * parts["activations"] * more
        most = max(most, need)
    return most


def test_published_runs_fit_into_their_memory():
    """But for 530 billion under 2021's ZeRO-3, which gathers a matrix and not a layer at once;
    Llama 3, which frees outputs of stages early (arXiv 2407.21783, section 3.3); five of NeMo's,
    whose kernels save less for backward; one without master weights; and one of Pax (by 3%). Of the
    last thirty: MaxText's, which recompute a little; mixtures, whose kernels save less; NeMo's 405
    billion; and ColossalAI's, whose logits are in chunks. Of the sixth hold-out: torchtitan's, with
    cards of more memory, and mixtures, NeMo's and Pythia's by 3%. Of the seventh: two of Aleph
    Alpha's, by 3 and 6%."""
    full = [run for run in published.RUNS if held(run) > 1e9 * run.machine.gb]
    last = {"held out fourth", "held out fifth"}
    sixth = Counter(run.source.split()[0] for run in full if run.status == "held out sixth")
    assert sixth == {"torchtitan,": 4, "Pythia": 1, "Pythia's": 1, "NeMo-Framework-Launcher,": 1,
                     "Grok-1": 1, "Qwen3-235B": 1, "GPT-OSS": 1}
    seventh = Counter(run.source.split()[0] for run in full if run.status == "held out seventh")
    assert seventh == {"Aleph": 2}
    full = [run for run in full if run.status not in ("held out sixth", "held out seventh")]
    names = Counter(run.source.split()[0] for run in full if run.status not in last)
    assert names == {"Narayanan": 1, "Llama": 3, "NVIDIA": 5, "KempnerForge,": 1, "Pax": 1}
    names = Counter(run.source.split()[0] for run in full if run.status in last)
    assert names == {"MaxText": 5, "GPT-OSS": 3, "Qwen3-30B-A3B": 1, "Llama": 1, "ColossalAI": 1}
    assert all(run.layout.zero == 3 for run in full if run.model == "megatron-530b")


def test_a_group_on_n_gpus_of_a_node_has_n_ports():
    device = hardware.DEVICES["h100"]
    port = 1e9 * device.network * device.f_network
    members = [costs.on_node(device, stride, 64) for stride in (1, 2, 8, 16)]
    assert members == [8, 4, 1, 1]
    nvlink = 1e9 * device.nvlink * device.f_nvlink
    assert costs.link(device, 8, 64) == min(nvlink, 8 * port) and costs.link(device, 1, 8) == port
    assert costs.link(device, 8, 8) == nvlink
    ring = [costs.ring_time(device, min(8, n), n, 1e9) for n in (8, 16)]
    assert ring[1] < 1.2 * ring[0]  # no cliff at the node's edge


def test_the_two_ends_of_a_pipeline_in_one_node_talk_over_nvlink():
    job = memory.Job(hardware.MODELS["gpt3-1.3b"], 64)
    layout = memory.Layout(pp=8, microbatches=8)
    inside, outside = (costs.Costs(job, replace(hardware.DEVICES["a100-80"], node=node))
                       .update_time(layout)[0] for node in (8, 4))
    assert outside > 5 * inside > 0


def test_what_compute_hides_is_the_shorter_but_for_a_fraction():
    device = replace(hardware.DEVICES["h100"], unhidden=0.25)
    exposed = costs.Costs(memory.Job(hardware.MODELS["gpt2"], 1), device).exposed
    assert exposed(4, 10, "dp") == 1 and exposed(10, 4, "dp") == 6


def test_grouped_keys_and_values_are_what_context_ranks_send():
    model = hardware.MODELS["llama-405b"]  # 128 heads of queries, 8 of keys and values
    layout = memory.Layout(cp=16, microbatches=8)
    ring, swap = (traffic.messages(memory.Job(model, 8), layout._replace(cp_attention=how))[0]
                  for how in ("ring", "all-to-all"))
    tokens = model.block_size / 16
    assert ring.nbytes == 2 * tokens * model.n_embd / 16 * 2
    assert swap.nbytes == 2 * 15 / 16 * tokens * model.n_embd * (1 + 1 / 16) * 2


@pytest.mark.parametrize("flags", [
    {"dp": 2, "zero": 1, "pp": 2}, {"tp": 2, "pp": 2}, {"dp": 2, "zero": 3},
    {"arch": "llama", "n_kv_head": 2, "tp": 2, "untied": True},
    {"dp": 4, "ep": 2, "experts": 4, "zero": 1, "microbatches": 3},
    {"cp": 2, "tp": 2, "experts": 4, "zero": 3},
    {"dp": 4, "shard": 2, "zero": 3, "microbatches": 3},
    {"dp": 4, "shard": 2, "ep": 2, "experts": 4, "zero": 2, "microbatches": 3}],
    ids=str)
def test_model_states_are_those_that_train_py_prints(corpus, flags):
    """Of every pipeline rank, and so of the fullest."""
    cfg = config(corpus, **{"n_embd": 32, "n_head": 4, "microbatches": 2, **flags})
    ranks = check(cfg, 1)
    printed = pool(ranks, _states, cfg)
    job, layout = planned(cfg)
    for rank in range(cfg.pp):
        parts = memory.memory_of_rank(job, layout, rank)
        want = sum(parts[name] for name in ("weights", "gradients", "optimizer"))
        of_rank = [size for place, size in printed if place == rank]
        assert abs(sum(of_rank) / len(of_rank) - want) < 1e-6 * want, rank


def planned(cfg):
    """The planner's (Job, Layout) of train.py's flags."""
    model = sizes.config_of(cfg, Data(cfg).vocab_size)
    width = sizes.WIDTHS[cfg.dtype]
    job = memory.Job(model, cfg.batch_size, width, 4 if cfg.grad_dtype == "float32" else width,
                     len(sizes.MOMENTS[cfg.optimizer]))
    return job, search_file.layout_of(cfg)


def _states(rank, cfg):
    """(place on the pipeline axis, bytes of model states that train.py predicts) of this rank."""
    mesh, data = mesh_of(cfg), Data(cfg)
    trainer = Trainer(cfg, mesh, data.vocab_size)
    return mesh.group("pp").rank, predicted_bytes(trainer)


class Watch:
    """The most bytes at a time that autograd keeps for backward, without parameters."""

    def __init__(self, trainer):
        self.pipeline, self.buckets = trainer.pipeline, trainer.reducer.buckets
        self.recomputed = [layer for layer in trainer.reducer.layers
                           if trainer.cfg.recompute and isinstance(layer, Block)]
        self.saved = weakref.WeakSet()  # storages; leave the set when they are freed
        self.peak = 0

    def note(self, tensor):
        """Called for each tensor that autograd saves."""
        storage = tensor.untyped_storage()
        if all(storage.data_ptr() != b.full.untyped_storage().data_ptr() for b in self.buckets):
            self.saved.add(storage)
            self.look()
        return tensor

    def look(self):
        deferred = {x.untyped_storage() for queue in self.pipeline.weight_work.values()
                    for _, grad, x, _ in queue for x in (grad, x)}
        self.peak = max(self.peak, sum(x.nbytes() for x in deferred.union(self.saved)))

    @contextmanager
    def span(self, *args, **kwargs):
        """Around each action of the pipeline."""
        yield
        self.look()

    @contextmanager
    def again(self):
        """Around a second forward, whose tensors go to the hooks of recompute.py."""
        def noting(keep, kept):
            return saved_tensors_hooks(lambda tensor: keep(self.note(tensor)), kept)

        with patch.object(recompute, "saved_tensors_hooks", noting):
            yield

    def note_input(self, block, args):
        """recompute.py keeps the input of a block in a list of its own."""
        for tensor in args:
            self.note(tensor)

    @contextmanager
    def watching(self):
        self.pipeline.group.span = self.span
        usual = {}  # {block: its argument `again`}
        hooks = []
        for block in self.recomputed:  # forward is a functools.partial, made in recompute.py
            usual[block] = block.forward.keywords["again"]
            block.forward.keywords["again"] = self.again
            hooks.append(block.register_forward_pre_hook(self.note_input))
        with saved_tensors_hooks(self.note, lambda tensor: tensor):
            yield
        del self.pipeline.group.span  # the class's, again
        for block, hook in zip(self.recomputed, hooks, strict=True):
            block.forward.keywords["again"] = usual[block]
            hook.remove()


def _held(rank, cfg):
    """Bytes of model states and saved activations on this rank, at the peak of a step."""
    mesh, data = mesh_of(cfg), Data(cfg)
    trainer = Trainer(cfg, mesh, data.vocab_size)
    watch = Watch(trainer)
    with watch.watching():
        norm, read = trainer.gradients(data.training(cfg, 0, mesh))
        trainer.update(norm, cfg.lr)
    return live_bytes(trainer) + watch.peak


@pytest.mark.parametrize("flags", [
    {"dp": 2, "zero": 3, "microbatches": 2}, {"tp": 2, "pp": 2, "sp": True, "schedule": "gpipe"},
    {"dp": 4, "shard": 2, "zero": 3, "microbatches": 2},
    {"pp": 2, "schedule": "zb-h1", "recompute": True}, {"cp": 2, "pp": 2, "dtype": "bfloat16"},
    {"dp": 2, "tp": 2, "schedule": "interleaved", "chunks": 1}], ids=str)
def test_memory_is_predicted_within_5_percent(long_corpus, flags):
    cfg = config(long_corpus, **{"n_layer": 4, "n_embd": 96, "n_head": 4, "block_size": 128,
                                 "microbatches": 4, "batch_size": 8, "dtype": "float32", **flags})
    ranks = check(cfg, 1)
    most = max(pool(ranks, _held, cfg))
    job, layout = planned(cfg)
    held = [memory.memory_of_rank(job, layout, rank) for rank in range(cfg.pp)]
    want = max(parts["total"] - parts["buffers"] for parts in held)
    assert abs(want / most - 1) < 0.05, (want, most)


def _saved(rank, cfg):
    """(place on the pipeline axis, bytes that autograd keeps at the peak of a step)."""
    mesh, data = mesh_of(cfg), Data(cfg)
    trainer = Trainer(cfg, mesh, data.vocab_size)
    watch = Watch(trainer)
    with watch.watching():
        trainer.gradients(data.training(cfg, 0, mesh))
    return mesh.group("pp").rank, watch.peak


def norms_of_a_cpu(cfg, job, layout):
    """Bytes that a Llama saves here and not on a GPU, which has a kernel for RMSNorm: each norm's
    input, divided. And, on both, cosines and sines of rotary positions, which the plan leaves out:
    for queries and keys, hs/2 each, per position."""
    h, w, blocks = cfg.n_embd, job.width, cfg.n_layer
    S = cfg.block_size // cfg.cp
    angles = blocks * S * 4 * (h // cfg.n_head // 2) * w
    return memory.tokens_of(job, layout) * (2 * blocks + 1) * h * w + angles


P2 = {"pp": 2, "microbatches": 4}


SAVED = [
    {}, {"dtype": "bfloat16"}, {"cp": 2, "cp_attention": "all-to-all"}, {"experts": 4},
    {"experts": 8, "top_k": 3}, {"experts": 4, "dtype": "bfloat16"},
    {"arch": "llama", "n_kv_head": 2}, {"arch": "llama", "n_kv_head": 2, "experts": 4},
    {"arch": "llama", "n_kv_head": 2, "cp": 2, "cp_attention": "all-to-all"},
    {"dp": 2, "ep": 2, "experts": 4}, {"tp": 2, "experts": 4}, {"tp": 2, "experts": 4, "sp": True},
    {"cp_attention": "all-to-all"}, P2, {**P2, "recompute": True}, {**P2, "schedule": "zb-h1"},
    {**P2, "schedule": "zb-h1", "recompute": True}, {**P2, "schedule": "zb-v"},
    {**P2, "schedule": "zb-h1", "experts": 4}]


@pytest.mark.parametrize("flags", SAVED, ids=str)
def test_a_step_saves_the_bytes_that_are_planned(long_corpus, flags):
    """Measured beside counted, exact but for the targets' 8 bytes a token and some more. Ranks that
    share experts are off by up to 1 in 200 in the mean, because tokens choose unevenly. Where I and
    W are apart, up to four vectors per token more for a moment: a product's operands wait for W
    already, and are not yet freed by I."""
    cfg = config(long_corpus, **{"n_layer": 4, "n_embd": 96, "n_head": 4, "block_size": 128,
                                 "microbatches": 1, "batch_size": 8, "dtype": "float32", **flags})
    places = pool(check(cfg, 1), _saved, cfg)
    job, layout = planned(cfg)
    for rank in range(cfg.pp):
        saved = [peak for place, peak in places if place == rank]
        want = memory.activations(job, layout, rank)
        if cfg.arch == "llama":
            want += norms_of_a_cpu(cfg, job, layout)
        off = 12_000
        if cfg.experts and len(places) > 1:
            off = max(off, 0.005 * want)
        vector = memory.tokens_of(job, layout) * cfg.n_embd * job.width
        more = {"zb-h1": 2, "zb-v": 4}.get(cfg.schedule, 0) * vector
        assert -off < sum(saved) / len(saved) - want < off + more, (rank, saved, want)


@pytest.mark.parametrize("n_layer,stages", [(2, 1), (2, 4), (5, 3), (6, 8)])
def test_each_layer_is_in_one_stage(n_layer, stages):
    model = GPTConfig(50257, 1024, n_layer=n_layer, n_head=8, n_embd=512)
    parts = memory.parts_of(model, "1f1b", stages, 1)
    assert [sum(numbers) for numbers in zip(*parts, strict=True)] == [1, n_layer, 1]


@pytest.mark.parametrize("width,copy", [(2, 2 * 4096), (4, 0)])
def test_an_mlp_beside_experts_is_counted_like_a_dense_one(width, copy):
    """Its parameters, and what it saves for backward: those by which a dense Llama grows with its
    MLP; and its input, the norm's output, if that has 16 bits: the router alone saves a copy in
    32 bits."""
    llama = hardware.MODELS["llama-7b"]
    layout = memory.Layout(dp=2, tp=2, pp=2, schedule="zb-h1", microbatches=4)
    grown = []
    for first, second in ((replace(llama, n_hidden=8192), replace(llama, n_hidden=8192 + 512)),
                          (Mixture(**asdict(llama) | {"n_experts": 8}),
                           Mixture(**asdict(llama) | {"n_experts": 8}, shared_width=512))):
        jobs = [memory.Job(model, 16, width) for model in (first, second)]
        numbers = [[memory.block_parameters(job.model, 2)[0],
                    memory.saved_by_block(job, layout, False), sum(memory.matrices(job.model))]
                   for job in jobs]
        grown.append([more - less for less, more in zip(*numbers, strict=True)])
    assert grown[0] == [3 * 4096 * 512 / 2, 4 * 512 * width / 2, 3 * 4096 * 512]
    assert grown[1] == [3 * 4096 * 512 / 2, 4 * 512 * width / 2 + copy, 3 * 4096 * 512]


@pytest.mark.parametrize("schedule,v", [("gpipe", 1), ("1f1b", 1), ("interleaved", 3),
                                        ("zb-h1", 1), ("zb-h2", 1), ("zb-v", 2)])
def test_memory_is_that_of_all_microbatches(schedule, v):
    """For few of them occupancy is as for many, but under GPipe."""
    job = memory.Job(hardware.MODELS["gpt3-1.3b"], 64)
    layout = memory.Layout(pp=4, schedule=schedule, chunks=v, microbatches=64)
    for rank in range(4):
        held, few = (max(memory.occupancy(job.model, schedule, 4, m, v, rank)) for m in (64, 8))
        assert held == few or schedule == "gpipe"
    less = memory.memory(memory.Job(job.model, 32), layout._replace(microbatches=32))
    ratio = memory.memory(job, layout)["activations"] / less["activations"]
    assert ratio > 1.9 if schedule == "gpipe" else ratio == 1


@pytest.mark.parametrize("experts", [0, 4])
@pytest.mark.parametrize("kind,more", [
    (GPTConfig, {}), (sizes.LlamaConfig, {"n_kv_head": 2, "n_hidden": 38}),
    (sizes.LlamaConfig, {"n_kv_head": 1, "n_hidden": 38, "tied": False})])
def test_the_planner_counts_parameters_as_the_model_has_them(experts, kind, more):
    config = kind(1003, block_size=24, n_layer=3, n_head=4, n_embd=16, n_experts=experts, **more)
    with torch.device("meta"):
        model = kind_of(config)(config)
    assert memory.n_parameters(config) == sum(p.numel() for p in model.parameters())


def test_activations_are_those_of_korthikanti_et_al():
    """arXiv 2205.05198, per token and layer, with dropout: ours are 8 bytes more, LayerNorm's."""
    model, T = GPTConfig(51200, 2048, 48, 64, 6144), 8
    job, h, five = memory.Job(model, 4), 6144, 5 * 64 * 2048
    for layout, want in {
            memory.Layout(): 34 * h + five,
            memory.Layout(tp=T): 10 * h + 24 * h / T + five / T,
            memory.Layout(tp=T, sp=True): (34 * h + five) / T,
            }.items():
        norms = 8 / (T if layout.sp else 1)
        saved = memory.saved_by_block(job, layout, False)
        assert saved + saved_by_naive(model, layout, "none") == want + norms
    assert saved + saved_by_naive(model, layout, "selective") == 34 * h / T + norms
    assert memory.saved_by_block(job, memory.Layout(), True) == 2 * h


# ---- memory, held to papers and to what a run allocates: docs/lab.html has it only copied ----


def test_models_have_the_parameters_of_narayanan_et_al():
    """arXiv 2104.04473, table 1, in billions."""
    for name, billions in (("megatron-1.7b", 1.7), ("megatron-7.5b", 7.5), ("megatron-39b", 39.1),
                           ("megatron-146b", 145.6), ("megatron-1t", 1008.0)):
        assert round(memory.n_parameters(hardware.MODELS[name]) / 1e9, 1) == billions


def states_per_parameter(model, **flags):
    """Bytes of weights, gradients and optimizer, of all pipeline ranks together, per parameter that
    they hold, where the tied matrix is held by two of them."""
    job, layout = memory.Job(model, 1), memory.Layout(**flags)
    ranks = [memory.memory_of_rank(job, layout, rank) for rank in range(layout.pp)]
    psi = memory.n_parameters(model)
    psi += model.vocab_size * model.n_embd * (layout.pp > 1)
    return sum(held[part] for held in ranks for part in ("weights", "gradients", "optimizer")) / psi


@pytest.mark.parametrize("ranks,gb", [
    (1, (120, 120, 120)), (4, (52.5, 41.3, 30)), (16, (35.6, 21.6, 7.5)), (64, (31.4, 16.6, 1.88)),
    (256, (30.4, 15.4, 0.47)), (1024, (30.1, 15.1, 0.12))])
def test_model_states_are_those_of_the_zero_paper(ranks, gb):
    """arXiv 1910.02054, figure 1 and table 1: 7.5 billion parameters; its digits are rounded or
    cut. Ranks that split sequences are replicas, too."""
    model = hardware.MODELS["megatron-7.5b"]
    cp = min(ranks, 4)
    for split in ({"dp": ranks}, {"dp": ranks // cp, "cp": cp}):
        assert math.isclose(states_per_parameter(model, **split), 16)
        for stage, want in zip((1, 2, 3), gb, strict=True):
            got = 7.5 * states_per_parameter(model, zero=stage, **split)
            assert abs(got - want) < 0.06, (split, stage)


def test_model_states_of_a_split_model_are_the_lessons():
    """13 billion parameters on P = 4, D = 16 with ZeRO-3: 3.25 GB a rank. 70 billion with ZeRO-3 on
    64: 17.5 GB. 530 billion on T = 8, P = 12, D = 21 with ZeRO-1: about 25 GB."""
    for name, billions, flags, gb in (
            ("gpt3-13b", 13, {"pp": 4, "dp": 16, "zero": 3}, 3.25),
            ("llama-70b", 70, {"dp": 64, "zero": 3}, 17.5),
            ("megatron-530b", 530, {"tp": 8, "pp": 12, "dp": 21, "zero": 1}, 25)):
        # norms and biases of rows, which no tensor rank splits, are little
        got = billions * states_per_parameter(hardware.MODELS[name], **flags) / flags.get("pp", 1)
        assert math.isclose(got, gb, rel_tol=0.015), name


@pytest.mark.parametrize("schedule,published", [
    ("gpipe", lambda P, m, rank: m), ("1f1b", lambda P, m, rank: min(P - rank, m)),
    ("zb-h1", lambda P, m, rank: min(P, m) if rank == 0 else None),
    ("zb-h2", lambda P, m, rank: min(2 * P - 1, m) if rank == 0 else None)])
@pytest.mark.parametrize("P,m", [(4, 8), (4, 2), (8, 24)])
def test_microbatches_in_flight_are_the_published_ones(schedule, published, P, m):
    """GPipe m; 1F1B P less the stage; zero bubble P or 2P - 1 on the first stage (arXiv 1806.03377,
    2401.10241), from F to the end of W."""
    model = GPTConfig(50257, 1024, n_layer=10 * P, n_head=8, n_embd=512)
    for rank, part in enumerate(memory.parts_of(model, schedule, P, 1)):
        held = memory.occupancy(model, schedule, P, m, 1, rank)
        most = max(now.blocks + now.deferred for now in held)
        if published(P, m, rank) is not None:
            assert most == published(P, m, rank) * part.blocks > 0
        heads = max(now.heads for now in held)
        assert heads == (max(now.blocks for now in held) // part.blocks if part.head else 0)


def peak_of(work):
    """Most bytes at a time that work() allocates, beyond those that it finds."""
    with torch.autograd.profiler.profile(profile_memory=True) as profile:
        work()
    return max(itertools.accumulate(event.nbytes() for event in profile.kineto_results.events()
                                    if event.name() == "[memory]"), default=0)


def _buffers(rank, cfg, words):
    """Of a model of so many words: bytes of the optimizer's copies in 32 bits, the peak of its
    step, the peak of a forward of the head. On a CPU torch makes one more 32-bit copy before it
    multiplies, where a GPU's kernel converts number by number: the first of the three has it."""
    mesh, data = mesh_of(cfg), Data(cfg)
    trainer = Trainer(cfg, mesh, words)
    batches = data.training(cfg, 0, mesh)
    norm, _ = trainer.gradients(batches)
    update = peak_of(lambda: trainer.update(norm, cfg.lr))
    held = [weights.numel() for weights, tag in zip(
        trainer.reducer.weights, trainer.reducer.tags, strict=True) if decays(tag)]
    copied = 4 * sum(held), 4 * max(map(operator.add, itertools.accumulate(held), held))
    layers = trainer.reducer.layers
    trainer.reducer.gather_weights([layers[-1]])
    x = torch.zeros(trainer.pipeline.shape, dtype=trainer.dtype).requires_grad_()
    (_, targets, _), *_ = trainer.own(batches)
    return copied, update, peak_of(lambda: layers[-1](x, targets))


@pytest.mark.parametrize("flags", [
    {"dp": 2}, {"dp": 4, "zero": 1}, {"dp": 3, "zero": 3, "tp": 2},
    {"dp": 4, "ep": 2, "experts": 4, "zero": 3}, {"dp": 4, "ep": 2, "experts": 8, "zero": 2},
    {"dp": 4, "shard": 2, "zero": 1}], ids=str)
def test_the_optimizer_copies_gradients_as_planned(corpus, flags):
    """In 32 bits: those of all matrices of a small model; under ZeRO this rank's shard of them,
    which of experts fewer ranks share."""
    cfg = config(corpus, dtype="bfloat16", microbatches=1, n_embd=48, n_layer=2, **flags)
    ranks = pool(check(cfg, 1), _buffers, cfg, VOCAB)
    job, layout = planned(cfg)
    part, = memory.parts_of(job.model, "1f1b", 1, 1)
    want = memory.optimizer_buffer(job, layout, part)
    copied = [each for (each, _), *_ in ranks]
    assert math.isclose(sum(copied) / len(ranks), want, rel_tol=0.02), (want, copied)
    for (_, with_operand), measured, _ in ranks:
        assert with_operand <= measured < 1.02 * with_operand + 512


@pytest.mark.parametrize("dtype", ["bfloat16", "float32", "float64"])
@pytest.mark.parametrize("tp", [1, 2])
def test_the_heads_buffers_are_as_planned(corpus, dtype, tp):
    """The logits of a chunk of 256 tokens, their log-softmax and, of 16 bits, a wide copy; beside
    what the head saves: its inputs, and the gradient of its matrix."""
    words = 4000
    cfg = config(corpus, dtype=dtype, microbatches=1, n_layer=1, tp=tp)
    measured = max(head for *_, head in pool(check(cfg, 1), _buffers, cfg, words))
    job, layout = planned(cfg)
    job = job._replace(model=replace(job.model, vocab_size=words))
    part, = memory.parts_of(job.model, "1f1b", 1, 1)
    buffers = memory.work_buffers(job, layout, part)
    head = memory.activations(job, layout, 0) - memory.activations(
        job._replace(model=replace(job.model, vocab_size=0)), layout, 0)  # of its matrix
    assert math.isclose(buffers + head, measured, rel_tol=0.03), (buffers, head, measured)


def _step(rank, cfg):
    """Peak of a step's forward and backward, beyond the model states: the second step's, and what
    ring attention keeps since the first."""
    mesh, data = mesh_of(cfg), Data(cfg)
    trainer = Trainer(cfg, mesh, data.vocab_size)
    for step in range(2):
        peak = peak_of(lambda step=step: trainer.gradients(data.training(cfg, step, mesh)))
    return mesh.group("pp").rank, peak + kept_by_the_ring(mesh)


def kept_by_the_ring(mesh):
    return sum(each.nbytes for each in mesh.group("cp").kept.values())


@pytest.mark.parametrize("flags", [
    {"dp": 2}, {"dp": 4, "zero": 2}, {"dp": 4, "zero": 3}, {"dp": 2, "zero": 3, "recompute": True},
    {"dp": 4, "shard": 2, "zero": 3},
    {"dp": 2, "pp": 2, "microbatches": 4}, {"dp": 2, "tp": 2, "sp": True},
    {"cp": 2}, {"cp": 2, "recompute": True}, {"cp": 4, "recompute": True, "block_size": 256},
    {"cp": 2, "cp_attention": "all-to-all", "recompute": True},
    {"dp": 2, "pp": 2, "schedule": "zb-h1", "microbatches": 4, "recompute": True}], ids=str)
def test_a_step_allocates_what_is_planned(long_corpus, flags):
    """... within 10%. (Under ZeRO-2 and 3 less one layer's gradient, counted twice for a GPU.)"""
    cfg = config(long_corpus, **{"n_layer": 4, "n_embd": 96, "n_head": 4, "block_size": 64,
                                 "microbatches": 2, "batch_size": 8, "dtype": "float32", **flags})
    job, layout = planned(cfg)
    peaks = pool(check(cfg, 1), _step, cfg)
    for rank in range(cfg.pp):
        held = memory.memory_of_rank(job, layout, rank)
        want = held["activations"] + held["buffers"]
        if cfg.zero >= 2:
            part = memory.parts_of(job.model, cfg.schedule, cfg.pp, cfg.chunks)[rank]
            want -= job.grad_width * memory.largest_layer(job, layout, part)
        measured = max(peak for place, peak in peaks if place == rank)
        assert 0.9 * want < measured < 1.05 * want, (rank, want, measured)


def _kept(rank, cfg):
    """(place on the pipeline axis, bytes that the ring keeps after a step)."""
    mesh, data = mesh_of(cfg), Data(cfg)
    trainer = Trainer(cfg, mesh, data.vocab_size)
    trainer.gradients(data.training(cfg, 0, mesh))
    return mesh.group("pp").rank, kept_by_the_ring(mesh)


@pytest.mark.parametrize("flags", [
    {}, {"dtype": "bfloat16"}, {"tp": 2, "sp": True}, {"arch": "llama", "n_kv_head": 2, "tp": 2},
    {"arch": "llama", "n_kv_head": 1, "dtype": "bfloat16", "cp": 3, "block_size": 24},
    {"pp": 4, "n_layer": 2, "microbatches": 4}, {"cp_attention": "all-to-all"},
    {"dtype": "float64", "recompute": True}], ids=str)
def test_ring_attention_keeps_the_bytes_that_are_planned(corpus, flags):
    """For its messages, exactly. A stage without blocks has no attention, and all-to-all keeps
    nothing."""
    cfg = config(corpus, **{"cp": 2, "microbatches": 1, **flags})
    job, layout = planned(cfg)
    parts = memory.parts_of(job.model, cfg.schedule, cfg.pp, cfg.chunks)
    for place, kept in pool(check(cfg, 1), _kept, cfg):
        assert kept == memory.ring_buffers(job, layout, parts[place]), place


def _sent(rank, cfg):
    """Bytes that this rank sends in a step, by axis."""
    mesh, data = mesh_of(cfg), Data(cfg)
    trainer = Trainer(cfg, mesh, data.vocab_size)
    norm, read = trainer.gradients(data.training(cfg, 0, mesh))
    trainer.update(norm, cfg.lr)
    if cfg.zero in (1, 2):  # new weights are still on their way
        trainer.reducer.gather_weights(trainer.reducer.layers)
    groups = {"tp": ("tp",), "cp": ("cp",), "pp": ("pp", "pp_ends"),
              "dp": ("shard_ep_cp", "shard_cp", "rep")}
    sent = {name: group.bytes_sent for name, group in mesh.groups.items()}
    return {axis: sum(sent.get(name, 0) for name in names) for axis, names in groups.items()}


@pytest.mark.parametrize("flags", [
    {"dp": 2, "zero": 2, "pp": 2}, {"dp": 2, "zero": 3, "pp": 2, "schedule": "zb-h1"},
    {"tp": 2, "sp": True, "dp": 2, "zero": 1, "pp": 2}, {"tp": 2, "cp": 2, "recompute": True},
    {"cp": 4, "cp_attention": "all-to-all"}, {"pp": 2, "schedule": "zb-v", "chunks": 2},
    {"dp": 4, "ep": 2, "experts": 4, "zero": 1}, {"dp": 4, "shard": 2},
    {"dp": 4, "shard": 2, "zero": 2}, {"dp": 4, "shard": 2, "zero": 3, "cp": 2},
    {"dp": 4, "shard": 2, "ep": 2, "experts": 4, "zero": 1},
    {"dp": 4, "shard": 2, "tp": 2, "sp": True, "zero": 1},
    {"arch": "llama", "n_kv_head": 3, "cp": 4, "untied": True, "dp": 2, "zero": 3},
    {"arch": "llama", "n_kv_head": 4, "cp": 2, "cp_attention": "all-to-all", "recompute": True},
    {"arch": "llama", "n_kv_head": 4, "tp": 2, "sp": True, "zero": 1, "pp": 2, "dp": 2},
    {"arch": "llama", "n_kv_head": 1, "pp": 4, "untied": True}], ids=str)
def test_bytes_sent_are_predicted_exactly(corpus, flags):
    cfg = config(corpus, microbatches=3, **flags)
    got = pool(check(cfg, 1), _sent, cfg)
    job, layout = planned(cfg)
    want = [message for rank in range(cfg.pp) for message in traffic.messages(job, layout, rank)]
    for axis in got[0]:  # on all ranks together: slices of an odd vocabulary differ
        predicted = sum(sent.times * sent.nbytes for sent in want if sent.axis == axis)
        assert sum(sent[axis] for sent in got) == round(predicted * len(got) / cfg.pp), axis


def test_what_tensor_ranks_hold_whole_is_summed_under_sp():
    """Two norms, the biases of two rows, and the final norm; with experts a router in the place of
    the MLP's row. Llama has one vector per norm and no bias, so no bias leaves for its router."""
    gpt, llama = hardware.MODELS["gpt2"], replace(hardware.MODELS["llama-7b"], n_layer=1)
    for model, per_block, ends in ((gpt, 4 + 2, gpt.block_size + 2), (llama, 2, 1),
                                   (replace(gpt, n_experts=8), 4 + 1 + 8, gpt.block_size + 2),
                                   (replace(llama, n_experts=8), 2 + 8, 1)):
        sent = traffic.messages(memory.Job(model, 1), memory.Layout(tp=2, sp=True))
        nbytes = next(message.nbytes for message in sent if "positions" in message.name)
        assert nbytes == 2 * (model.n_layer * per_block + ends) * model.n_embd


class Unconnected(Mesh):
    """Rank 0's mesh of ranks that do not exist: it says who is in a group, and sends nothing."""

    def communicator(self, name, ranks):
        return None


def mesh_without_ranks(layout):
    world = {"is_initialized": lambda: True, "get_rank": lambda: 0,
             "get_world_size": lambda: layout.ranks}
    with patch.multiple(torch.distributed, **world):
        sizes = {axis: getattr(layout, axis) for axis in ("dp", "pp", "cp", "tp", "ep", "shard")}
        return Unconnected(transport="gloo", **sizes)


def matrices_of_rank(model, layout):
    """The matrices of rank 0 without ZeRO, in the engine's order, on the meta device."""
    mesh = mesh_without_ranks(layout)
    with torch.device("meta"):
        whole = kind_of(model)(model)
    tag_whole(whole, mesh.group("shard", "ep", "cp"))
    parallelize(whole, mesh.group("tp"))
    if model.n_experts:
        spread_experts(whole, mesh)
    users = {param: [(0, i)] for i, layer in enumerate(whole.layers)
             for param in layer.parameters()}
    mebibytes = parse([]).bucket_mb
    assert memory.BUCKET == mebibytes * 2**20
    limit = SimpleNamespace(bucket_bytes=memory.BUCKET, dtype=torch.bfloat16)
    buckets = [params for _, params in DDP.partition(limit, users)]
    return [param for bucket in reversed(buckets) for param in bucket if decays(param.tag)]


@pytest.mark.parametrize("model, layout, column", [
    # attention's column, if a rank's experts are few
    (GPTConfig(256, 128, 2, 32, 4096, n_experts=8, top_k=8), {"dp": 8, "ep": 8}, 3 * 4096**2),
    # the MLP's column: a GPT's; a Llama's, gate and up; of all experts of a rank
    (GPTConfig(256, 128, 2, 32, 4096), {}, 4 * 4096**2),
    (replace(hardware.MODELS["llama-7b"], vocab_size=256), {}, 2 * 11008 * 4096),
    (replace(hardware.MODELS["llama-7b"], vocab_size=256), {"tp": 2}, 11008 * 4096),
    (replace(hardware.MODELS["llama-7b"], vocab_size=256, n_experts=8, top_k=2),
     {"dp": 4, "ep": 2}, 2 * 2 * 11008 * 4096)],
    ids=["few experts", "GPT", "Llama", "Llama, T = 2", "Llama, experts"])
def test_the_optimizer_converts_gradients_up_to_the_largest_tensor(model, layout, column):
    """... and CONVERTED elements: the planner plans the most that engine/optimizer.py can take at a
    time, here under DDP, where gradients are whole."""
    assert memory.CONVERTED == engine.optimizer.CONVERTED
    model = replace(model, n_layer=2)
    layout = memory.Layout(**layout)
    weights = matrices_of_rank(model, layout)
    assert max(param.numel() for param in weights) == column
    parts = engine.optimizer.AdamW.in_parts(SimpleNamespace(weights=weights), range(len(weights)))
    assert sorted(itertools.chain(*parts)) == [*range(len(weights))]
    most = max(sum(weights[i].numel() for i in part) for part in parts)
    part, = memory.parts_of(model, "1f1b", 1, 1)
    planned = memory.optimizer_buffer(memory.Job(model, 8), layout, part)
    assert planned == 4 * (memory.CONVERTED + column)
    assert column <= most < planned / 4


def test_under_zero_the_largest_gradient_converted_is_a_layers_shard_of_experts():
    model = replace(hardware.MODELS["llama-7b"], vocab_size=256, n_experts=8, top_k=2, n_layer=2)
    layout = memory.Layout(dp=4, ep=2, zero=2)
    of_experts = sum(param.numel() for param in matrices_of_rank(model, layout) if param.dim() == 3)
    part, = memory.parts_of(model, "1f1b", 1, 1)
    shard = of_experts / model.n_layer / (layout.dp / layout.ep)
    assert memory.optimizer_buffer(memory.Job(model, 8), layout, part) == 4 * (
        memory.CONVERTED + shard)


def test_the_scaled_copy_of_gradients_is_the_optimizers():
    """engine/optimizer.py scales gradients in place where they are as wide as the factor; 16-bit
    gradients it copies into 32 bits."""
    model = hardware.MODELS["gpt2"]
    part, = memory.parts_of(model, "1f1b", 1, 1)
    most = memory.CONVERTED + model.vocab_size * model.n_embd
    for dtype, grad_dtype in ((torch.bfloat16, torch.bfloat16), (torch.bfloat16, torch.float),
                              (torch.float, torch.float), (torch.double, torch.double)):
        grad = torch.ones(3, dtype=grad_dtype)
        factor = torch.ones((), dtype=torch.promote_types(dtype, torch.float))
        scaled, = engine.optimizer.AdamW.scaled(None, [grad], factor)
        copied = 0 if scaled.data_ptr() == grad.data_ptr() else most * scaled.element_size()
        job = memory.Job(model, 8, dtype.itemsize, grad_dtype.itemsize)
        got = memory.optimizer_buffer(job, memory.Layout(), part)
        assert got == copied, (dtype, grad_dtype)


def test_a_blocks_backward_adds_to_gradients_in_their_own_width():
    """W reads and writes them: of 32 bits 2 x 2 bytes more per parameter than of 16."""
    model, device = hardware.MODELS["llama-7b"], hardware.DEVICES["h100"]
    for experts in (0, 8):
        sized = replace(model, n_experts=experts)
        W = [costs.Costs(memory.Job(sized, 8, grad_width=width), device).block(
            4096, memory.Layout(), split=False)[2].compute for width in (2, 4)]
        more = 2 * 2 * sum(memory.block_parameters(sized)) / (1e9 * device.hbm * device.f_hbm)
        assert math.isclose(W[1] - W[0], more, rel_tol=1e-9)


def test_the_optimizer_reads_gradients_in_their_own_width():
    """Per parameter 12 bytes of states read and written, 2 of the weight written, the gradient."""
    layout = memory.Layout()
    part, = memory.parts_of(hardware.MODELS["gpt2"], "1f1b", 1, 1)
    narrow, wide = (
        costs.Costs(memory.Job(hardware.MODELS["gpt2"], 8, grad_width=width),
                    hardware.DEVICES["a100-80"]).optimizer_time(layout, part) for width in (2, 4))
    assert math.isclose(wide / narrow, 30 / 28, rel_tol=1e-12)


def test_llamas_have_their_published_sizes():
    for name, size in (("llama-7b", 6738415616), ("llama-13b", 13015864320),
                       ("llama-70b", 68976648192), ("llama-405b", 405853388800)):
        assert memory.n_parameters(hardware.MODELS[name]) == size


def test_flops_are_those_of_narayanan_et_al():
    """arXiv 2104.04473, section 3, and days of training = 8 tokens P / (GPUs x FLOP/s)."""
    model, B = hardware.MODELS["gpt3-175b"], 1536
    L, h, S, V = 96, 12288, 2048, 51200
    want = 96 * B * S * L * h * h * (1 + S / (6 * h) + V / (16 * L * h))
    job = memory.Job(model, B)
    assert math.isclose(costs.step_flops(job, recompute=True), want, rel_tol=1e-12)
    head = 6 * B * S * h * V  # is not recomputed
    assert math.isclose(costs.step_flops(job), 0.75 * (want - head) + head, rel_tol=1e-12)
    days = 300e9 / (B * S) * want / (1024 * 140e12) / 86400
    assert 33 < days < 35


@pytest.mark.parametrize("shape,tokens,mfu", [
    (dict(n_layer=12, n_head=12, n_embd=768, block_size=1024), 156_468, 0.4315),
    (dict(n_layer=24, n_head=16, n_embd=1024, block_size=1024), 64_813, 0.5051),
    (dict(n_layer=32, n_head=32, n_embd=4096, block_size=2048), 4_641, 0.6423)])
def test_mfu_is_that_of_llm_foundry(shape, tokens, mfu):
    """MosaicML's table of tokens per second and MFU on an A100, vocabulary 50,368."""
    model = GPTConfig(50368, **shape)
    flops = model.flops_per_token(memory.n_parameters(model))
    assert math.isclose(tokens * flops / 312e12, mfu, rel_tol=5e-3)


def test_a_plans_speed_and_days_are_those_of_the_papers_formulas():
    """GPT-3 on 1,024 GPUs at 140 TFLOP/s each: 34 days (arXiv 2104.04473, section 5.7)."""
    model, B = hardware.MODELS["gpt3-175b"], 1536
    L, h, S, V = 96, 12288, 2048, 51200
    flops = 96 * B * S * L * h * h * (1 + S / (6 * h) + V / (16 * L * h))  # with recompute
    head = 6 * B * S * h * V
    layout = memory.Layout(dp=16, tp=8, pp=8, microbatches=96, recompute=True)
    device = hardware.DEVICES["a100-80"]
    row = plan.figures(memory.Job(model, B), layout, device)
    rate = flops / (1024 * row["step_s"])
    assert math.isclose(1e12 * row["tflops_per_gpu"], rate)
    assert math.isclose(row["mfu"], rate / 312e12 * (0.75 * (flops - head) + head) / flops)
    assert math.isclose(row["memory_gb"]["total"],
                        memory.memory(memory.Job(model, B), layout)["total"] / 1e9)
    row["step_s"] = flops / (1024 * 140e12)
    text = report.summary([row], memory.Job(model, B), 300e9, "a plan")
    assert 33 < float(text.split()[-1]) < 35


def test_an_all_reduce_over_many_nodes_takes_the_trees_latency():
    """NCCL's estimate (src/graph/tuning.cc): a chain on each node, log2 of the nodes between; a
    long tensor takes the ring, whose bandwidth is larger."""
    device = hardware.DEVICES["h100"]
    short = [costs.all_reduce_time(device, 8, n, 1) for n in (8, 64, 1024)]
    hops = [2 * 7, 2 * (7 + 3), 2 * (7 + 7)]
    for seconds, want in zip(short, hops, strict=True):
        assert math.isclose(seconds, want * device.latency, rel_tol=1e-4)
    assert costs.all_reduce_time(device, 8, 64, 1e10) == costs.ring_time(device, 8, 64, 1e10, 2)


LAYOUTS_ON_NODES = [
    {"dp": 16, "ep": 2, "tp": 4}, {"dp": 16, "ep": 8, "pp": 2, "tp": 2},
    {"dp": 4, "ep": 2, "cp": 4}, {"dp": 8, "ep": 2, "pp": 2, "cp": 2},
    {"dp": 8, "ep": 4, "cp": 2, "tp": 2}, {"dp": 16, "ep": 2, "pp": 2},
    {"dp": 16, "shard": 4, "ep": 2}, {"dp": 8, "shard": 2, "tp": 2},
    {"dp": 8, "shard": 4, "ep": 4, "pp": 2, "tp": 2}]


@pytest.mark.parametrize("flags", LAYOUTS_ON_NODES, ids=str)
def test_ranks_that_sum_gradients_are_on_a_node_like_in_the_mesh(flags):
    """Nodes of 8. The groups of all parameters, of the experts, and of the copies of a shard, are
    those of mesh.py."""
    job = memory.Job(replace(hardware.MODELS["llama-7b"], n_experts=8), 64)
    layout = memory.Layout(**flags)
    planned = costs.Costs(job, hardware.DEVICES["h100"])
    found = []

    def collective(device, members, size, nbytes):
        found.append((members, size))
        return 0.0

    planned.data_messages(layout, memory.Part(0, 1, 0), 1e9, collective)
    assert found == planned.replicas(layout)[: 1 if layout.ep == 1 else 2]
    of_copies = set()
    with patch.object(costs, "all_reduce_time", lambda device, members, size, nbytes:
                      of_copies.add((members, size)) or 0.0):
        planned.copies_messages(layout, memory.Part(0, 1, 0), 1e9)
    groups = [lay_out(mesh_without_ranks(layout).sizes, axes)[0]
              for axes in (("shard", "ep", "cp"), ("shard", "cp"), ("rep",))]
    assert [*planned.replicas(layout), *(of_copies or {(1, 1)})] == [
        (sum(rank < 8 for rank in group), len(group)) for group in groups]


@pytest.mark.parametrize("flags", LAYOUTS_ON_NODES, ids=str)
def test_experts_and_stages_are_on_a_node_like_in_the_mesh(flags):
    """Nodes of 8: which links an all-to-all takes, and a message between stages."""
    job = memory.Job(replace(hardware.MODELS["llama-7b"], n_experts=8), 64)
    layout = memory.Layout(**flags)
    experts, stages = (lay_out(mesh_without_ranks(layout).sizes, [axis])[0]
                       for axis in ("ep", "pp"))
    device = hardware.DEVICES["h100"]
    with patch.object(costs, "swap_time", lambda device, members, size, nbytes: (members, size)[0]):
        forward, *_ = costs.Costs(job, device).block(64, layout, split=False)
    assert forward.ep == 2 * sum(rank < 8 for rank in experts)
    near = [sum(rank < 8 for rank in stages), len(stages)]
    nbytes = memory.tokens_of(job, layout) * job.model.n_embd * job.width
    inside = nbytes / costs.link(device, *near) + device.latency if near[0] == near[1] else (
        nbytes / costs.link(device, 1, len(stages)) + device.latency)
    assert costs.Costs(job, device).boundary(layout) == inside


def test_zero_has_a_collective_for_each_layer_and_under_ep_for_its_experts():
    """Four blocks, embedding and head. (engine/zero.py: a bucket is one layer's weights, two under
    --ep.)"""
    job = memory.Job(replace(hardware.MODELS["llama-7b"], n_experts=8), 64)
    for ep, collectives in ((1, 6), (2, 6 + 4)):
        seconds = costs.Costs(job, hardware.DEVICES["h100"]).data_messages(
            memory.Layout(dp=8, ep=ep, zero=1), memory.Part(1, 4, 1), 1e9, lambda *_: 1.0)
        assert seconds == collectives


@pytest.mark.parametrize("D", [64, 256, 1024])
def test_plain_ddp_at_scale_is_not_all_latency(D):
    """8 billion parameters, weak scaling: the all-reduce of 600 buckets over 1,024 ranks took 5
    seconds as flat rings. In trees it takes at most 1.5 times as long as over 8."""
    model = hardware.llama(32, 32, 4096, 14336, 8, 128256, 8192)
    part, = memory.parts_of(model, "1f1b", 1, 1)
    few, many = (
        costs.Costs(memory.Job(model, n), hardware.DEVICES["h100"]).data_messages(
            memory.Layout(dp=n), part, 8e9, costs.all_reduce_time) for n in (8, D))
    assert few < many < 1.5 * few


@pytest.mark.parametrize("zero", range(4))
def test_copies_of_a_shard_are_summed_after_backward(zero):
    """64 replicas with shards over the 8 of a node: a step is as long as that of a node alone with
    1/8 of the batch, and all-reduces each rank's chunk of each layer over 8 nodes. (Under ZeRO-0
    the chunk is whole, and there is one for each bucket.)"""
    model, device = hardware.MODELS["llama-7b"], hardware.DEVICES["h100"]
    layout = memory.Layout(dp=64, shard=8, zero=zero, microbatches=2)
    seconds = costs.Costs(memory.Job(model, 128), device).step_time(layout)
    alone = costs.Costs(memory.Job(model, 16), device).step_time(layout._replace(dp=8, shard=0))
    dense, _ = memory.block_parameters(model)
    numel = 32 * dense + 2 * model.vocab_size * model.n_embd
    chunks = 2 * numel / (8 if zero else 1)  # bytes
    times = 34 if zero else 2 * numel / memory.BUCKET
    want = times * costs.all_reduce_time(device, 1, 8, chunks / times)
    assert math.isclose(seconds - alone, want, rel_tol=1e-6)
    held = [memory.memory(memory.Job(model, n), each)["total"]
            for n, each in ((128, layout), (16, layout._replace(dp=8, shard=0)))]
    assert held[0] == held[1]


def test_messages_of_a_tied_embedding_are_the_pipelines():
    """One data rank: the sum over the two ends is the only message after backward."""
    found = costs.Costs(memory.Job(hardware.MODELS["gpt2"], 8), hardware.DEVICES["h100"])
    layout = memory.Layout(pp=2, microbatches=4)
    parts = found.breakdown(layout)
    assert parts["dp"] == 0 and parts["pp"] > found.tied_ends_time(layout) > 0
    assert math.isclose(sum(parts.values()), found.step_time(layout))


def test_times_of_collectives_are_the_textbooks():
    """Ring: 2 (N-1) latencies, 2 (N-1)/N of the bytes (Patarasuk and Yuan 2009). All-to-all of 16
    ranks on two nodes: 7/16 of the bytes over NVLink, meanwhile 8/16 over the rank's own port."""
    device = hardware.Device(100, 80, 1000, nvlink=200, network=20, node=8, f_nvlink=0.5,
                             f_network=0.5, latency=1e-3)
    assert math.isclose(costs.ring_time(device, 8, 8, 8e9, rounds=2),
                        2 * 7 * 1e-3 + 2 * 7 / 8 * 8e9 / 100e9)
    assert math.isclose(costs.swap_time(device, 8, 16, 16e9), 8e9 / 10e9 + 15e-3)
    assert math.isclose(costs.swap_time(device, 8, 8, 16e9), 14e9 / 100e9 + 7e-3)
    fast = replace(device, network=200)
    assert math.isclose(costs.swap_time(fast, 8, 16, 16e9), 8e9 / 100e9 + 15e-3)


@pytest.mark.parametrize("schedule,P,m,v", [("1f1b", 4, 23, 1), ("interleaved", 4, 32, 3),
                                            ("zb-h1", 4, 21, 1), ("zb-h2", 3, 17, 1),
                                            ("zb-v", 4, 30, 2), ("gpipe", 3, 20, 1)])
def test_two_short_simulations_tell_of_a_long_one(schedule, P, m, v):
    for times in ((1, 1, 1, 0), (1, 1, 1, 0.125), (1, 1.5, 0.75, 0.5)):
        lists, where = make_schedule(schedule, P, m, v), schedules.placement(
            schedule, P, v)
        long = simulate(lists, where, times).makespan
        assert math.isclose(costs.makespan(schedule, P, m, v, times), long, rel_tol=5e-3)


def test_the_search_finds_the_best_of_each_kind_that_fits():
    """Against trying them all, for a model of which little fits: without a band by their time
    lengthened by their price; with one, those within it before the others."""
    job = memory.Job(GPTConfig(51200, 1024, 10, 12, 3072), 48)
    device = replace(hardware.DEVICES["a100-80"], gb=5, reserve=0.2, node=4)
    search = search_file.Search(job, 12, device, {})
    every = [layout._replace(zero=zero) for layout in search.layouts() for zero in range(4)]
    fit = [(search.costs.step_time(layout), layout) for layout in every
           if memory.memory(job, layout)["total"] <= 4e9 and (layout.dp * layout.cp > 1
                                                               or layout.zero == 0)]
    found = search.best(8)
    assert search.fastest[0] == min(fit)[0] and len(fit) < len(every) / 2 and len(every) > 1000
    of_use = [layout for layout in every if layout.dp * layout.cp > 1 or layout.zero == 0]
    assert len(found) + search.slower + search.misfits == len(of_use)  # each is counted once
    for band, rows in ((math.inf, search_file.Search(job, 12, device, {}).best(8, 1e9)),
                       (0.1, search_file.Search(job, 12, device, {}).best(8, 0.1))):
        best = {}
        for seconds, layout in fit:
            kind = habits.kind_of_layout(layout)
            far = seconds > (1 + band) * min(fit)[0]
            key = far, seconds * habits.price(job, layout)
            best[kind] = min(best.get(kind, key), key)
        want = [key[1] for key in sorted(best.values())[:8]]
        assert [seconds * habits.price(job, layout) for seconds, layout in rows] == want, band


def test_the_search_tries_all_within_the_limits_that_it_prints():
    """tp on a node of 8; 512 tokens and more on a context rank; up to 16 chunks and 16 sequences of
    a microbatch; every schedule but GPipe."""
    limits = ("fewer than 512 tokens", "gpipe", "more than 16 chunks", "more than 16 sequences",
              "copies of shards")
    assert all(limit in search_file.NOT_SEARCHED for limit in limits)
    model = GPTConfig(51200, 2048, n_layer=64, n_head=32, n_embd=2048)
    job, device = memory.Job(model, 64), hardware.DEVICES["h100"]
    found = [*search_file.Search(job, 16, device, {}).layouts()]
    assert {layout.tp for layout in found} == {1, 2, 4, 8}
    assert {layout.cp for layout in found} == {1, 2, 4}
    assert {64 // layout.dp // layout.microbatches for layout in found} == {1, 2, 4, 8, 16}
    assert {layout.schedule for layout in found} == {*schedules.SCHEDULES} - {"gpipe"}
    chunks = {layout.chunks for layout in found if layout.schedule == "interleaved"}
    assert chunks == {*range(2, 9), 16}  # with 9 to 15 the number of stages does not divide 64
    assert {layout.shard for layout in found} == {0}
    for name, value in (("tp", 16), ("cp", 8), ("shard", 2)):  # a flag may ask for more
        asked = [*search_file.Search(job, 16, device, {name: value}).layouts()]
        assert asked and {getattr(layout, name) for layout in asked} == {value}


@pytest.mark.parametrize("name", ["gpt3-1.3b", "llama3-8b", "mixtral-8x7b", "qwen3-30b-a3b"])
def test_no_layout_holds_less_than_its_model_states(name):
    """So where these do not fit, no layout is tried."""
    job = memory.Job(hardware.MODELS[name], 64)
    search = search_file.Search(job, 16, hardware.DEVICES["h100"], {})
    layouts = [*search.layouts()][::97]
    held = [16 * memory.memory(job, layout._replace(zero=3))["total"] for layout in layouts]
    assert len(held) > 20 and min(held) > plan.least_bytes(job)


def test_few_of_many_layouts_are_simulated(monkeypatch):
    """16,384 GPUs, without a clock: of 20 thousand layouts and more some tens of pairs of lists are
    played, of a million actions together."""
    played, in_order = [], costs.in_order.__wrapped__

    def counted(*schedule):
        rows = in_order(*schedule)
        played.append(len(rows))
        return rows

    costs.makespan.cache_clear()
    monkeypatch.setattr(costs, "in_order", cache(counted))
    job = memory.Job(hardware.MODELS["llama-405b"], 2048)
    search = search_file.Search(job, 16384, hardware.DEVICES["h100"], {})
    assert len(search.best(6, plan.BAND)) == 6 and search.slower + search.misfits > 20_000
    assert len(played) < 100 and sum(played) < 1_000_000


@pytest.mark.parametrize("flags", [
    "--model gpt3-1.3b --gpus 32 --batch-size 64", "--model gpt3-1.3b --gpus 8 --tp 4 --cp 2",
    "--model gpt3-1.3b --gpus 16 --experts 8 --pp 2 --ep 2 --batch-size 64",
    "--model megatron-7.5b --gpus 16 --pp 4 --schedule interleaved --gpu h100",
    "--n-layer 6 --n-head 8 --n-embd 512 --gpus 6 --tp 1 --dp 3 --zero 2 --recompute",
    "--model gpt3-1.3b --chunks 2 --pp 4 --no-sp"])
def test_the_planner_prints_commands_that_train_takes(flags, capsys, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["planner", *flags.split(), "--json", "--top", "4"])
    plan.main()
    layouts = json.loads(capsys.readouterr().out)["layouts"]
    near = [row["step_s"] <= (1 + plan.BAND) * min(row["step_s"] for row in layouts)
            for row in layouts]
    assert near == sorted(near, reverse=True)
    named = dict(re.findall(r"--(dp|tp|pp|cp|ep|zero|schedule) (\S+)", flags))
    for row in layouts:
        cfg = parse(row["command"].split("train.py ")[1].split())
        nodes = re.search(r"--nnodes (\d+) --nproc-per-node 8 ", row["command"])
        ranks = row["dp"] * row["tp"] * row["pp"] * row["cp"]
        assert int(nodes[1]) * 8 == ranks if nodes else ranks <= 8
        assert cfg.dtype == "bfloat16" and cfg.recompute == row["recompute"]
        assert check_layout(cfg, ranks) == ranks
        for name in ("dp", "tp", "pp", "cp", "ep", "sp", "zero", "schedule", "microbatches"):
            assert getattr(cfg, name) == row[name]
        assert all(str(row[name]) == value for name, value in named.items())
        parts = [size for part, size in row["memory_gb"].items() if part != "total"]
        assert math.isclose(sum(parts), row["memory_gb"]["total"])
        assert math.isclose(sum(row["time_s"].values()), row["step_s"])


def test_a_batch_nearby_that_more_ranks_divide_is_named_if_it_is_faster(capsys, monkeypatch):
    """On 7 GPUs a batch of 3,073 allows D 7. No line if it would be faster by less than the band.
    96 sequences are near neither 64 nor 128."""
    assert [search_file.round_batch(batch, 64) for batch in (127, 96, 1000, 1, 63)] == [
        128, 96, 1024, 1, 64]
    for flags, line in (("--gpus 7", "--batch-size 3073 would be "),
                        ("--gpus 8 --model llama3-8b --batch-size 127 --pp 8", "")):
        monkeypatch.setattr(sys, "argv", ["planner", *flags.split(), "--top", "1"])
        plan.main()
        lines = [each for each in capsys.readouterr().out.splitlines() if "would be" in each]
        assert len(lines) == bool(line) and all(each.startswith(line) for each in lines)


@pytest.mark.parametrize("flags,line", [
    ("--gpus 64 --tp 3", "--tp 3"), ("--gpus 8 --tp 16", "--tp 16"),
    ("--model gpt3-175b --gpus 8", "--gpus 64 would do"), ("--gpu a1", "--gpu"),
    ("--gpus 8 --pp 2 --dp 3 --layout", "do not match --gpus 8"), ("--gpus 0", "--gpus 0"),
    ("--gpus 12", "--node 8"), ("--ep 2", "--ep 2"), ("--n-embd 100", "--n-embd 100"),
    ("--gpus 1 --tp 2", "--gpus 1"), ("--tp 0", "--tp 0"), ("--tflops 0", "--tflops 0"),
    ("--batch-size -3", "--batch-size -3"), ("--latency nan", "--latency nan"),
    ("--latency=-1e-6", "--latency -1e-06"), ("--launch -1", "--launch -1"),
    ("--late 1", "--late"), ("--cores -2", "--cores"), ("--tokens -1", "--tokens -1"),
    ("--tokens nan", "--tokens nan"), ("--vocab-size -5", "--vocab-size -5"),
    ("--f-hbm 1.5", "--f-hbm 1.5"), ("--unhidden 2", "--unhidden 2"), ("--hbm inf", "--hbm inf"),
    ("--n-layer 100000 --pp 8", "--n-layer 100000"), ("--attention naive", "--attention"),
    # --dp 16, train.py's choice, would be to blame; no flag gave it
    ("--model gpt3-175b --gpus 16 --batch-size 8", "no layout fits"),
    ("--model llama3-8b --block-size 100000000", "no layout fits: 380 do not fit into 74.4 GB"),
    ("--microbatches 7 --batch-size 64", "--microbatches 7 must divide --batch-size 64"),
    ("--gpu H1000", "invalid choice: 'h1000'"),
    ("--model llama3-8b --gpus 1 --gpu 4090", "--gpus 8 would do"),
    ("--model unknown", "--model unknown is neither a folder nor one of gpt2, "),
    ("--model llama-7b --expert-width 768", "--expert-width is for --experts"),
    ("--model llama-7b --shared-width 512", "--shared-width is for --experts"),
    ("--model llama-7b --split-experts", "--split-experts is for --experts"),
    ("--gpus 1000000", "has --gpus 1000000 ranks and divides --batch-size 3072"),
    ("--model llama3-8b --dp 8 --batch-size 100", "--batch-size 96 would allow dp 8 zero 3 "),
    ("--model llama3-8b --dp 8 --batch-size 12", "--dp 8 must divide --batch-size 12"),
    ("--pp 8 --microbatches 1000000 --batch-size 1000000", "at most a million")])
def test_the_planner_answers_bad_flags_with_one_line(flags, line, capsys, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["planner", *flags.split()])
    with pytest.raises(SystemExit) as end:
        plan.main()
    said = capsys.readouterr().err.strip()
    assert end.value.code == 2 and line in said and said.count("\n") == 0


class Moved(TorchDispatchMode):
    """Bytes that operations move: each reads its operands, once each, and writes its results."""

    def __init__(self):
        super().__init__()
        self.nbytes = 0

    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
        out = operation(*args, **(kwargs or {}))
        operands = {id(x): x for x in args if isinstance(x, torch.Tensor)}
        results = [x for x in (out if isinstance(out, tuple) else [out])
                   if isinstance(x, torch.Tensor)]
        self.nbytes += sum(x.nbytes for x in [*operands.values(), *results])
        return out


def test_measured_bandwidth_counts_the_bytes_that_are_moved(monkeypatch):
    """On a device that moves 1 GB/s and does nothing else."""
    def seconds(mesh, work, times=1):
        with Moved() as moved:
            work()
        return moved.nbytes / 1e9

    monkeypatch.setattr(measure, "seconds", seconds)
    assert measure.measure(Mesh(dp=1))["hbm"] == 1


def test_measured_links_are_those_of_a_ring(monkeypatch):
    """Of three ranks: 2 (N-1) latencies of 0.1 ms, and 2 (N-1)/N of the bytes at 2 GB/s."""
    summed = []

    def all_reduce(tensor, world):
        summed.append(tensor)
        return tensor

    def seconds(mesh, work, times=1):
        summed.clear()
        work()
        return 2 * 2 * 1e-4 + 2 * 2 / 3 * summed[0].nbytes / 2e9 if summed else 1.0

    monkeypatch.setattr(measure, "all_reduce", all_reduce)
    monkeypatch.setattr(measure, "seconds", seconds)
    flags = measure.measure(SimpleNamespace(device=torch.device("cpu"),
                                            world=SimpleNamespace(size=3)))
    assert flags["node"] == 3
    for name, value in (("nvlink", 2), ("latency", 1e-4)):  # the short sum has some bytes, too
        assert math.isclose(flags[name], value, rel_tol=1e-3)


def _latency(rank, world):
    """The measured latency of a node where each message that a rank sends takes one second. (So
    does all work that sends none.)"""
    mesh = Mesh(dp=world)
    sent = 0

    class Counting(Group):
        def exchange(self, send=None, *args, **more):
            nonlocal sent
            sent += send is not None
            return super().exchange(send, *args, **more)

    def seconds(mesh, work, times=1):
        before = sent
        work()
        return sent - before or 1

    mesh.world.__class__ = Counting
    with patch.object(measure, "seconds", seconds):
        return measure.measure(mesh)["latency"]


@pytest.mark.parametrize("world", [2, 3, 4])
def test_measured_latency_is_that_of_one_message(world):
    """An all-reduce is a swap on 2 ranks, a ring on 3 and 4."""
    assert pool(world, _latency, world) == [1] * world


class Silent:
    """A communicator that delivers nothing."""

    def send(self, *args):
        return Work()

    recv = send


def test_worked_figures_of_memory_and_of_the_ring():
    def states(parameters, stage, ranks):
        return parameters * sum(sizes.bytes_per_parameter(stage, ranks)) / 1e9

    assert states(7e9, 0, 1) == 112 and states(70e9, 0, 1) == 1120
    assert [round(states(7e9, stage, 64), 2) for stage in (1, 2, 3)] == [29.31, 15.53, 1.75]
    assert states(13e9 / 4, 3, 16) == 3.25  # P = 4
    ring = Group(Mesh(dp=1), "ring", range(8), 0, Silent())  # counts, and sends nothing
    c.all_reduce(torch.empty(2_000_000_000, dtype=torch.bfloat16, device="meta"), ring)
    assert ring.bytes_sent == 7_000_000_000


def _pictures(monkeypatch, *flags):
    monkeypatch.setattr(sys, "argv", ["pictures.py", *map(str, flags)])
    pictures.main()


def test_of_coinciding_curves_the_later_is_dashed():
    line = [(x, 2 * x) for x in range(1, 5)]
    svg = draw.curves_svg({"a": line, "b": line}, "title", "x", "y", [1, 4], [1, 10])
    assert svg.count("stroke-dasharray") == 1


@pytest.mark.parametrize("key,name", [("loss", "loss.svg"), ("busiest", "balance.svg")])
def test_runs_are_drawn_as_a_running_mean_over_each_step(key, name, monkeypatch, tmp_path):
    for run, level in (("one", 3), ("two", 1)):
        records = [{"step": i, "loss": 4.0, key: level + i % 2} for i in range(100)]
        (tmp_path / f"{run}.jsonl").write_text("\n".join(map(json.dumps, records)))
    _pictures(monkeypatch, "--svg", tmp_path, "--metrics", tmp_path / "one.jsonl",
              tmp_path / "two.jsonl")
    lines = [line.get("points").split()
             for line in ElementTree.parse(tmp_path / name).iter(SVG + "polyline")]
    curves = [points for points in lines if len(points) == 100]
    spans = []  # of each curve, in pixels; far from its ends, where a mean has fewer steps
    for points in curves:
        heights = [float(point.split(",")[1]) for point in points[20:80]]
        spans.append(max(heights) - min(heights))
    strips = {"loss": 1, "busiest": 0}[key]  # the difference of the two runs, here a constant
    assert len(spans) == 4 + strips and min(spans[:2]) > 50 and max(spans[2:]) < 10


def test_the_losses_of_two_runs_have_their_difference_drawn_below(tmp_path):
    """On a scale of its own: on the losses' scale two curves that are 1e-6 apart are one."""
    for run, apart in (("one", 0.0), ("eight", 1e-6)):
        records = [{"step": i, "loss": 4.0 + apart * (i - 50)} for i in range(101)]
        (tmp_path / f"{run}.jsonl").write_text("\n".join(map(json.dumps, records)))
    paths = [str(tmp_path / f"{run}.jsonl") for run in ("one", "eight")]
    strip = "loss of eight - loss of one, each step, at most 5e-05"
    _, svg = pictures.metrics_svg(paths)
    *_, drawn_last = ElementTree.fromstring(svg).iter(SVG + "polyline")
    heights = [float(point.split(",")[1]) for point in drawn_last.get("points").split()]
    assert strip in svg and len(heights) == 101
    assert (heights[0], heights[50], heights[-1]) == (440, 415, 390)
    assert "at most" not in pictures.metrics_svg(paths[:1])[1]


def test_labels_of_a_chart_do_not_overlap():
    curves = {name: [(0, 0), (9, 5 + i / 100)] for i, name in enumerate("abcd")}
    texts = ElementTree.fromstring(
        draw.curves_svg(curves, "title", "x", "y", [0, 9], [0, 9])).iter(SVG + "text")
    heights = sorted(float(text.get("y")) for text in texts if float(text.get("x")) > 570)
    assert len(heights) == 4 and all(b - a > 14 for a, b in itertools.pairwise(heights))


def test_the_planner_explains_a_layout(capsys, monkeypatch):
    monkeypatch.setattr(sys, "argv", [
        "planner", "--model", "gpt3-1.3b", "--gpus", "8", "--pp", "4", "--layout", "--recompute"])
    plan.main()
    said = capsys.readouterr().out
    assert "torchrun train.py --dp 2 --pp 4" in said and "seconds of the fastest: compute" in said
    assert "(train.py takes the vocabulary of its --data, not the planned 51200)" in said
    assert "DOES NOT FIT" not in said


def test_a_layout_that_does_not_fit_is_named(capsys, monkeypatch):
    monkeypatch.setattr(sys, "argv", "planner --model gpt3-13b --gpus 8 --layout".split())
    plan.main()
    lines = capsys.readouterr().out.splitlines()
    assert "the layout of the first row DOES NOT FIT:" in lines


def test_a_layout_that_does_not_fit_may_be_called_faster(capsys, monkeypatch):
    flags = "--gpus 1 --gb 6 --batch-size 16 --layout"  # fits in microbatches only
    monkeypatch.setattr(sys, "argv", ["planner", *flags.split()])
    plan.main()
    said = capsys.readouterr().out
    assert "DOES NOT FIT" in said
    assert re.search(r"^\d+\.\d% faster than the fastest that fits: within", said, re.MULTILINE)
