"""Other trainers: the loops of docs/check-your-own-trainer.md are equal, and wrong ones are named;
names and orders of Megatron-core; wrong maps; models of another form; dumps that lack files.

The page's code, commands and tables are taken from the page."""

import importlib.util
import math
import os
import shutil
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import ModuleType

import pytest
import torch

from extras.doctor.diagnose import diagnose
from extras.doctor.dump import Dump, Tensors, read_dump
from extras.doctor.examined import Computed, InOwnDtype, step_of
from extras.doctor.finding import first_difference, norm_of, ratio_words
from extras.doctor.inputs import causes_of_tokens, check_initial_weights
from extras.doctor.norm import judge_norm, norms_of_parts, sum_of_squares, wrong_sums
from extras.doctor.tests.test_dump import (
    EXPERTS,
    LLAMA,
    change_json,
    dumps_of_one_process,
    every_tensor,
    recording,
)
from extras.doctor.weights import check_updates
from extras.doctor.words import lines
from extras.show.tests.pages import BLOCKS, PAGES, masked
from run.hugging_face import CONV1D
from tests.harness import HERE, pool
from tests.runs import rewrite

PAGE = "docs/check-your-own-trainer.md"
DUMPING, *LOOPS = ("\n".join(block.lines) for block in BLOCKS
                   if block.page == PAGE and block.kind == "python")
QUOTED = [block.output for block in BLOCKS
          if block.page == PAGE and block.command.startswith("python -m extras.doctor")]
NEEDS = ["torch", "transformers"]  # of each loop


def wrong_loops():
    """[(number of the loop, a part of it, what that becomes, what the doctor says)] of the page's
    tables."""
    found = []
    for number, table in enumerate(PAGES[PAGE].split("| in the loop |")[1:]):
        for row in table.split("\n\n")[0].splitlines()[2:]:
            _, part, becomes, says, _ = (cell.strip() for cell in row.split("|"))
            found.append((number, part.strip("`"), becomes.strip("`"), says))
    return found


def _train(rank, loop, folder):
    """Run a loop of the page as one rank, in a folder that has the reference."""
    module = ModuleType("dumping")
    exec(DUMPING, module.__dict__)
    page = {"__name__": "page"}
    sys.modules["dumping"] = module
    try:
        os.chdir(folder)
        exec(loop, page)
        page["train"]("mine")
    finally:
        os.chdir(HERE)
        del sys.modules["dumping"]


@pytest.fixture(scope="module")
def folder(corpus, tmp_path_factory):
    """A folder with the page's reference, of a random corpus."""
    folder = tmp_path_factory.mktemp("foreign")
    command = next(line for block in BLOCKS if block.page == PAGE for line in block.lines
                   if line.startswith("python -m extras.doctor.record reference"))
    _, flags = command.split(" reference ")
    run = recording(1, folder / "reference", [*flags.split(), "--data", corpus], folder)
    assert run.wait() == [0], run.read()
    return folder


def run_loop(folder, number, changes=()):
    """The Dump of a loop of the page with changes [(part, what it becomes)]."""
    if importlib.util.find_spec(NEEDS[number]) is None:
        pytest.skip(f"{NEEDS[number]} is not installed")
    loop = LOOPS[number]
    for part, becomes in changes:
        assert loop.count(part) == 1
        loop = loop.replace(part, becomes)
    shutil.rmtree(folder / "mine", ignore_errors=True)
    pool(2, _train, loop, folder)
    return read_dump(folder / "mine")


def answer(reference, mine):
    """(the lines that the doctor prints, the causes in them)."""
    findings = list(diagnose(reference, mine))
    printed = list(lines(findings, mine.layout))
    end = "equal" if all(equal for _, equal in printed) else "not equal"
    causes = [words for finding in findings for words in finding.causes]
    return [*(line for line, _ in printed), end], causes


def of_another_form(folder, name):
    """The dump of that name again, as if its model had a form that is not known."""
    copy = shutil.copytree(folder / name, folder / f"{name}-foreign", dirs_exist_ok=True)
    change_json(copy, model=None)
    return read_dump(copy)


@pytest.mark.parametrize("number", range(len(LOOPS)), ids=NEEDS)
def test_a_right_loop_is_equal_and_prints_what_the_page_quotes(folder, number):
    mine = run_loop(folder, number)
    printed, causes = answer(read_dump(folder / "reference"), mine)
    assert not causes and printed == QUOTED[0]


