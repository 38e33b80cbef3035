"""What a first run on GPUs meets, shown without one: how torch connects the ranks, and the lines
that are printed."""

import gc
import math
import os
import re
import threading
from contextlib import contextmanager
from datetime import timedelta
from types import SimpleNamespace
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch.autograd import DeviceType

import train
from engine.ahead import compute_ahead, threads_per_rank
from engine.collectives import all_gather
from engine.group import Group, Work
from engine.mesh import Mesh
from engine.nccl_group import CudaGroup
from engine.vocabulary_parallel import ChunkedHead, add_weight_gradient, positions_of_chunk
from engine.zero import ZeRO2
from group import CommunicationError, naming
from mesh import connection_options
from run import launch, processes
from run.config import Config, check_layout, choose_gpu_or_cpu, parse
from sizes import config_of
from tests import first_gpu
from tests.counts import (
    CHANGES,
    VOCABULARY,
    OneOfMany,
    count_step,
    meta_config,
    on_meta,
)
from tests.harness import HERE
from tests.pool import HANG, pool
from tests.runs import Run, _main, flags


@pytest.fixture
def nccl(monkeypatch):
    """A stand-in for NCCL's options, which torch for CPUs lacks."""
    monkeypatch.setattr(dist, "ProcessGroupNCCL", SimpleNamespace(Options=SimpleNamespace),
                        raising=False)


# ---- how torch connects the ranks ----


def test_the_watchdogs_limit_is_twice_ours_and_messages_have_priority(nccl):
    options = connection_options(torch.device("cuda", 0), 30)
    assert options["timeout"] == timedelta(seconds=60)
    assert vars(options["pg_options"]) == {"is_high_priority_stream": True,
                                           "_timeout": timedelta(seconds=60)}
    assert connection_options(torch.device("cpu"), 30) == {"timeout": timedelta(seconds=30)}


def test_nccl_gathers_a_ranks_own_chunk_from_its_place(monkeypatch):
    """A copy of it would be a kernel more; gloo wants one."""
    for group_class, in_place in ((CudaGroup, True), (Group, False)):
        group = group_class(Mesh(dp=1, native=True), "pair", [0, 1], 1)
        given = []
        monkeypatch.setattr(group, "run_native", lambda name, *tensors, given=given: given.extend(
            tensors))
        flat = torch.arange(8.0)
        all_gather(flat, group)
        out, own = given
        assert out.data_ptr() == flat.data_ptr() and own.tolist() == [4, 5, 6, 7]
        assert (own.data_ptr() == flat[4:].data_ptr()) == in_place


@pytest.mark.parametrize("device,of_world", [
    ("cuda", []), ("cpu", [[0, 1, 2, 3]])])
def test_the_same_ranks_have_one_communicator_on_gpus(nccl, monkeypatch, device, of_world):
    """Each takes half a GB of a card. On CPUs each group has a thread, and so one of its own."""
    made = []
    monkeypatch.setattr(dist, "new_group", lambda ranks, **options: made.append((ranks, options)))
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(dist, "get_rank", lambda: 2)
    monkeypatch.setattr(dist, "get_world_size", lambda: 4)
    mesh = Mesh(device, timeout=30, transport="gloo", dp=2, tp=2)
    replicas, tp, data = mesh.group("shard", "ep", "cp"), mesh.group("tp"), mesh.group("dp")
    assert [group.ranks for group in (replicas, tp, data)] == [[0, 2], [2, 3], [0, 2]]
    is_one = data is replicas
    assert is_one == (device == "cuda") and tp is not replicas
    of_pairs = [[0, 2], [1, 3], [0, 1], [2, 3]]  # of the replicas, of "tp"
    more = [] if is_one else [[0, 2], [1, 3]]  # of "dp"
    assert [ranks for ranks, _ in made] == of_world + of_pairs + more
    limit = timedelta(seconds=60 if is_one else 30)
    assert all(options["timeout"] == limit for _, options in made)


