"""torch's side of a row, like in torch's tutorials. DDP and FSDP2 average gradients over the ranks,
so in loop() a loss is divided by the tokens of this rank, not by those of all ranks.
"""

import torch
import torch.distributed as dist
import torch.nn as nn

from experts import kind_of
from extras.bench.job import repeated
from model import build, cross_entropy
from schedules import cut
from sizes import config_of


def whole_model(job):
    """The model of model.py, experts.py or llama.py, with the same initial weights as ours."""
    cfg = job.cfg
    config = config_of(cfg, job.vocabulary)
    model = build(config, cfg.seed, kind=kind_of(config))
    for block in model.layers[1:-1]:
        block.mlp.balance_weight = cfg.balance  # read by experts only
    return model


def adamw(params, cfg, kind=torch.optim.AdamW, **more):
    """torch's fused AdamW, with weight decay for matrices only. kind: the class, which may be one
    around AdamW; more: its further arguments."""
    matrices = []
    others = []
    for param in params:
        (matrices if param.dim() > 1 else others).append(param)
    groups = [{"params": matrices, "weight_decay": cfg.weight_decay},
              {"params": others, "weight_decay": 0.0}]
    return kind(groups, lr=cfg.lr, betas=(cfg.beta1, cfg.beta2), fused=True, **more)


def loop(job, model, optimizer, share=1.0):
    """The usual training step, for models that hide their parallelism. share: the part of this
    rank's loss in the mean over all ranks."""
    tokens = sum(ids.numel() for ids, _, _ in job.batches)  # tokens of a step on this rank

    def step():
        total = 0.0
        for ids, targets, _ in job.batches:
            loss = model(ids, targets) / tokens
            loss.backward()
            total += loss.item()
        nn.utils.clip_grad_norm_(model.parameters(), job.cfg.grad_clip)
        optimizer.step()
        optimizer.zero_grad()
        return total * share

    return step


def ddp(job, zero=False):
    """DistributedDataParallel; zero: with ZeroRedundancyOptimizer, which is ZeRO-1."""
    model = whole_model(job)
    wrapped = nn.parallel.DistributedDataParallel(model, process_group=job.peer_group,
                                                  gradient_as_bucket_view=True)
    if zero:
        from torch.distributed.optim import ZeroRedundancyOptimizer
        optimizer = adamw(model.parameters(), job.cfg, ZeroRedundancyOptimizer,
                          optimizer_class=torch.optim.AdamW, process_group=job.peer_group,
                          parameters_as_bucket_view=True)
    else:
        optimizer = adamw(model.parameters(), job.cfg)
    return loop(job, wrapped, optimizer, 1 / job.n)


def ddp_zero1(job):
    return ddp(job, zero=True)


def fsdp(job):
    """FSDP2, which is ZeRO-3."""
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.fsdp import fully_shard
    mesh = DeviceMesh.from_group(job.peer_group, "cpu")
    model = whole_model(job)
    for block in model.layers[1:-1]:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return loop(job, model, adamw(model.parameters(), job.cfg), 1 / job.n)


def rows_by_rank(linear, parts, n):
    """Sort the rows of a matrix that is several in one, such as q, k and v: DTensor gives rank r
    the r-th of n equal pieces, which now has the r-th piece of each part."""
    for param in linear.parameters():
        pieces = zip(*(part.chunk(n) for part in param.data.split(parts)), strict=True)
        param.data = torch.cat([piece for of_rank in pieces for piece in of_rank])