@pytest.mark.parametrize("number,part,becomes,says", wrong_loops())
def test_a_wrong_loop_is_named_as_the_page_says(folder, number, part, becomes, says):
    mine = run_loop(folder, number, [(part, becomes)])
    printed, causes = answer(read_dump(folder / "reference"), mine)
    assert causes and all(says in words for words in causes), printed
    assert printed[-1] == "not equal"
    for quote in QUOTED[1:]:
        if any(says in line for line in quote):
            assert masked(printed, all_numbers=True) == masked(quote, all_numbers=True)


def test_the_page_has_three_wrong_loops_of_each_and_quotes_one():
    numbers = [number for number, *_ in wrong_loops()]
    assert all(numbers.count(number) >= 3 for number in range(len(LOOPS)))
    assert any(says in line for *_, says in wrong_loops() for line in QUOTED[1])


def test_targets_that_are_shifted_twice_are_named(folder):
    """... without transformers, whose models shift labels."""
    shifted = ("torch.nn.functional.cross_entropy(model(ids[k])[:, :-1].flatten(0, 1), "
               "targets[k][:, 1:].flatten()) / 3")
    mine = run_loop(folder, 0, [("model(ids[k], targets[k]) / targets.numel()", shifted)])
    printed, causes = answer(read_dump(folder / "reference"), mine)
    assert len({*causes}) == 1 and causes[0].startswith("targets are shifted twice"), printed
    assert not any("fits nothing" in line for line in printed)


MIXED = [("import fully_shard", "import MixedPrecisionPolicy, fully_shard\n"
          "POLICY = MixedPrecisionPolicy(torch.bfloat16, torch.float32)\n"),
         ("(block, mesh=mesh)", "(block, mesh=mesh, mp_policy=POLICY)"),
         ("(model, mesh=mesh)", "(model, mesh=mesh, mp_policy=POLICY)"),
         ('about["layout"]', 'about["dtype"] = "bfloat16"\n    about["layout"]')]


@pytest.mark.parametrize("changes,says", [
    ([], None),
    ([("targets.numel()", "reference.targets(number).numel()")], "averaged over the 2 data ranks"),
    ([('"weight_decay": 0.0', '"weight_decay": 0.1')], "biases and norms decay, too")], ids=str)
def test_in_mixed_precision_weights_of_32_bits_are_the_masters(folder, changes, says):
    mine = run_loop(folder, 0, [*MIXED, *changes])
    printed, causes = answer(read_dump(folder / "reference"), mine)
    assert (printed[-1] == "equal") == (says is None)
    assert any("step 1 weights" in line for line in printed)
    assert causes and all(says in words for words in causes) if says else not causes, printed


# ---- a model of another form ----


@pytest.mark.parametrize("changes,says", [
    ([], None),
    ([("targets.numel()", "reference.targets(number).numel()")],
     "all gradients: averaged over the 2 data ranks (dp)"),
    ([('"weight_decay": 0.0', '"weight_decay": 0.1')], "biases and norms decay, too"),
    ([("optimizer.zero_grad()", "pass")], "of the first step's gradients is still in them"),
    ([("(ids[k], targets[k])", "(ids[k], ids[k])")], "")], ids=str)
def test_a_model_of_another_form_is_compared_with_references_gradients(folder, changes, says):
    """... of which a run of other ranks is right. says: None, it is equal; "": no name is known."""
    run_loop(folder, 0, changes)
    printed, causes = answer(of_another_form(folder, "reference"), of_another_form(folder, "mine"))
    assert (printed[-1] == "equal") == (says is None)
    assert any(says in words for words in causes) if says else not causes, printed


def test_a_gradient_that_is_zero_in_exact_arithmetic_may_be_anything_small(folder):
    """As that of a key's bias is in many models."""
    reference, mine = (of_another_form(folder, "reference") for _ in range(2))
    name = "transformer.h.0.ln_1.bias"
    for dump, value in ((reference, 1e-10), (mine, -3e-9)):
        gradients = dict(dump.gradients(1).readers)
        gradients[name] = lambda value=value: torch.full((48,), value)
        dump.tensors["gradients-1"] = Tensors(gradients)
    printed, _ = answer(reference, mine)
    assert any(line.split() == ["step", "1", "gradients", "equal"] for line in printed), printed


def test_gradients_of_another_form_may_be_off_by_as_much_as_the_weights(folder):
    """Rounding errors of step 1 move the weights, here by far more than in most runs."""
    reference, mine = (of_another_form(folder, "reference") for _ in range(2))
    for file in ("weights-1", "gradients-2"):
        mine.tensors[file] = Tensors({name: lambda tensor=tensor: tensor * (1 + 1e-4)
                                      for name, tensor in reference.tensors[file].items()})
    printed, _ = answer(reference, mine)
    assert any(line.split() == ["step", "2", "gradients", "equal"] for line in printed), printed