def test_dp_2_tp_2_pp_2_has_four_communicators(nccl, monkeypatch):
    """The world's is that of init_process_group; 4 pairs each of tp, dp and pp (also pp_ends)."""
    made = []
    monkeypatch.setattr(dist, "new_group", lambda ranks, **options: made.append(ranks))
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(dist, "get_rank", lambda: 5)
    monkeypatch.setattr(dist, "get_world_size", lambda: 8)
    mesh = Mesh("cuda", dp=2, pp=2, tp=2)
    groups = [mesh.world, mesh.group("shard", "ep", "cp"), mesh.group("rep"), mesh.group("cp"),
              mesh.group("tp"), mesh.group("pp"), mesh.ends("pp")]  # those of train.Trainer
    assert len(made) == 4 + 4 + 4
    assert [group.ranks for group in groups if group.size > 1] == [
        [*range(8)], [1, 5], [4, 5], [5, 7], [5, 7]]


def test_nccl_connects_at_init_and_not_when_the_card_is_full(nccl, monkeypatch):
    asked = {}
    monkeypatch.setattr(dist, "init_process_group",
                        lambda backend, **options: asked.update(options, backend=backend))
    monkeypatch.setattr(dist, "rendezvous", lambda *args, **options: iter([(
        SimpleNamespace(set=lambda *args: None, add=lambda *args: 1, clone=dist.HashStore), 0, 1)]))
    monkeypatch.setattr(dist, "PrefixStore", lambda name, store: store)
    monkeypatch.setattr(processes, "wait_for_start", lambda *args: None)
    for name in ("place", "store", "last_words"):
        monkeypatch.setattr(processes, name, None)
    with patch.object(torch.cuda, "current_device", lambda: 3):
        processes.init("cuda", 30)
    assert (asked["backend"], asked["device_id"]) == ("nccl", torch.device("cuda", 3))
    assert asked["timeout"] == timedelta(seconds=60)
    assert asked["pg_options"].is_high_priority_stream
    asked.clear()
    processes.init("cpu", 30)
    assert asked["backend"] == "gloo" and "device_id" not in asked


# ---- lines ----

NCCL_ERROR = """NCCL error in: /pytorch/torch/csrc/distributed/c10d/NCCLUtils.cpp:77, unhandled \
cuda error (run with NCCL_DEBUG=INFO for details), NCCL version 2.28.9
ncclUnhandledCudaError: Call to CUDA function failed.
Last error:
Cuda failure 2 'out of memory'"""


def test_nccls_own_reason_is_kept():
    with pytest.raises(CommunicationError) as error, naming("rank 3: joining group tp"):
        raise RuntimeError(NCCL_ERROR)
    assert str(error.value) == ("rank 3: joining group tp: NCCL error, unhandled cuda error: "
                                "Cuda failure 2 'out of memory'")


@pytest.mark.parametrize("flags,local,gpus,torchrun,lines", [
    ({"dtype": "bfloat16"}, 1, 8, False, ["1 of this machine's 8 GPUs in use; --dp 8 takes all"]),
    ({"dtype": "bfloat16", "dp": 2, "tp": 2}, 4, 8, False, [
        "4 of this machine's 8 GPUs in use; --dp 4 takes all"]),
    ({"dtype": "bfloat16", "dp": 4}, 2, 8, True, [
        "2 of this machine's 8 GPUs in use; torchrun --nproc-per-node 8 takes all"]),
    # More replicas fit: as many as the GPUs have room for, --ep of them at a time
    ({"dtype": "bfloat16", "tp": 3}, 3, 8, False, [
        "3 of this machine's 8 GPUs in use; --dp 2 takes 6"]),
    ({"dtype": "bfloat16", "tp": 3}, 3, 8, True, [
        "3 of this machine's 8 GPUs in use; torchrun --nproc-per-node 6 takes 6"]),
    ({"dtype": "bfloat16", "dp": 8, "batch_size": 40}, 4, 6, True, [  # two nodes
        "4 of this machine's 6 GPUs in use; torchrun --nproc-per-node 6 takes all, if 12 divides "
        "--batch-size"]),
    ({"dtype": "bfloat16", "tp": 2, "pp": 8}, 4, 8, True, [  # four nodes share one replica
        "4 of this machine's 8 GPUs in use; torchrun --nproc-per-node 8 takes all"]),
    ({"dtype": "bfloat16", "dp": 2, "tp": 2}, 4, 6, False, [
        "4 of this machine's 6 GPUs in use; --dp 3 takes all, if 3 divides --batch-size"]),
    ({"dtype": "bfloat16", "dp": 2, "ep": 2}, 2, 7, False, [
        "2 of this machine's 7 GPUs in use; --dp 6 takes 6, if 6 divides --batch-size"]),
    ({"dtype": "bfloat16", "tp": 2}, 2, 3, False, []),
    ({"dtype": "bfloat16"}, 8, 8, False, []),
    ({"dtype": "float32"}, 8, 8, False, [
        "--dtype float32: activations and messages take twice the memory of --dtype bfloat16, and "
        "products at least twice the time"]),
    ({"dtype": "float32", "device": "cpu"}, 1, 8, False, []),
    ({"dtype": "float32"}, 8, 4, False, ["8 processes for 4 GPUs: falling back to the CPU"])])
