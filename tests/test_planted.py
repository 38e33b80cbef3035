"""The proof can fail: it sees each of these bugs, most of which other projects have had.

A row of the table: what is wrong; the file; a text that occurs in it once; the same text with the
bug; the flags of the layout that has to differ from one process.
"""

import importlib
import inspect

import pytest
import torch

from sizes import config_of
from test_all import VOCAB, differences, one_process
from tests.harness import HERE, TOLERANCE, flags_of, ranks

BUGS = [
    # The loss is divided once, gradients are summed
    ("gradients are averaged over the replicas", "ddp.py",
     "all_reduce(flat.grads, flat.group)",
     "all_reduce(flat.grads, flat.group).div_(flat.group.size)", "--dp 2"),
    ("gradients are summed over the replicas again in each microbatch", "ddp.py",
     "if is_final or self.every_microbatch:", "if True:", "--dp 2 --microbatches 3"),
    ("ZeRO-2 forgets the microbatches before", "zero.py",
     "self.sums[flat] += chunk", "self.sums[flat] = chunk.clone()",
     "--dp 2 --zero 2 --microbatches 3"),
    ("the loss is a mean of the microbatches' means", "pipeline.py",
     "last_of_stage(y, targets) / self.num_tokens", "last_of_stage(y, targets) / targets.numel()",
     "--microbatches 3"),
    ("the balance loss is not divided by the tokens", "pipeline.py",
     "balance / self.num_tokens", "balance", "--experts 4"),
    ("the loss counts once for each tensor rank", "train.py",
     "self.reducer) / self.cfg.tp", "self.reducer)", "--tp 2"),
    ("context ranks are not in the ZeRO group", "train.py",
     'zero_group = mesh.group("shard", "ep", "cp")', 'zero_group = mesh.group("shard", "ep")',
     "--cp 2"),
    ("experts are summed over ranks that hold other experts", "experts.py",
     'same_experts = mesh.group("shard", "cp")', 'same_experts = mesh.group("shard", "ep", "cp")',
     "--dp 2 --ep 2 --experts 4"),
    ("replicas of a shard are not summed", "ddp.py",
     "for group in flat.others:", "for group in flat.others[1:]:", "--dp 4 --shard 2 --zero 3"),

    # Who holds what, and begins with what
    ("each tensor rank draws its slice anew", "model.py",
     "tag.slice(initial_value(tag.name, tag.shape, config, seed))",
     "initial_value(tag.name, tag.slice_shape, config, seed)", "--tp 2"),
    ("all blocks begin with the same weights", "model.py",
     'f"{seed} {name}".encode()', 'f"{seed} {name[-9:]}".encode()', "--pp 2"),
    ("all replicas read the same sequences", "data/batches.py",
     "np.split(starts, n_data_ranks)[index]", "np.split(starts, n_data_ranks)[0]", "--dp 2"),
    ("ZeRO's chunks begin one element late", "zero.py",
     "return flat.group.rank * (flat.weights.numel() // flat.group.size)",
     "return flat.group.rank * (flat.weights.numel() // flat.group.size + 1)", "--dp 2 --zero 1"),
    ("ZeRO-3 computes with the weights before the step", "zero.py",
     "self.free([*self.gathers])", "pass", "--dp 2 --zero 3"),

    # The optimizer
    ("AdamW's step counts once per parameter", "optimizer.py",
     "[*self.num_steps.repeat(len(indices))]", "[self.num_steps] * len(indices)", "--dp 1"),
    ("each rank clips by its own part of the norm", "train.py",
     "square.sqrt()", "own_square.sqrt()", "--tp 2"),
    ("replicated parameters count T times in the norm", "shard.py",
     "shared_by * (1 if sharded", "(1 if sharded", "--tp 2"),
    ("a chunk of a gradient counts 1/D in the norm", "shard.py",
     "1 if sharded else self.sum_over[0].size", "self.sum_over[0].size", "--dp 2 --zero 1"),

    # Tensor parallelism
    ("f does not sum in backward", "tensor_parallel.py",
     "lambda grad: sum_in_place(grad, group)", "lambda grad: grad", "--tp 2"),
    ("g sums in backward, too", "tensor_parallel.py",
     "sum_in_place(x, group), lambda grad: grad)",
     "sum_in_place(x, group), lambda grad: sum_in_place(grad.clone(), group))", "--tp 2"),
    ("a row's bias is added on each rank", "tensor_parallel.py",
     "y = self.g(partial_y, self.group)",
     "y = self.g(partial_y + (0 if self.bias is None else self.bias / 2), self.group)", "--tp 2"),
    ("heads are not split within q, k and v", "tensor_parallel.py",
     "self.weight = split(linear.weight, 0, group, parts)",
     "self.weight = split(linear.weight, 0, group)", "--tp 2"),
    ("--sp does not sum LayerNorm's gradients", "tensor_parallel.py",
     "sum_gradients=sp", "sum_gradients=False", "--tp 2 --sp"),
    ("softmax over a rank's own words", "tensor_parallel.py",
     "(log_sum - full_log_sum).exp()", "1", "--tp 2"),

    # Context parallelism
    ("targets are shifted after the sequence is split", "train.py",
     "targets[:, self.positions])", "ids[:, self.positions].roll(-1, 1))", "--cp 2"),
    ("positions begin at 0 on each rank", "context_parallel.py",
     "module.positions = positions", "module.positions = torch.arange(len(positions))", "--cp 2"),
    ("the ring does not rescale the earlier keys", "context_parallel.py",
     "lse.copy_(torch.logaddexp(lse, part_lse))", "lse.copy_(part_lse)", "--cp 4"),
    ("queries see the later keys of earlier ranks", "context_parallel.py",
     "slice(None), slice(half), False", "slice(None), slice(half, None), False", "--cp 2"),
    ("all-to-all leaves late segments in the ranks' order", "context_parallel.py",
     "*reversed(late)", "*late", "--cp 2 --cp-attention all-to-all"),

    # Pipeline
    ("the two ends' terms of the tied matrix are not summed", "pipeline.py",
     "weight.tag.sum_over += (group,)", "pass", "--pp 2"),
    ("backward is of the newest microbatch", "pipeline.py",
     "self.awaiting_backward.pop((stage, k))", "self.awaiting_backward.popitem()[1]",
     "--pp 2 --microbatches 4"),
    ("all microbatches are received into one buffer", "pipeline.py",
     "tensor = torch.empty(self.shape, dtype=self.dtype, device=self.group.device)",
     'tensor = vars(self).setdefault("buffer", torch.empty(self.shape, dtype=self.dtype)).data',
     "--pp 2 --microbatches 4 --schedule gpipe"),

    # Experts
    ("gates have no gradient to the router", "experts.py",
     "scores.softmax(-1).to(x.dtype)", "scores.detach().softmax(-1).to(x.dtype)", "--experts 4"),
    ("experts are balanced over the batch", "experts.py",
     "self.sum_choices(choices)", "self.sum_choices(choices.sum(0, keepdim=True))",
     "--experts 4"),
    ("experts are balanced over a rank's tokens", "experts.py",
     "for each in sequence_groups:", "for each in sequence_groups[1:]:", "--cp 2 --experts 4"),
]