def test_from_other_weights_gradients_of_another_form_are_not_examined(folder):
    reference = of_another_form(folder, "reference")
    mine = replace(reference, tensors={**reference.tensors,
                                       "weights-1": reference.tensors["weights-2"]})
    mine.tensors["weights-2"] = Tensors({})
    printed, _ = answer(reference, mine)
    (line,) = (line for line in printed if line.startswith("step 2 gradients"))
    assert "not examined" in line


def test_another_form_without_references_gradients_is_one_line(folder):
    reference = of_another_form(folder, "reference")
    Path(reference.folder, "gradients-1.safetensors").unlink()
    with pytest.raises(ValueError, match="has no gradients-1.safetensors"):
        answer(read_dump(reference.folder), reference)


def test_another_form_without_references_tokens_of_step_2_is_compared_in_step_1(folder):
    mine = of_another_form(folder, "reference")
    reference = replace(mine, tokens={"tokens-1": mine.tokens["tokens-1"]})
    printed, _ = answer(reference, mine)
    assert any(line.startswith("step 1 gradients") for line in printed)
    (line,) = (line for line in printed if line.startswith("step 2 gradients"))
    assert line.endswith("not examined: REFERENCE has no tokens-2.safetensors")


def test_a_norm_of_one_ranks_shards_is_named(folder):
    """FSDP2 cuts each tensor along dim 0."""
    mine = run_loop(folder, 0)
    halves = [grad.chunk(2)[1].square().sum() for grad in mine.gradients(1).values()]
    mine.steps[0]["norm"] = torch.stack(halves).sum().sqrt().item()
    _, causes = answer(read_dump(folder / "reference"), mine)
    assert "the norm: that of data rank 1's shards only (FSDP, dp)" in causes


# ---- dumps of one process, changed by hand ----


@pytest.fixture(scope="module")
def small_dump(corpus, tmp_path_factory):
    return dumps_of_one_process(corpus, tmp_path_factory)


def with_layout(dump, **layout):
    return replace(dump, layout={**dump.layout, **layout})


def test_experts_are_split_over_the_tensor_ranks_in_the_norm_too(small_dump):
    """With ep 2, tp 2 tensor rank 0 has experts 0 and 2, tensor rank 1 has 1 and 3."""
    mine = with_layout(small_dump(**EXPERTS), dp=2, ep=2, tp=2)
    given = {name: grad for name, grad in mine.gradients(1).items() if ".experts." in name}
    parts = norms_of_parts(mine, given)
    for t, experts in enumerate(([0, 2], [1, 3])):
        square = sum(sum_of_squares(grad[experts]) for grad in given.values())
        norm = parts[f"that of tensor rank {t}'s part only (tp)"]
        assert norm**2 == pytest.approx(square, rel=1e-10)
    squares = {name: sum_of_squares(grad) for name, grad in given.items()}
    norms = wrong_sums(squares, mine.layout)
    assert norms["replicated gradients are left out (tp)"] == sum(squares.values()) ** 0.5


def test_the_norm_may_count_all_but_experts_once_for_each_expert_rank(small_dump):
    mine = with_layout(small_dump(**EXPERTS), dp=4, ep=2)
    mine.steps[0]["norm"] = math.hypot(*(
        norm_of(grad) * (1 if ".experts." in name else math.sqrt(2))
        for name, grad in mine.gradients(1).items()))
    (finding,) = judge_norm(mine, 1)
    assert finding.causes == ["the norm: the gradients of all but experts count 2 times (ep)"]


def test_the_norm_of_a_pipeline_rank_is_over_all_its_stages(small_dump):
    """Four layers in four stages; the tied matrix is in the first and in the last stage."""
    dump = small_dump(n_layer=2)
    given = dump.gradients(1)

    def square(*parts):
        return sum(sum_of_squares(grad) for name, grad in given.items()
                   if any(part in name for part in parts))

    tied, head = square("wte"), square("ln_f")
    for schedule, first in (("interleaved", square("wpe", ".h.1.") + tied / 2),
                            ("zb-v", square("wpe") + tied + head)):
        mine = with_layout(dump, pp=2, schedule=schedule, chunks=2)
        stages = {"interleaved": "0 and 2", "zb-v": "0 and 3"}[schedule]
        norm = norms_of_parts(mine, given)[f"that of pipeline stage {stages}'s part only (pp)"]
        assert norm**2 == pytest.approx(first, rel=1e-10)