def test_a_run_says_what_it_leaves_unused(flags, local, gpus, torchrun, lines, monkeypatch,
                                          capsys):
    if torchrun:
        monkeypatch.setenv("TORCHELASTIC_RUN_ID", "x")
    cfg = Config(**{"dp": 1, **flags})
    choose_gpu_or_cpu(cfg, local, gpus, warn=False)
    assert capsys.readouterr().err == ""
    cfg = Config(**{"dp": 1, **flags})
    choose_gpu_or_cpu(cfg, local, gpus, warn=True)
    assert capsys.readouterr().err.splitlines() == lines


# ---- the process ----


def _main_and_freezing(*args):
    """_main; then how many objects Python's gc leaves alone."""
    try:
        _main(*args)
    finally:
        print("frozen", gc.get_freeze_count(), flush=True)


def test_the_gc_leaves_alone_what_is_there_before_the_first_step(corpus, tmp_path):
    run = Run(1, flags(corpus, tmp_path / "out", steps=1), tmp_path, fn=_main_and_freezing)
    assert run.wait() == [0], run.read()
    assert int(run.read("stdout").split()[-1]) > 10_000


def test_segments_of_memory_grow_unless_the_user_says_otherwise(monkeypatch):
    """Set before torch is imported, which reads it then."""
    monkeypatch.setattr(launch.signals, "before_training", lambda: None)
    monkeypatch.setattr(launch.config, "read_command_line", lambda *args: (Config(), 1, 1))
    monkeypatch.setenv("RANK", "1")
    with patch.dict(os.environ):
        os.environ.pop("PYTORCH_ALLOC_CONF", None)
        os.environ.pop("PYTORCH_CUDA_ALLOC_CONF", None)
        launch.start("")
        assert os.environ["PYTORCH_ALLOC_CONF"] == "expandable_segments:True"
        os.environ["PYTORCH_ALLOC_CONF"] = "max_split_size_mb:64"
        launch.start("")
        assert os.environ.pop("PYTORCH_ALLOC_CONF") == "max_split_size_mb:64"
        os.environ["PYTORCH_CUDA_ALLOC_CONF"] = "max_split_size_mb:64"  # the older name
        launch.start("")
        assert "PYTORCH_ALLOC_CONF" not in os.environ


# ---- initial values ----


def test_values_are_computed_three_at_a_time_and_come_in_order():
    three = threading.Barrier(3, timeout=HANG)
    asked = []

    def arguments():
        for x in range(6):
            asked.append(x)
            yield x

    def value(x):
        three.wait()  # BrokenBarrierError unless three threads are here together
        return 10 * x

    got, ahead = [], []
    for x in compute_ahead(value, arguments(), threads=3):
        got.append(x)
        ahead.append(len(asked) - len(got))
    assert max(ahead) == 3
    assert got == [0, 10, 20, 30, 40, 50]


def test_one_thread_is_the_callers():
    threads = compute_ahead(lambda x: threading.current_thread(), range(3), threads=1)
    assert {*threads} == {threading.current_thread()}


@pytest.mark.parametrize("threads", [1, 2])
def test_an_error_of_a_value_comes_in_its_turn(threads):
    values = compute_ahead(lambda x: 1 / x, [2, 1, 0, 5], threads)
    assert [next(values), next(values)] == [0.5, 1]
    with pytest.raises(ZeroDivisionError):
        next(values)


@pytest.mark.parametrize("cores,ranks,threads", [
    (224, "8", 8), (32, "8", 4), (32, None, 8), (2, "4", 1), (2, None, 2)])