def dtensor(job, sp=False):
    """Tensor parallelism by DTensor; sp: with sequence parallelism."""
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import DTensor, Replicate, Shard
    from torch.distributed.tensor.parallel import ColwiseParallel as Col
    from torch.distributed.tensor.parallel import RowwiseParallel as Row
    from torch.distributed.tensor.parallel import (
        SequenceParallel,
        loss_parallel,
        parallelize_module,
    )
    mesh = DeviceMesh.from_group(job.peer_group, "cpu")
    model = whole_model(job)
    ids, targets, _ = job.batches[0]
    tokens = Shard(1) if sp else Replicate()  # how activations lie between blocks
    first, *blocks, last = model.layers
    for block in blocks:
        rows_by_rank(block.attn.c_attn, block.attn.parts, job.n)
        rows_by_rank(block.mlp.c_fc, block.mlp.parts, job.n)
        parallelize_module(block, mesh, {
            "attn.c_attn": Col(input_layouts=tokens), "attn.c_proj": Row(output_layouts=tokens),
            "mlp.c_fc": Col(input_layouts=tokens), "mlp.c_proj": Row(output_layouts=tokens)})
    parallelize_module(first, mesh, {"wte": Row(input_layouts=Replicate(),
                                                output_layouts=tokens)})
    parallelize_module(last, mesh, {"lm_head": Col(
        input_layouts=tokens, output_layouts=Shard(-1), use_local_output=False)})
    last.lm_head.weight = first.wte.weight  # tied again
    if sp:
        for layer in (*blocks, last):
            parallelize_module(layer, mesh, {name: SequenceParallel() for name, _ in
                                             layer.named_children() if name.startswith("ln_")})
        own_positions = torch.arange(job.cfg.block_size).chunk(job.n)[job.rank]
        first.positions = lambda idx: own_positions
        # wpe is no DTensor, and this rank has the gradients of its own positions only: sum them
        first.wpe.weight.register_post_accumulate_grad_hook(
            lambda param: dist.all_reduce(param.grad, group=job.peer_group))
    split = [p for p in model.parameters() if isinstance(p, DTensor)]
    whole = [p for p in model.parameters() if not isinstance(p, DTensor)]
    optimizers = [(params, adamw(params, job.cfg)) for params in (split, whole)]

    def step():
        with loss_parallel():
            loss = model(ids, targets) / targets.numel()
            loss.backward()
        # The global norm: of DTensors and of other tensors apart, then of both
        norm_of_split = nn.utils.get_total_norm([p.grad for p in split]).full_tensor()
        norm = torch.hypot(norm_of_split, nn.utils.get_total_norm([p.grad for p in whole]))
        for params, optimizer in optimizers:
            nn.utils.clip_grads_with_norm_(params, job.cfg.grad_clip, norm)
            optimizer.step()
            optimizer.zero_grad()
        return loss.full_tensor().item() / job.n

    return step


def dtensor_sp(job):
    return dtensor(job, sp=True)


def pipelining(job):
    """1F1B of torch.distributed.pipelining."""
    from torch.distributed.pipelining import PipelineStage, Schedule1F1B
    cfg = job.cfg
    last = job.rank == job.n - 1
    model = whole_model(job)
    tokens = cfg.batch_size * cfg.block_size  # tokens of a step
    start, stop = cut(model.config.layer_costs(), job.n)[job.rank]
    part = nn.Sequential(*model.layers[start:stop])
    stage = PipelineStage(part, job.rank, job.n, torch.device("cpu"), group=job.peer_group)
    schedule = Schedule1F1B(stage, cfg.microbatches,
                            lambda logits, targets: cross_entropy(logits, targets) / tokens,
                            scale_grads=False)
    del model
    all_ids, all_targets, _ = zip(*job.batches, strict=True)
    ids, targets = torch.cat(all_ids), torch.cat(all_targets)
    params = list(part.parameters())
    tied = None  # the matrix of embedding and head, on the ranks that have one of them
    if last:
        tied = part[-1].lm_head.weight
    elif job.rank == 0:
        tied = part[0].wte.weight
    optimizer = adamw(params, cfg)

    def step():
        losses = []
        if last:
            schedule.step(target=targets, losses=losses)
        else:
            schedule.step(*([ids] if job.rank == 0 else []))
        if tied is not None:  # these rows have two ranks, so both ends are the whole group
            dist.all_reduce(tied.grad, group=job.peer_group)
        grads = [p.grad for p in params if last or p is not tied]  # `tied` counts once in the norm
        square = nn.utils.get_total_norm(grads).square()
        dist.all_reduce(square, group=job.peer_group)
        nn.utils.clip_grads_with_norm_(params, cfg.grad_clip, square.sqrt())
        optimizer.step()
        optimizer.zero_grad()
        return torch.stack(losses).sum().item() if last else 0.0

    return step


def library(job):
    """torch's own collective of the row's name."""
    whole = torch.zeros(256 * job.row.size)  # 4 bytes each: row.size KiB
    own = torch.zeros(256 * job.row.size // job.n)
    known = {"all_reduce": (dist.all_reduce, [whole]),
             "reduce_scatter": (dist.reduce_scatter_tensor, [own, whole]),
             "all_gather": (dist.all_gather_into_tensor, [whole, own])}
    function, tensors = known[job.row.name]
    return repeated(job, lambda: function(*tensors, group=job.peer_group))


def dcp(job):
    """torch's distributed checkpoint."""
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
    model = whole_model(job)
    optimizer = adamw(model.parameters(), job.cfg)
    first_step = loop(job, model, optimizer)  # makes the moments, which a checkpoint has
    first_step()

    def step():
        weights, moments = get_state_dict(model, optimizer)
        state = {"model": weights, "optimizer": moments}
        dcp.save(state, checkpoint_id=f"{job.folder}/torch", process_group=job.peer_group)
        dcp.load(state, checkpoint_id=f"{job.folder}/torch", process_group=job.peer_group)
        set_state_dict(model, optimizer, model_state_dict=state["model"],
                       optim_state_dict=state["optimizer"])
        return 0.0

    return step