def test_the_losss_tolerance_does_not_grow_with_the_tensor_ranks(small_dump):
    """Each of the T ranks has the same loss, with the same error."""
    for T in (1, 3):
        mine = with_layout(small_dump(), tp=T)
        terms = InOwnDtype(mine, 1, step_of(mine, 1)).terms
        examined = Computed(mine, 1, step_of(mine, 1), terms)
        examined.terms = replace(terms, losses=terms.losses + 0.5)
        assert examined.noise[0] == pytest.approx(0.5 / examined.terms.divisor, rel=1e-10)


def lacking(dump, *files):
    return replace(dump, tensors={file: tensors for file, tensors in dump.tensors.items()
                                  if file not in files})


def test_a_step_that_cannot_be_replayed_is_not_called_equal(small_dump):
    dump = small_dump()
    masters = {f"masters-{n}": dump.tensors[f"weights-{n}"] for n in (0, 1, 2)}
    dump = replace(dump, tensors={**dump.tensors, **masters})
    for missing, told in (((), ["step 1 weights", "step 2 weights"]),
                          (("gradients-1",), []), (("masters-0",), []),
                          (("gradients-2",), ["step 1 weights"])):
        findings = check_updates(dump, lacking(dump, *missing))
        examined = [finding.stage for finding in findings if not finding.differs]
        assert examined == told, missing


class SwappedTargets(Dump):
    """A dump of which two sequences have each other's targets."""

    def targets(self, number):
        targets = super().targets(number)
        targets[0, 0, [0, 1]] = targets[0, 0, [1, 0]]
        return targets


def test_swapped_targets_of_two_sequences_are_counted(small_dump):
    mine = SwappedTargets(**vars(small_dump()))
    B = mine.ids(1).size(2)
    assert causes_of_tokens(small_dump(), mine, 1) == [
        f"2 of {B} sequences have the targets of another sequence"]


def test_zeros_and_numbers_differ_in_words_too(small_dump):
    """A norm of 0, a tensor without dims, and constant initial weights have no ratio or rows."""
    assert ratio_words(3.0, 0.0) == "3, not 0"
    words = first_difference({"scale": torch.tensor(2.0)}, {"scale": torch.tensor(1.0)}, {"scale"})
    assert "scale, off by 1 of its norm, row 0 of 1" in words
    reference = with_layout(small_dump(), pp=2)
    zeros = {name: (lambda tensor=tensor: tensor * 0)
             for name, tensor in reference.weights(0).items()}
    mine = replace(reference, tensors={**reference.tensors, "weights-0": Tensors(zeros)})
    for pair in ((reference, mine), (mine, reference)):
        assert not check_initial_weights(*pair).equal


# ---- maps ----


def to_megatron(config, fused):
    """A function that gives a file's tensors Megatron-core's names and order, with 5 rows more of
    the vocabulary. fused: norms are parts of the matrices that follow them."""
    hs = config.n_embd // config.n_head
    groups = getattr(config, "n_kv_head", config.n_head)
    block = {"ln_1.": "input_layernorm.", "ln_2.": "pre_mlp_layernorm.",
             "attn.c_attn.": "self_attention.linear_qkv.",
             "attn.c_proj.": "self_attention.linear_proj.",
             "mlp.c_fc.": "mlp.linear_fc1.", "mlp.c_proj.": "mlp.linear_fc2."}
    if fused:
        block |= {"ln_1.": "self_attention.linear_qkv.layer_norm_",
                  "ln_2.": "mlp.linear_fc1.layer_norm_"}

    def side_by_side(tensor):
        """Rows by head of k and v: its heads of q, then k, then v."""
        q, k, v = tensor.split([config.n_embd, groups * hs, groups * hs])
        share = config.n_embd // groups  # rows of q
        rows = []
        for i in range(groups):
            rows += [q[i * share : (i + 1) * share], k[i * hs : (i + 1) * hs],
                     v[i * hs : (i + 1) * hs]]
        return torch.cat(rows)

    def change(tensors):
        for name, (shape, data) in [*tensors.items()]:
            del tensors[name]
            tensor = torch.frombuffer(bytearray(data), dtype=torch.double).view(shape)
            theirs = name.replace("transformer.h.", "decoder.layers.")
            theirs = theirs.replace("transformer.ln_f", "decoder.final_layernorm")
            for ours, new in block.items():
                theirs = theirs.replace(ours, new)
            if name == "transformer.wpe.weight":
                theirs = "embedding.position_embeddings.weight"
            if name in ("transformer.wte.weight", "lm_head.weight"):
                tied = name == "transformer.wte.weight"
                theirs = "embedding.word_embeddings.weight" if tied else "output_layer.weight"
                tensor = torch.cat([tensor, torch.ones(5, shape[1], dtype=torch.double)])
            if ".c_attn." in name:
                tensor = side_by_side(tensor)
            tensors[f"module.{theirs}"] = tensor.shape, tensor.numpy().tobytes()

    return change