def test_a_rank_draws_on_its_share_of_the_cores(monkeypatch, cores, ranks, threads):
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: range(cores), raising=False)
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    if ranks:
        monkeypatch.setenv("LOCAL_WORLD_SIZE", ranks)
    assert threads_per_rank() == threads
    monkeypatch.delattr(os, "sched_getaffinity")  # not Linux
    monkeypatch.setattr(os, "cpu_count", lambda: cores)
    assert threads_per_rank() == threads


@pytest.mark.parametrize("resume,draws", [("no", True), ("out/step-00000002", False)])
def test_a_run_that_resumes_draws_no_values(resume, draws):
    """The checkpoint will replace them."""
    cfg = meta_config(resume=resume)
    drawn = []

    def value(name, shape, *more):
        drawn.append(name)
        return torch.empty(shape, device="meta")

    with on_meta():
        train.Trainer(cfg, OneOfMany(), VOCABULARY, value)
    assert len(drawn) == (148 if draws else 0)


# ---- kernels and bytes of a step, counted on meta tensors ----


def test_the_loss_of_gpt2_takes_a_fifth_of_the_kernels_and_fewer_bytes_in_large_chunks():
    """16 x 1024 tokens: 8 chunks of 2048 tokens, where a CPU takes 22 of 768."""
    large, small = count_step(), count_step(cpu_chunks=True)
    assert (large.num_kernels, small.num_kernels) == (776, 1154)
    assert 68.4 < large.gigabytes() < 68.6 and 74.9 < small.gigabytes() < 75.1


def _gradient_of_the_matrix(rank, narrow):
    """(as a GPU sums it, exact): grad_weight + grad^T inputs, on a stand-in for torch's product
    that has its conditions."""
    def addmm(given, left, right, out_dtype, *, beta=1, alpha=1, out):
        assert left.dtype == right.dtype == narrow
        assert given.dtype == out.dtype == out_dtype == torch.float
        return out.copy_(given + left.float() @ right.float())

    product = torch.library.Library("aten", "IMPL")
    product.impl("addmm.dtype_out", addmm, "CPU")
    rng = torch.Generator().manual_seed(0)
    grad, inputs = (torch.randn(300, n, generator=rng).to(narrow) for n in (7, 5))
    inputs *= 1000  # their sum overflows float16
    grad_weight = torch.randn(7, 5, generator=rng)
    exact = grad_weight.double() + grad.double().t() @ inputs.double()
    with patch.object(torch.Tensor, "device", torch.device("cuda")):
        add_weight_gradient(grad_weight, grad, inputs)
    product._destroy()
    return grad_weight, exact


@pytest.mark.parametrize("narrow", [torch.bfloat16, torch.float16], ids=str)
def test_a_gpu_sums_the_gradient_of_the_matrix_in_32_bits(narrow):
    (got, exact), = pool(1, _gradient_of_the_matrix, narrow)
    assert (got - exact).norm() < 1e-6 * exact.norm()


def test_a_chunks_gradient_of_the_matrix_is_one_kernel():
    """A product of 16 bits that adds to 32. In three (inputs / power, product, sum) GPT-2's 8
    chunks would take 16 kernels and 1.3 GB more."""
    assert count_step().kernels["addmm"] == 4 * 12 + 8


def test_uncompiled_the_loss_passes_over_its_logits_ten_times_where_three_would_do():
    """A pass: 16 bits. 16.5 GB and 4.9."""
    saved = count_step().gigabytes() - count_step(fused_loss=True).gigabytes()
    logits = 2 * 16 * 1024 * 50304 / 1e9
    assert 6.9 * logits < saved < 7.1 * logits


def test_the_chunks_of_a_gpu_have_one_shape_where_the_length_allows_it():
    """Else --compile would compile the loss twice. On a CPU as many positions as tokens allow."""
    weight = torch.empty(50304, 768, dtype=torch.bfloat16, device="meta")

    def positions(sequences, length, device="meta"):
        x = torch.empty(sequences, length, 1, device=device).to(torch.bfloat16)
        return positions_of_chunk(x.expand(-1, -1, 768), weight, sequences)

    assert positions(16, 1024) == 128  # 8 chunks: 166 would do
    assert positions(1, 1024) == 1024 and positions(2, 5000) == 1250  # at most 2668, 1334
    assert positions(16, 1021) == 146  # a prime: 6 chunks of 146 and one of 145
    assert positions(4000, 7) == 1
    assert positions(16, 1024, "cpu") == 48