def functions(names, module):
    """{name: function} of the functions and methods that a module's own text defines."""
    members = {}
    for name, thing in names.items():
        if getattr(thing, "__module__", "") == module:
            members[name] = thing
            if inspect.isclass(thing):
                members |= {f"{name}.{method}": getattr(thing, method) for method in vars(thing)}
    members = {name: inspect.unwrap(member) for name, member in members.items()}
    return {name: member for name, member in members.items() if inspect.isfunction(member)}


def plant(file, text):
    """Let the functions of an imported file run what they say in another text of the file. The
    functions stay the same objects, so every file that has imported one runs the new text."""
    module = file.removesuffix(".py").replace("/", ".")
    names = {"__name__": module, "__file__": str(HERE / file)}
    exec(compile(text, file, "exec"), names)
    imported = functions(vars(importlib.import_module(module)), module)
    for name, function in functions(names, module).items():
        imported[name].__code__ = function.__code__


def differences_with_bug(rank, cfg, file, text):
    """One rank of a layout in which a file has this text. The reference is from before."""
    one_process(config_of(cfg, VOCAB), cfg.data)
    plant(file, text)
    try:
        return differences(rank, cfg)[0]
    finally:
        plant(file, (HERE / file).read_text())


def differs(corpus, file, text, layout):
    cfg = flags_of(layout.split(), corpus)
    try:
        found = ranks(cfg.dp * cfg.pp * cfg.cp * cfg.tp, differences_with_bug, cfg, file, text)
    except AssertionError as error:
        assert str(error).startswith("initial "), error
        return True
    return not (torch.stack(found) < TOLERANCE).all()  # a nan is not


@pytest.mark.parametrize("file", sorted({file for _, file, *_ in BUGS}))
def test_files_without_a_bug_equal_one_process_when_planted(corpus, file):
    text = (HERE / file).read_text()
    for layout in {layout for _, where, *_, layout in BUGS if where == file}:
        assert not differs(corpus, file, text, layout), layout


@pytest.mark.parametrize("name,file,old,new,layout", BUGS, ids=[name for name, *_ in BUGS])
def test_the_proof_sees_the_bug(corpus, name, file, old, new, layout):
    text = (HERE / file).read_text()
    assert text.count(old) == 1, f"{file} has changed: {old}"
    seen = differs(corpus, file, text.replace(old, new), layout)
    assert seen, f"{layout} equals one process"