SMALL_LLAMA = {**LLAMA, "n_layer": 2}


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("model", [{}, SMALL_LLAMA, {**SMALL_LLAMA, "untied": True}], ids=str)
def test_megatrons_names_and_order_are_read_as_ours(small_dump, tmp_path, model, fused):
    ours = small_dump(**model)
    copy = Path(shutil.copytree(ours.folder, tmp_path / "dump"))
    for file in ours.tensors:
        rewrite(copy / f"{file}.safetensors", to_megatron(ours.model, fused))
    change_json(copy, names="megatron")
    got = read_dump(copy)
    for file, name, tensor in every_tensor(ours):
        assert torch.equal(got.tensors[file][name], tensor), (file, name)


def test_experts_under_megatrons_names_are_refused_in_one_line(small_dump, tmp_path):
    copy = shutil.copytree(small_dump(**EXPERTS).folder, tmp_path / "dump")
    change_json(copy, names="megatron")
    with pytest.raises(ValueError, match="experts under Megatron's names are not known"):
        read_dump(copy)


def in_wrappers(tensors):
    """Names as torch.compile, DDP, FSDP1 and activation checkpointing write them."""
    for name in [*tensors]:
        i = name.replace(".h.", ".h._fsdp_wrapped_module.")
        i = i.replace(".attn.", "._checkpoint_wrapped_module.attn._orig_mod.")
        tensors[f"_orig_mod.module.{i}"] = tensors.pop(name)


@pytest.mark.parametrize("model", [False, True])
def test_wrappers_in_names_do_not_matter(small_dump, tmp_path, model):
    ours = small_dump()
    copy = Path(shutil.copytree(ours.folder, tmp_path / "dump"))
    rewrite(copy / "gradients-1.safetensors", in_wrappers)
    if not model:
        change_json(copy, model=None)
        rewrite(copy / "weights-0.safetensors", in_wrappers)
    got = read_dump(copy)
    assert got.gradients(1).keys() == ours.gradients(1).keys()
    for name, tensor in ours.gradients(1).items():
        assert torch.equal(got.gradients(1)[name], tensor)


def transposed(name, tensor):
    return tensor.t() if name.endswith(CONV1D) and tensor.size(0) == tensor.size(1) else tensor


def heads_side_by_side(name, tensor):
    return tensor.unflatten(0, (3, 12, 2)).transpose(0, 1).flatten(0, 2) if "attn.c_attn." in name \
        else tensor


@pytest.mark.parametrize("spoil,says", [
    (transposed, "are transposed: a wrong map of names"),
    (heads_side_by_side, "have q, k and v of a head side by side (Megatron's order): a wrong map")])
def test_a_wrong_map_is_told_and_nothing_that_follows_from_it(small_dump, spoil, says):
    reference = small_dump()
    mine = replace(reference, tensors={
        file: Tensors({name: partial(spoil, name, tensor) for name, tensor in tensors.items()})
        for file, tensors in reference.tensors.items()})
    initial, *others = diagnose(reference, mine)
    assert not initial.equal and len(initial.causes) == 1 and initial.causes[0].endswith(says)
    assert {finding.differs for finding in others} == {
        "", "not examined: the map of names is wrong"}
    assert all(finding.equal for finding in others), others


def test_another_shape_is_said_and_transposed_ones_are_named(small_dump):
    """Names of another form: shapes are not known before."""
    reference = replace(small_dump(), model=None)
    for shape, says in (((96, 24), ["are transposed: a wrong map of names"]), ((48, 48), [])):
        weights = {name: reference.weights(0).readers[name] for name in reference.weights(0)}
        name = "transformer.h.0.mlp.c_proj.weight"
        right = reference.weights(0)[name]
        value = right.t() if shape == (96, 24) else right.reshape(shape)
        weights[name] = lambda value=value: value
        finding = check_initial_weights(
            reference, replace(reference, tensors={"weights-0": Tensors(weights)}))
        assert f"first {name}, of shape {list(shape)}, not [24, 96]" in finding.differs
        assert [words.partition(name)[2].strip() for words in finding.causes] == says