class Enough(Exception):
    """Ends a compilation before the C++ compiler, which would take long."""


def _passes_of_the_compiled_loss(rank):
    """How often torch's compiler reads or writes all logits in ChunkedHead.log_likelihood, as it
    plans its kernels for a CPU."""
    from torch._inductor import config
    from torch._inductor.graph import GraphLowering
    codegen, moved = GraphLowering.codegen, []

    def plan(graph):
        codegen(graph)
        moved.append(graph.count_bytes()[0])
        raise Enough

    head = ChunkedHead(SimpleNamespace(ln_f=None, lm_head=None),
                       SimpleNamespace(group=SimpleNamespace(size=1)))
    logits = torch.randn(4, 50304).bfloat16()
    local = torch.zeros(4, 1, dtype=torch.long)
    with (patch.object(GraphLowering, "codegen", plan), pytest.raises(Exception, match="Enough"),
          config.patch(fx_graph_cache=False)):
        torch.compile(head.log_likelihood)(logits, local, local.bool(), VOCABULARY, True)
    return moved[0] / logits.nbytes


def test_compiled_the_loss_reads_its_logits_for_two_sums_and_writes_them_once():
    """Two passes for the logsumexp (one on a GPU, where the compiler finds largest and sum
    together), and one that reads the logits and writes their gradient. With scatter_, which the
    compiler turns into a copy of all, it was 8 passes."""
    passes, = pool(1, _passes_of_the_compiled_loss)
    assert 4 <= passes < 4.01


def test_on_a_gpu_zero_2_reduces_a_layers_gradient_while_the_next_one_fills():
    """On a CPU, where the host would have to be there to end it, one full gradient exists."""
    for on_streams, left in ((False, 0), (True, 1)):
        reducer = object.__new__(ZeRO2)
        shard = torch.zeros(2)
        reduced, filling = (SimpleNamespace(
            grad=grad, grad_shard=shard, own=slice(2), numel=4, params=["w"],
            group=SimpleNamespace(runs_on_streams=on_streams)) for grad in (torch.ones(4), None))
        reducer.reducing, reducer.works, reducer.lacking = reduced, [Work()], set()
        assert reducer.full_gradient(filling).numel() == 4 and reducer.lacking == {"w"}
        assert len(reducer.works) == left and shard.tolist() == [1.0 - left] * 2
        assert (reduced.grad is None) == (not on_streams)
        reducer.reducing, reducer.works = filling, [Work()]
        reducer.full_gradient(filling)  # of the next microbatch: its own reduction must end
        assert reducer.works == []


def page_of_counts():
    """The lines that docs/measured.md has below `python -m tests.counts`."""
    page = (HERE / "docs/measured.md").read_text()
    return page.partition("    python -m tests.counts\n\n")[2].partition("\n\n")[0]


@pytest.mark.parametrize("name", [
    "the loss in chunks of 256 MB", "--compile: the loss in two kernels",
    "ZeRO-2: first gradients copied, not added to zeros"])
def test_each_change_is_counted_as_the_page_says(name):
    """Of some changes only the state after them, which other tests count, too."""
    flags, before = CHANGES[name]
    after = count_step(**flags)
    line, = (line.split() for line in page_of_counts().splitlines() if line.endswith(name))
    assert line[1] == f"{after.num_kernels:,}" and line[3] == f"{after.gigabytes():.2f}"
    if isinstance(before, dict):
        before = count_step(**{**flags, **before})
        assert line[0] == f"{before.num_kernels:,}" and line[2] == f"{before.gigabytes():.2f}"
    assert int(line[0].replace(",", "")) > int(line[1].replace(",", ""))
    assert float(line[2]) > float(line[3]) - 0.005


def test_sequence_parallelism_reorders_only_what_attention_needs():
    """1.3B, tp 8, 4 sequences in a microbatch: each border of a tensor-parallel region used to copy
    all of its activations into another order, 14.6 GB a step."""
    counting = count_step(n_layer=24, n_embd=2048, n_head=16, block_size=2048, batch_size=4, tp=8,
                          sp=True)
    assert counting.bytes["clone"] < 4.5e9, counting.bytes["clone"]


@pytest.mark.parametrize("stage", [2, 3])
def test_zero_copies_the_first_gradient_of_a_microbatch(stage):
    """It makes no zeros to add to: of 148 gradients none is added."""
    kernels = count_step(zero=stage).kernels
    assert kernels["new_zeros"] <= 1
    assert kernels["add_"] == 16 + 1  # shards of buckets; the step's number


def test_recompute_reads_no_state_of_a_gpus_random_generator(monkeypatch):
    """The host would wait for the device to read it, in each block."""
    for owner in (torch.cuda, torch.cuda.random):
        monkeypatch.setattr(owner, "get_rng_state", lambda *args: pytest.fail("reads the state"))
    count_step.__wrapped__(recompute=True)


# ---- the commands of docs/gpus-and-nodes.md ----


def lines_of_the_page():
    """[(processes, by SLURM?, words behind train.py)] of each command on the page that trains."""
    page = (HERE / "docs/gpus-and-nodes.md").read_text().replace("\\\n", " ")
    nodes, = re.findall(r"#SBATCH --nodes (\d+)", page)
    in_script, = re.findall(r"--nnodes \$SLURM_NNODES .*--nproc-per-node (\d+)", page)
    for before, after in re.findall(r"^ +(.*)\btrain\.py ([^'#\n]*)", page, re.MULTILINE):
        slurm = '"$head"' in before  # the script, or its other end
        world = re.search(r"--nnodes (\d+) .*--nproc-per-node (\d+)", before)
        nodes_and_ranks = (nodes, in_script) if slurm else world.groups() if world else (1, 1)
        yield math.prod(map(int, nodes_and_ranks)), slurm, after.split()


def test_the_lines_for_gpus_are_layouts_that_can_be():
    """For one GPU, a node of eight, two nodes and SLURM, GPT-2 and 1.3 billion parameters."""
    found = set()
    for world, slurm, words in lines_of_the_page():
        cfg = parse(words)
        ranks = check_layout(cfg, world)
        assert cfg.dtype == "bfloat16", words
        if cfg.block_size > 128:
            assert cfg.compile and cfg.data != "stdlib", words
            parameters = config_of(cfg, 50257).block_weights() * cfg.n_layer
            found.add((ranks, slurm, "1.3B" if parameters > 1e9 else "124M"))
    assert found == {(ranks, slurm, model) for model in ("124M", "1.3B")
                     for ranks, slurm in ((1, False), (8, False), (16, False), (16, True))}


def test_the_line_for_slurm_gives_each_rank_its_cores():
    """srun has not inherited --cpus-per-task since 22.05."""
    page = (HERE / "docs/gpus-and-nodes.md").read_text()
    asked = re.search(r"#SBATCH --cpus-per-task (\d+)", page)
    assert asked and 'srun --cpus-per-task "$SLURM_CPUS_PER_TASK" bash' in page


# ---- the page of the first ten minutes ----


def on_a_gpu(key, count, microseconds, device=DeviceType.CUDA):
    """An event of torch's profiler, as key_averages() has it."""
    return SimpleNamespace(key=key, count=count, device_type=device, self_cpu_time_total=0.0,
                           self_device_time_total=microseconds)


AT = "void at::native::(anonymous namespace)::"


def test_the_table_counts_what_ran_on_the_gpu_by_its_kind():
    """Names as CUDA's libraries and torch give them; the host's calls are no kernels."""
    events = [
        on_a_gpu("cudaLaunchKernel", 700, 0.0, DeviceType.CPU),
        on_a_gpu("aten::mm", 150, 0.0, DeviceType.CPU),
        on_a_gpu("nvjet_tst_192x192_64x4_2x1_v_bz_coopB_TNN", 100, 9000.0),
        on_a_gpu("sm90_xmma_gemm_bf16bf16_bf16f32_f32_tn_n_tilesize128x128x64", 40, 1000.0),
        on_a_gpu("void cublasLt::splitKreduce_kernel<32, 16, int, float>", 10, 500.0),
        on_a_gpu("cudnn_generated_fort_native_sdpa_sm90_flash_fprop_wgmma_f16", 12, 2000.0),
        on_a_gpu("void pytorch_flash::flash_bwd_dq_dk_dv_loop_seqk_parallel_kernel<>", 12, 3000.0),
        on_a_gpu(AT + "vectorized_layer_norm_kernel<c10::BFloat16, float>", 25, 300.0),
        on_a_gpu(AT + "GammaBetaBackwardCUDAKernelTemplate<c10::BFloat16, float>", 25, 700.0),
        on_a_gpu(AT + "multi_tensor_apply_kernel<TensorListMetadata<4>, "
                 "FusedAdamMathFunctor<float, 4>>", 5, 1500.0),
        on_a_gpu(AT + "cunn_SoftMaxForward<4, c10::BFloat16, float, float>", 8, 800.0),
        on_a_gpu("ncclDevKernel_AllReduce_Sum_f32_RING_LL(ncclDevKernelArgsStorage)", 3, 100.0),
        on_a_gpu("Memcpy DtoD (Device -> Device)", 2, 50.0),
        on_a_gpu("triton_poi_fused_addmm_gelu_3", 12, 600.0),
        on_a_gpu("void at::native::vectorized_elementwise_kernel<4, CUDAFunctor_add>", 60, 400.0)]
    assert first_gpu.table_of_kernels(events, DeviceType.CUDA) == {
        "products": (150, 10.5), "attention": (24, 5.0), "LayerNorm": (50, 1.0), "AdamW": (5, 1.5),
        "loss": (8, 0.8), "messages": (3, 0.1), "copies": (2, 0.05), "compiled": (12, 0.6),
        "elementwise and others": (60, 0.4)}


def test_memory_in_use_before_the_ranks_start_is_not_theirs(monkeypatch):
    """This process's own, and what its allocator keeps."""
    @contextmanager
    def started(ranks):
        yield lambda world, function, cfg: [(1e9, 17e9), (1e9, 18e9)] * (world // 2)

    monkeypatch.setattr(first_gpu, "started", started)
    monkeypatch.setattr(first_gpu, "bytes_in_use", lambda: 6e9)
    assert "    4 ranks: torch 4.00 GB, the card 12.00 GB, so 2.00 GB of CUDA and NCCL per rank" \
        in first_gpu.memory(dry=True)


def test_the_first_ten_minutes_print_their_page(monkeypatch, capsys, tmp_path):
    """In pretence: every part runs but commands that are not train.py. (.ci/run runs the whole
    page.)"""
    def run(file, *words):
        if file != "train.py":
            return [f"{file} {' '.join(words)}"]
        done = Run(1, list(map(str, words)), tmp_path)
        assert done.wait() == [0], done.read()
        return done.read("stdout").splitlines()

    class UsualPool:
        def start(self, size):
            pass

        def stop(self):
            pass

        def __call__(self, *args):
            return pool(*args)

    monkeypatch.setattr(first_gpu, "run", run)
    monkeypatch.setattr(first_gpu, "Pool", UsualPool)
    monkeypatch.setattr("sys.argv", ["first_gpu.py", "--dry"])
    with pytest.raises(SystemExit) as ended:
        first_gpu.main()
    assert not ended.value.code
    page = capsys.readouterr().out
    assert "Failed" not in page and "no step" not in page, page
    for words in (r"    test_all\.py -n 0", r"--compile +[\d.]+", r"without +[\d.]+ +[\d,]+ +-",
                  r"products +\d+ +[\d.]+", "4 ranks: torch 0.00 GB",
                  r"counted on meta tensors: [\d,]+ kernels"):
        assert re.search(words, page), (words, page)


def test_a_part_that_fails_does_not_end_the_page(monkeypatch, capsys):
    def broken(dry):
        raise RuntimeError("CUDA error")

    def a_command(dry):
        return first_gpu.indented(first_gpu.run("-c", "raise SystemExit('no card')"))

    monkeypatch.setattr("sys.argv", ["first_gpu.py", "--dry"])
    for failing, says in ((broken, "\nFailed: RuntimeError: CUDA error"),
                          (a_command, "\n    no card\n    failed, exit code 1")):
        monkeypatch.setattr(first_gpu, "PARTS", {"One": failing, "Two": lambda dry: ["it runs"]})
        with pytest.raises(SystemExit) as ended:
            first_gpu.main()
        assert ended.value.code == 1
        page = capsys.readouterr().out
        assert says in page and "it runs" in page
