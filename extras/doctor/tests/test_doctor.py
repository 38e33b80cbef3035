"""The doctor (extras/doctor/): planted bugs are named, right runs are not.

In each run a sample is tried. The table of all bugs, in both of their layouts, and of mutants:

    FULL=1 python -m pytest -s -n 0 extras/doctor/tests/test_doctor.py -k most_bugs
"""

import copy
import json
import math
import os
import re
import shutil
import subprocess
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import NamedTuple

import pytest
import torch

import extras.doctor.__main__ as command
from extras.doctor.again import check_again
from extras.doctor.changes.by_layout import changes
from extras.doctor.changes.pipeline import newest_in_flight, scale_changes
from extras.doctor.diagnose import diagnose
from extras.doctor.dump import DUMP, Dump, Tensors, read_dump
from extras.doctor.examined import Computed, InOwnDtype, step_of
from extras.doctor.finding import Finding, norm_of
from extras.doctor.gradients import CLIPPED, check_in_own_dtype
from extras.doctor.groups import block_of
from extras.doctor.inputs import check_initial_weights
from extras.doctor.norm import judge_norm
from extras.doctor.shares import known_shares
from extras.doctor.step import SimulatedStep
from extras.doctor.tests import bugs
from extras.doctor.tests.test_bugs import numbers, numbers_that_differ
from extras.doctor.tests.test_dump import EXPERTS, LLAMA, change_json, dumps_of_one_process
from extras.doctor.threads import World
from extras.doctor.update import Way
from extras.doctor.weights import Steps, check_updates, known_ways
from extras.doctor.words import lines
from model import ABSENT
from run.weights import read_tensor
from tests.harness import FULL, HERE, needs_minutes
from tests.runs import rewrite

# What the doctor says of a bug of bugs.py, as a regular expression. Of a bug that is not here it
# says nothing, or which stage differs.
NAMED = {
    "every data rank takes the same part of the batch": "has the same sequences",
    "every microbatch is the first one": "microbatches repeat sequences",
    "every step has the first step's batch": "first step's sequences again",
    "each data rank draws a batch of its own": "draws a batch of its own",
    "targets are not shifted": "targets are the tokens themselves",
    "each rank draws with a seed of its own": "draws with a seed of its own",
    "each tensor rank draws a slice instead of slicing the full draw": "each draws its slice",
    "matrices are not scaled to the model's width": "are 0.177 times|are 0.176777 times",
    "projections into the residual stream are not divided by sqrt(2 L)": "not divided by sqrt",
    "projections into the residual stream are divided by sqrt(L)":
        "are 1.41 times|are 1.41421 times",
    "all tensors are drawn from one seed": "all drawn with one seed",
    "the loss is summed over the T ranks that all have it": "summed over the 3 tensor ranks",
    "the loss of a microbatch is not divided by their number": "not divided by the microbatches",
    "the loss of a microbatch is divided by their number twice": "microbatches once too often",
    "the loss is a mean of each microbatch's mean": "a mean of the microbatches' means",
    "the loss is a mean of the data ranks' means": "a mean of the data ranks' means",
    "padding tokens count in the mean": "padding tokens count in the mean",
    "gradients are averaged over the replicas, of a loss that is a mean already":
        "averaged over the",
    "gradients are not summed over the replicas": "not summed over the data ranks",
    "gradients are summed over the data ranks, not over the context ranks":
        "not summed over the context ranks",
    "gradients are summed over the context ranks, not over the data ranks":
        "not summed over the data ranks",
    "under --sp no gradient is summed over the T ranks":
        "LayerNorms, row biases and positions: not summed over the tensor ranks",
    "under --sp LayerNorm's gradients are not summed over the T ranks":
        "LayerNorms: not summed over the tensor ranks",
    "under --sp row biases' gradients are not summed over the T ranks":
        "the rows' biases: not summed over the tensor ranks",
    "under --sp the positions' gradients are not summed over the T ranks":
        "the positions: not summed over the tensor ranks",
    "gradients of replicated parameters are summed over the T ranks, without --sp":
        "row biases and positions: 3 times: summed",
    "only the last microbatch's gradients count": "only the last microbatch counts",
    "only the last microbatch's gradients count, under ZeRO-2": "only the last microbatch counts",
    "only the first microbatch's gradients count": "only the first microbatch counts",
    "only the first microbatch's gradients are summed over the replicas":
        "only the first microbatch's gradients are summed",
    "the sum so far is summed over the replicas after each microbatch":
        "again after each microbatch",
    "gradients are times m, of a loss that is right": "not divided by the microbatches",
    "gradients are divided by m once more, of a loss that is right": "microbatches once too often",
    "gradients are not zeroed between steps": "they were not zeroed",
    "gradients are not zeroed between steps, under ZeRO-2": "they were not zeroed",
    "the loss scale is applied twice, and taken out once": "the loss scale is still in it",
    "f is missing in attention: its backward does not sum": "f is missing in the attention",
    "f is missing in the MLP": "f is missing in the MLP",
    "f is missing in all columns of blocks": "f is missing in all blocks",
    "f is missing in the head": "f is missing in the head",
    "g is missing in attention: its forward does not sum": "g is missing in the attention",
    "g is missing in the MLP": "g is missing in the MLP",
    "g is missing in the embedding": "g is missing in the embedding",
    "the sum of the loss over the T ranks is missing": "loss is 1/3 of the right one",
    "the softmax is over a rank's own words": "over a rank's own words only",
    "g's backward sums too, in attention": "g sums in backward, too, in the attention",
    "g's backward sums too, in the MLP": "g sums in backward, too, in the MLP",
    "g's backward sums too, in all rows of blocks": "g sums in backward, too, in all blocks",
    "g's backward sums too, in the embedding": "g sums in backward, too, in the embedding",
    "g's backward sums too, after the loss: all gradients times T": "summed over the tensor ranks",
    "under --sp the reduce-scatter scatters, and sums nothing": "reduce-scatter sums nothing",
    "the row bias is added on each of the T ranks":
        "row's bias is added on each tensor rank .tp. in all blocks$",
    "the row bias is added on each of the T ranks, and its gradient summed":
        "and its gradient is summed over them",
    "q, k and v are split as one matrix": "q, k and v are split over the tensor ranks .tp. as one",
    "a Llama's gate and up are split as one matrix":
        "gate and up are split over the tensor ranks .tp. as one",
    "the embedding's slices begin at rank * rows, where the first ranks have a row more":
        "all slices of the vocabulary for as long as its own, in the embedding",
    "the embedding's words are off by one": "off by .1 in the embedding",
    "the head's words are off by one": "off by .1 in the head",
    "words of other ranks are not masked in the embedding": "not masked in the embedding",
    "words of other ranks are not masked in the loss": "not masked in the loss",
    "each rank takes the target for its own in the gradient of the logits":
        "not masked in the gradient of the logits",
    "rows that pad the vocabulary are words": "the rows that pad the vocabulary",
    "the tied matrix's two terms are not summed": "the tied matrix lacks the head's term",
    "the tied matrix's two terms are summed twice": "the tied matrix's two terms are summed twice",
    "the tied matrix lacks the head's term": "the tied matrix lacks the head's term",
    "the tied matrix lacks the embedding's term": "the tied matrix lacks the embedding's term",
    "the gradient is averaged over the stages at each boundary":
        "gradients are (halved|divided by pp) at each boundary",
    "the gradient is divided by m at each boundary":
        "gradients are divided by microbatches at each boundary",
    "the activation is detached at a boundary: no gradient goes back": "no gradient goes back over",
    "a gradient meets the activation of the newest microbatch in flight":
        "meets the activation of the newest microbatch in flight",
    "an activation meets the targets of the microbatch before":
        "meets the targets of another one: the one before",
    "the activation is scaled at each boundary":
        "activations and gradients are doubled at each boundary",
    "each context rank numbers its tokens from 0": "counts positions from 0",
    "under --sp each rank takes the first positions": "take the positions of the first tokens",
    "targets are shifted after the sequence was split":
        "targets are shifted after the sequence was split",
    "ranks have neighbouring segments, and the mask is zigzag's":
        "contiguous parts, the mask is zigzag's",
    "zigzag's mask takes ranks before for ranks after": "swaps earlier and later",
    "the ring's last hop is lost": "the ring's last hop is lost",
    "partial results of attention are averaged, not weighted by their logsumexps":
        "partial results of attention are merged half and half",
    "gradients of keys and values stay with the rank that computed them":
        "do not come back to their context rank",
    "the norm is that of the rank's own part": "part only",
    "what several ranks hold counts several times in the norm":
        "replicated gradients count|the tied matrix counts twice",
    "each rank adds the whole square of what it holds":
        "and replicated ones 6 times|and those of experts count 3 times",
    "the norm is not the root of the sum of squares": "its square",
    "the norm is over one stage": "pipeline stage 0's part only",
    "the norm is over one of the T ranks": "tensor rank 0's part only",
    "the norm is the root of the sum of norms": "the root of the sum of the tensors' norms",
    "the loss scale is left in the norm": "gradients with the loss scale",
    "gradients are not clipped": "gradients are not clipped",
    "gradients are clipped before the loss scale is taken out": "a norm with the loss scale in it",
    "the loss scale is left in the gradients that AdamW gets": "not taken out of the gradients",
    "clipping scales small gradients up": "are scaled up to it",
    "everything decays": "biases and norms decay, too",
    "nothing decays": "nothing decays",
    "the decay is coupled: added to the gradient": "added to the gradient",
    "eps is 1e-6": "epsilon is 1e-06",
    "eps is inside of the root": "epsilon is inside",
    "the second moment is not corrected for its start at 0": "the bias of the second moment",
    "no moment is corrected for its start at 0": "the bias of the moments",
    "the correction of the moments stays at the first step's": "stay at the first step's",
    "beta2 is 0.999": "beta2 is 0.999",
    "beta1 and beta2 are swapped": "are swapped",
    "a step has the rate of the next one": "that of step 2",
    "there is no warm-up": "that of step 2",
    "the rate stays at the first step's": "that of step 1",
    "the rate is times D in the optimizer": "the rate is 0.01|moved with a rate of 0.015",
    "under ZeRO the new weights are not gathered": "not sent to the ranks that need them",
    "the gates are left out": "not multiplied by their gates",
    "the gates are not normalized over the chosen experts": "softmax over all",
    "the gates are in another order than the outputs": "gates are in the order of the tokens",
    "tokens beyond an expert's capacity are dropped": "experts drop tokens",
    "the balance loss is missing": "balance loss is missing",
    "the balance loss is times T": "balance loss counts 3 times",
    "the balance loss is times E": "balance loss counts . times",
    "the balance loss sees a context rank's own tokens": "a rank's own tokens of a sequence only",
    "experts' gradients are divided by E": "experts: (averaged over the 2 data|divided by)",
    "experts' gradients are not summed over the ranks with the same experts":
        "same experts|context ranks",
    "f is missing before the experts": "f is missing before the experts",
    "the gates' gradients are not summed over the T ranks": "the gates' gradient is not summed",
    "targets are shifted after the split, but for the last one": "at zigzag's seam",
    "targets are shifted in each half of zigzag": "after each half of zigzag was cut",
    "under --sp targets are split in turn": "over the tensor ranks .--sp. in turn",
    "the balance loss of all stages but the last is missing": "of all pipeline stages but the last",
    "the routers compute in bfloat16": "routers' scores are computed in bfloat16",
    "the step's count advances for each tensor": "the count advances for each tensor or bucket",
    "the norm is over one shard of ZeRO": "that of data rank 0's shards only",
    "GELU by erf": "GELU is computed exactly",
    "ReLU in place of GELU": "the activation is ReLU",
    "SiLU in place of GELU": "the activation is SiLU",
    "x sigmoid(1.702 x) in place of GELU": "the activation is x sigmoid",
    "gate and up are swapped": "gate and up are swapped",
    "gate and up are every second column": "gate and up are taken for every second",
    "GELU in place of SiLU": "the gate's activation is GELU by tanh",
    "the sigmoid in place of SiLU": "the gate's activation is the sigmoid",
    "LayerNorm's eps is 1e-6": "epsilon is 1e-06",
    "LayerNorm's eps is 1e-12": "epsilon is 1e-12|epsilon is 1e-08",
    "RMSNorm's eps is 1e-6": "epsilon is 1e-06",
    "RMSNorm's eps is outside of the root": "added after the root",
    "LayerNorm does not subtract the mean": "do not subtract the mean",
    "RMSNorm subtracts the mean": "subtract the mean",
    "LayerNorm's variance is the unbiased one": "divided by C - 1",
    "LayerNorm in bfloat16": "norms are computed in bfloat16",
    "attention without a mask": "attention sees later tokens",
    "attention without a scale": "scores are not divided",
    "attention is scaled by the head width": "divided by the head width, not by its root",
    "attention sees the next token": "attention sees one later token",
    "the mask comes after the softmax": "masked after the softmax",
    "the softmax in bfloat16": "softmax is computed in bfloat16",
    "grouped keys are repeated in turn": "are taken in turn",
    "grouped keys are repeated in turn, in the ring": "are taken in turn",
    "nothing is turned": "are not turned by their positions",
    "only queries are turned": "keys are not",
    "all are turned the other way": "the other way round",
    "neighbours are turned": "the rotary pairs are neighbours",
    "the base is 10,000": "the rotary base is 10,000",
    "the frequencies are not stretched": "frequencies are not scaled",
    "the angles are of bfloat16": "rotary angles are computed in bfloat16",
    "cosines and sines are of bfloat16": "cosines and sines of the rotary angles",
    "the ring's weights are swapped": "merged with swapped weights",
    "the ring's result so far is lost": "takes the place of the partial result",
    "the ring's logsumexps are not merged": "logsumexps of partial results of attention are not",
    "each token has the gates of the next one": "gates of the token .1 from it",
    "rows are combined as they were sorted": "rows stay sorted by expert",
    "rows are put in order by the wrong permutation": "by the permutation that sorted them",
    "outputs stay sorted by expert when they are combined": "rows go back to their ranks",
    "experts' gradients are summed over ranks with other experts, too": "with other experts, too",
    "Qwen3's norms of queries and keys are not summed over the T ranks":
        "norms of queries and keys: not summed over the tensor ranks",
    "under ZeRO-3 each rank keeps the chunk of its own gradient": "each is its rank's own",
    "each rank subtracts its own largest logit": "the loss subtracts is a rank's own",
    "the ring's mask goes the other way around": "on the other side of the ring",
    "the ring merges logsumexps before results": "the logsumexp that is merged already",
    "clipped gradients are rounded": "clipped gradients are rounded to bfloat16",
    "the balance loss is divided by a microbatch's tokens": "balance loss counts 6 times",
    "outputs go back by the permutation that sorted them": "sorts by expert twice",
    "each rank clips by the norm of its own part": "clipped by the norm of the gradients that one",
    "the end of a bucket is not reduced": "elements are not summed over the 5",
    "the end of each tensor is not reduced": "elements are not summed over the 5",
}

# Of some bugs, the words of another bug that makes the same numbers in one of the bug's layouts
SAME_NUMBERS = {
    # With two stages "two terms twice" is "once for each stage"
    "the tied matrix's two terms are summed twice": "counted by each pipeline rank",
    # With one boundary the newest one is, for each backward, the one before
    "a gradient meets the activation of the newest microbatch in flight":
        "gets the gradient of another microbatch: the one before",
}

# What the doctor says of some mutants, whose names (bugs.py) begin like this
NAMED_MUTANTS = {
    "ddp.py: '        for group in param.tag.sum_over:' -> '        for group in ()":
        "not summed over the data ranks",
    "ddp.py: '        for group in param.tag.sum_over:' -> '        for group in param.tag.sum":
        "the tied matrix lacks the head's term",
    "zero.py: '        all_reduce(chunk,": "the tied matrix lacks the head's term",
    "zero.py: 'self.sums.get(param, 0) +": "only the last microbatch|the first microbatch is miss",
    "zero.py: '            all_gather(param.data": "keeps its old values",
    "optimizer.py: 'square().sum() / n'": "replicated gradients count 3 times",
    "optimizer.py: '(1 - beta2**num_steps)'": "the bias of the second moment is not corrected",
    "optimizer.py: '> 1 and tag.name": "biases and norms decay, too: .*experts",
    "tensor_parallel.py: 'f, block.attn.parts)'": "are split over the tensor ranks .tp. as one",
    "tensor_parallel.py: 'lambda grad: sum_of_copy": "f is missing everywhere",
    # With two stages the newest one is the one before
    "pipeline.py: 'in_flight.popleft()'": "the newest microbatch in flight|: the one before",
    "pipeline.py: 'weight.tag.sum_over": "the tied matrix lacks the head's term",
    "engine/ddp.py: 'reduction(bucket.grad,'": "averaged over the 2 data ranks",
    "engine/zero.py: 'grad_shard.add_('": "only the last microbatch|first microbatch is missing",
    "engine/zero.py: '        self.lacking.remove": "zero: no gradient arrives",
    "engine/zero.py: 'bucket.grad_shard.zero_()'": "they were not zeroed",
    "engine/zero.py: '= all_gather(bucket.full": "keeps its old values",
    "engine/zero.py: 'self.gathered.pop(self.": "keeps its old values: .* or were not waited for",
    "engine/optimizer.py: 'square() / self.holders)": "replicated gradients count 3 times",
    "engine/optimizer.py: 'eps=1e-8'": "epsilon is 1e-06",
    "engine/optimizer.py: 'weight_decay * decays('": "biases and norms decay, too$",
    "engine/tensor_parallel.py: 'now_or_later": "are split over the tensor ranks .tp. as one",
    "shard.py: '            if sum_gradients:'": "and positions: 3 times: summed over the",
    "model.py: 'self.c_fc(x), approx": "GELU is computed exactly",
    "model.py: 'k, v, is_causal=": "attention sees later tokens",
    "engine/vocabulary_parallel.py: 'torch.where(": "not masked in the gradient of the logits",
    "engine/vocabulary_parallel.py: 'masked_fill(out": "not masked in the loss",
    "engine/vocabulary_parallel.py: 'logits[:, num_w": "the rows that pad the vocabulary",
    # A sum that no rank waits for comes too late, or just in time
    "engine/sequence_parallel.py: 'work.wait()": "f is missing everywhere",
    "engine/context_parallel.py: 'if key_rank": "swaps earlier and later",
    "engine/expert_parallel.py: '(cp, tp)": "balance loss counts a rank's own tokens",
    "engine/expert_parallel.py: 'sum_over=": "",  # most experts are not written: no name is right
    "train.py: 'loss / self.cfg.tp, asked'": "summed over the 2 tensor ranks",
    "train.py: '        self.reducer.publish()": "keeps its old values",
    "train.py: 'self.where[0] != self.where": "the tied matrix lacks the head's term",
    # All ranks have all sequences of the batch, and divide by their number once
    "data/batches.py: 'mesh.place(": "every data rank .dp. has the same|2 times: each data rank",
    "data/batches.py: 'default_rng(": "the first step's sequences again",
}


@pytest.fixture(scope="module")
def dumps(corpus, tmp_path_factory):
    """dumps(changes, setting, **flags): the folders of a reference and of a layout's dump.
    References are made once each."""
    folder = tmp_path_factory.mktemp("dumps")
    references = {}

    def make(changes=(), setting=(), **flags):
        alone = {**bugs.alone_of(flags), "dtype": "float64"}
        alone.pop("grad_dtype", None)  # float64 sums in float64
        key = repr((alone, setting))
        if key not in references:
            where = folder / f"reference-{len(references)}"
            references[key] = bugs.dump_run(corpus, where, setting, **alone)
        changes = (*setting, *changes)
        return references[key], bugs.dump_run(corpus, folder / "mine", changes, **flags)

    return make


@pytest.fixture(scope="module")
def examine(dumps):
    """examine(changes, setting, **flags): the Findings on a layout's dump."""
    def run(*args, **flags):
        reference, mine = map(read_dump, dumps(*args, **flags))
        return list(diagnose(reference, mine))
    return run


# Not a multiple of the number of dtypes, which follow one another in the list
RIGHT_RUNS = bugs.RIGHT_RUNS if FULL else bugs.RIGHT_RUNS[::13]


def test_right_runs_of_each_dtype_are_in_the_sample():
    assert {flags["dtype"] for flags in RIGHT_RUNS} == {*bugs.DTYPES}


@pytest.mark.parametrize("flags", RIGHT_RUNS, ids=str)
def test_a_right_run_is_equal_and_has_no_name(examine, flags):
    findings = examine(**flags)
    assert all(finding.equal and not finding.causes for finding in findings), findings


class Answer(NamedTuple):
    """What the doctor says of a run with a bug."""
    is_equal: bool  # it finds no difference
    names: list  # causes that are this bug
    wrong: list  # all other causes, in any stage
    unknown: list  # all causes, of a mutant that is not in NAMED_MUTANTS

    @property
    def in_a_word(self):
        if self.wrong:
            return "wrong name"
        if self.unknown:
            return "not judged"
        if self.names:
            return "named"
        return "equal" if self.is_equal else "no name"


def judge(findings, named="", same=""):
    """The Answer of these Findings. A cause is a wrong name unless it matches one of the regular
    expressions: the bug's NAMED, or its SAME_NUMBERS. An empty one matches nothing."""
    causes = [words for finding in findings for words in finding.causes]
    names = [words for words in causes if named and re.search(named, words)]
    wrong = [words for words in causes
             if words not in names and not (same and re.search(same, words))]
    return Answer(all(finding.equal for finding in findings), names, wrong, [])


def answer_of(examine, bug, layout, dtype):
    flags = {**bugs.flags_of(layout), "dtype": dtype}
    return judge(examine(bug.changes, bug.setting, **flags), NAMED.get(bug.name),
                 SAME_NUMBERS.get(bug.name))


def test_a_wrong_name_is_seen_in_a_later_stage_and_beside_a_right_one():
    clip = Finding("step 1 weights", False, "", ["gradients are not clipped"])
    later = Finding("step 2 weights", False, "", ["nothing decays"])
    beside = Finding("step 1 weights", False, "", ["gradients are not clipped", "beta1 is 0.8"])
    assert judge([clip], "are not clipped").in_a_word == "named"
    assert judge([clip, later], "are not clipped").wrong == ["nothing decays"]
    assert judge([beside], "are not clipped").wrong == ["beta1 is 0.8"]
    assert judge([beside], "are not clipped", "beta1 is").in_a_word == "named"


@pytest.mark.parametrize("bug", [bug for bug in bugs.BUGS if bug.name in NAMED][::12],
                         ids=lambda bug: bug.name)
def test_a_planted_bug_is_named(examine, bug):
    answer = answer_of(examine, bug, bug.layouts[0], "float32")
    assert answer.names and not answer.wrong, answer


def test_two_bugs_in_different_stages_are_both_named(examine):
    """Of step 1's norm, and of step 2's gradients."""
    layout = "tp 3 microbatches 2"
    two = [bug for bug in bugs.BUGS if bug.name in (
        "what several ranks hold counts several times in the norm",
        "gradients are not zeroed between steps")]
    changes = two[0].changes + two[1].changes
    findings = examine(changes, dtype="float64", **bugs.flags_of(layout))
    causes = {finding.stage: " ".join(finding.causes) for finding in findings if finding.causes}
    assert causes.keys() == {"step 1 norm", "step 2 gradients"}
    for bug, stage in zip(two, ("step 2 gradients", "step 1 norm"), strict=True):
        assert re.search(NAMED[bug.name], causes[stage]), causes


IN_A_WORD = ("named", "no name", "equal", "wrong name", "not judged")  # columns of the table


def print_table(title, rows):
    """Print how many bugs of each stage, or of each file, have which answer, and below the table
    all bugs that are not named. rows: [(stage or file, the bug in words, Answer)]."""
    print(f"\n{title}\n{'':30}{'runs':>10}", *(f"{word:>12}" for word in IN_A_WORD), sep="")
    for stage in (*dict.fromkeys(stage for stage, *_ in rows), "all"):
        words = [answer.in_a_word for of, _, answer in rows if stage in (of, "all")]
        counts = [words.count(word) for word in IN_A_WORD]
        print(f"{stage:30}{len(words):10}", *(f"{n:12}" for n in counts), sep="")
    for _, bug, answer in rows:
        if answer.in_a_word != "named":
            print(f"    {answer.in_a_word}: {bug}")
            for words in (*answer.wrong, *answer.unknown):
                print(f"        {words}")


@needs_minutes
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_most_bugs_are_named_and_none_wrongly(examine, dtype):
    """Each bug in two layouts: in float32 90% are named; in bfloat16, of the bugs of gradients, 80%
    (there rounding errors may hide a bug)."""
    rows = [(bug.stage, f"{bug.name}, {layout}", answer_of(examine, bug, layout, dtype))
            for bug in bugs.BUGS for layout in bug.layouts]
    print_table(f"{dtype}: the bugs of extras/doctor/tests/bugs.py, in two layouts each", rows)
    assert not any(answer.wrong for _, _, answer in rows)
    assert dtype == "bfloat16" or not any(answer.is_equal for _, _, answer in rows)
    counted = bugs.STAGES if dtype == "float32" else ("gradients",)
    named = [bool(answer.names) for stage, _, answer in rows if stage in counted]
    assert sum(named) >= {"float32": 0.9, "bfloat16": 0.8}[dtype] * len(named)


def dumps_that_differ(dumps, mutant):
    """The Dumps (reference, mine) of the mutant's first layout in which a number is wrong; None if
    there is no such layout, because the mutant cannot be planted, fails, or changes no number."""
    for layout in mutant.layouts:
        flags = {**bugs.flags_of(layout), "dtype": "float64"}
        try:
            folders = dumps(mutant.changes, timeout=60, **flags)
        except AssertionError:  # raised by the pool
            continue
        if numbers_that_differ(*map(numbers, folders)):
            return [*map(read_dump, folders)]
    return None


def test_each_row_of_named_mutants_is_one_mutant():
    names = [mutant.name for mutant in bugs.MUTANTS]
    for begin in NAMED_MUTANTS:
        assert sum(name.startswith(begin) for name in names) == 1, begin


def judge_mutant(mutant, findings):
    """Like judge(). A mutant without a row in NAMED_MUTANTS may have any name: a reader of the
    table has to judge it."""
    for begin, named in NAMED_MUTANTS.items():
        if mutant.name.startswith(begin):
            return judge(findings, named)
    answer = judge(findings)
    return answer._replace(wrong=[], unknown=answer.wrong)


@needs_minutes
def test_fewer_mutants_than_most_bugs_are_named_and_none_wrongly(dumps):
    """Each in one layout, in float64."""
    rows = []
    for mutant in bugs.MUTANTS:
        pair = dumps_that_differ(dumps, mutant)
        if pair:
            rows.append((mutant.stage, mutant.name, judge_mutant(mutant, [*diagnose(*pair)])))
    print_table("float64: the mutants of tests/mutants.py that change a number", rows)
    assert not any(answer.wrong for *_, answer in rows)


# ---- dumps of one process, changed by hand ----


@pytest.fixture(scope="module")
def right(corpus, tmp_path_factory):
    return dumps_of_one_process(corpus, tmp_path_factory)


def changed(dump, *files, change):
    """The dump with change(name, tensor) in place of each tensor of these files."""
    tensors = {file: Tensors({name: partial(change, name, tensor)
                              for name, tensor in dump.tensors[file].items()}) for file in files}
    return replace(dump, tensors={**dump.tensors, **tensors}, steps=copy.deepcopy(dump.steps))


class OtherTargets(Dump):
    """A dump whose sequences have the targets of other sequences."""

    def targets(self, number):
        return super().targets(number).roll(1, dims=2)


def test_targets_that_belong_to_other_sequences_are_not_equal(right):
    mine = OtherTargets(**vars(right()))
    findings = {finding.stage: finding for finding in diagnose(right(), mine, deep=False)}
    assert not findings["step 1 tokens"].equal
    assert findings["step 1 tokens"].causes == ["each sequence has the targets of another sequence"]


def test_megatrons_order_is_named_where_heads_share_keys_and_values(right):
    reference = right(**{**LLAMA, "n_kv_head": 4})
    config = reference.model
    n_kv, hs = config.n_kv_head, config.n_embd // config.n_head

    def side_by_side(name, tensor):
        if ".c_attn." not in name:
            return tensor
        q, k, v = tensor.split([config.n_embd, n_kv * hs, n_kv * hs])
        return torch.cat([part.chunk(n_kv)[i] for i in range(n_kv) for part in (q, k, v)])

    mine = changed(reference, "weights-0", change=side_by_side)
    (causes,) = check_initial_weights(reference, mine).causes
    assert causes.endswith("have q, k and v of a head side by side (Megatron's order): a wrong map")


@pytest.mark.parametrize("seeds,is_named", [
    ((1, 1, 1), True), ((1, 1, 2), False), ((1, None, None), False)])
def test_one_seed_for_all_blocks_is_named_only_if_all_blocks_are_the_same(right, seeds, is_named):
    """seeds: with which the matrices of blocks 0, 1 and 2 are drawn; None: REFERENCE's."""
    reference = right()

    def drawn(name, tensor):
        number = block_of(name)
        if not 0 <= number < 3 or not name.endswith("weight") or ".ln_" in name:
            return tensor
        if seeds[number] is None:
            return tensor
        generator = torch.Generator().manual_seed(seeds[number])
        return torch.randn(tensor.shape, generator=generator) * 0.05

    mine = changed(reference, "weights-0", change=drawn)
    finding = check_initial_weights(reference, mine)
    assert not finding.equal
    assert any("all drawn with one seed" in words for words in finding.causes) == is_named


def test_a_wrong_loss_has_the_gradients_cause_only_if_the_cause_explains_it(right):
    mine = changed(right(), "gradients-1", change=lambda name, grad: -grad)
    tokens = right().ids(1).numel()
    for factor, says in ((-1, "all gradients: of the wrong sign"),
                         (tokens, f"the printed loss is {tokens} times the right one"),
                         (1.2345, "")):
        mine.steps[0]["loss"] = factor * right().steps[0]["loss"]
        loss, gradients = (finding for finding in diagnose(right(), mine)
                           if finding.stage in ("step 1 loss", "step 1 gradients"))
        assert gradients.causes == ["all gradients: of the wrong sign"]
        assert not loss.equal
        assert " ".join(loss.causes).startswith(says) if says else not loss.causes, loss


def test_words_about_gradients_do_not_explain_a_printed_loss(right):
    mine = changed(right(), change=None)
    mine.steps[0]["loss"] = 0.0
    (loss,) = (finding for finding in diagnose(right(), mine, deep=False)
               if finding.stage == "step 1 loss")
    assert not loss.equal and not loss.causes


def test_a_bug_that_begins_in_step_2_is_told_of_its_loss_and_of_its_gradients(right):
    mine = changed(right(), "gradients-2", change=lambda name, grad: -grad)
    mine.steps[1]["loss"] *= -1
    said = [line for line, _ in lines(diagnose(right(), mine), mine.layout)]
    at = next(i for i, line in enumerate(said) if line.startswith("step 2 loss"))
    assert said[at + 1].strip() == "-> all gradients: of the wrong sign"
    assert said[at + 2].startswith("step 2 gradients         differs")
    assert said[at + 3].strip() == "-> the same"


def test_a_rate_of_several_steps_is_told_once(right):
    mine = changed(right(), change=None)
    mine.steps[0]["lr"] *= 3
    words = [way.words for way in known_ways(Steps(right(), mine), 1)]
    rates = [text.split(":")[0] for text in words if text.startswith("the rate is")]
    assert rates and len(set(rates)) == len(rates), words


def test_sequences_may_be_shorter_than_the_model_allows(right):
    one = right(**LLAMA)  # without a table of positions: block_size is in no tensor's shape
    longer = replace(one, model=replace(one.model, block_size=2 * one.model.block_size))
    findings = list(diagnose(longer, longer, deep=False))
    assert "step 1 gradients" in {finding.stage for finding in findings}
    assert all(finding.equal for finding in findings), findings


@pytest.mark.parametrize("bug,starts", [("counts positions from 0", (0, 0)),
                                        ("split by zigzag", (0, 12))])
def test_wrong_positions_of_context_ranks_are_cut_by_sp(right, bug, starts):
    """starts: here the wrong positions of the two context ranks begin."""
    one = right(block_size=24)  # 12 tokens for a context rank, 4 for each of its 3 tensor ranks
    layout = {**one.layout, "cp": 2, "tp": 3, "sp": True}
    step = SimulatedStep(one.model, layout, 0.0, dict(one.weights(0)), one.ids(1), one.targets(1))
    (change,) = (change for change in changes(step) if bug in change.words)

    def rank(mesh):
        model, _ = step.prepare(mesh, change, torch.double)
        begin = starts[mesh.group("cp").rank] + 4 * mesh.group("tp").rank
        (module,) = model.positioned()
        assert module.positions(None).tolist() == list(range(begin, begin + 4))

    World(step.sizes).run(rank)


def test_factors_of_axes_with_the_same_size_are_told_together():
    layout = {"dp": 3, "pp": 5, "tp": 1, "microbatches": 3}
    words = [change.words for change in scale_changes(layout, [1])]
    assert "gradients are times microbatches or dp at each boundary of the pipeline" in words
    assert any("divided by pp" in text for text in words)


def test_axes_of_one_size_are_told_only_where_causes_name_both(right):
    layout = {**right().layout, "dp": 2, "tp": 2, "pp": 3}
    advice = "dp and tp have the same size, 2: a layout in which they differ tells causes apart"

    def said(*causes):
        finding = Finding("step 2 rate", False, "0.2, not 0.1", [*causes])
        return [line.strip() for line, _ in lines([finding], layout)]

    assert said("averaged over the data ranks (dp)", "divided by the tensor ranks")[-1] == advice
    assert said("it is 2 times REFERENCE's (dp or tp)")[-1] == advice
    for causes in (["epsilon is 1e-12", "epsilon is 0"], ["divided by dp = 2 before the step"],
                   ["averaged over the 2 data and tensor ranks (dp, tp)"],
                   ["counted by each pipeline rank (pp)", "divided by the tensor ranks (tp)"]):
        assert not any("same size" in line for line in said(*causes)), causes


@pytest.mark.parametrize("tp,fits", [(2, 2), (3, 1)])
def test_the_run_that_the_advice_asks_for_tells_causes_apart(right, tp, fits):
    """Averaged over two data ranks, in a layout with two tensor ranks, and in one with three."""
    mine = changed(right(), "gradients-1", change=lambda name, grad: grad / 2)
    mine = replace(mine, layout={**mine.layout, "dp": 2, "tp": tp})
    findings = [finding for finding in diagnose(right(), mine)
                if finding.stage == "step 1 gradients"]
    assert len(findings[0].causes) == fits
    assert "averaged over the 2 data ranks (dp)" in findings[0].causes[0]
    advised = any("have the same size, 2" in line for line, _ in lines(findings, mine.layout))
    assert advised == (fits == 2)


def test_16_bit_weights_without_masters_say_nothing_about_the_optimizer(right):
    dump = right(dtype="bfloat16")
    mine = changed(dump, "weights-1", change=lambda name, weight: 2 * weight)
    without = {file: tensors for file, tensors in mine.tensors.items() if "masters" not in file}
    findings = [finding for finding in diagnose(dump, replace(mine, tensors=without), deep=False)
                if "weights" in finding.stage]
    (line,) = (line for line, is_equal in lines(findings[1:], mine.layout) if is_equal)
    assert line.split() == ("weights bfloat16 weights without masters say nothing about the "
                            "optimizer").split()


def test_16_bit_weights_that_are_not_the_masters_rounded_are_not_equal(right):
    reference = right(dtype="bfloat16")
    old = reference.weights(0)
    for change, says in ((lambda name, weight: old[name], "keep their old values"),
                         (lambda name, weight: 1.1 * weight, "")):
        mine = changed(reference, "weights-1", change=change)
        (finding,) = (finding for finding in diagnose(reference, mine, deep=False)
                      if finding.stage == "step 1 weights")
        assert not finding.equal
        assert says in " ".join(finding.causes) if says else not finding.causes


@pytest.mark.parametrize("scale", [2.0**16, 2.0**40])  # with the second one process overflows
def test_scaled_gradients_of_float16_are_compared(right, scale):
    mine = changed(right(dtype="float16"), "gradients-1", change=lambda name, grad: -grad)
    mine.steps[0]["scale"] = scale
    finding = next(finding for finding in diagnose(right(dtype="float16"), mine, deep=False)
                   if finding.stage == "step 1 gradients")
    assert not finding.equal
    assert finding.causes == ["all gradients: of the wrong sign"]


def test_a_stack_of_activations_gives_each_backward_the_newest_one():
    layout = {"schedule": "1f1b", "pp": 2, "chunks": 1, "microbatches": 3}
    assert newest_in_flight(layout) == [{0: 1, 1: 2, 2: 0}, {0: 0, 1: 1, 2: 2}]
    # GPipe's backwards all meet the same wrong microbatch, on each stage: gradients stay right
    layout["schedule"] = "gpipe"
    assert newest_in_flight(layout) == [{0: 2, 1: 1, 2: 0}] * 2


@needs_minutes
@pytest.mark.parametrize("layout", [
    "pp 2 schedule interleaved chunks 2 microbatches 6", "pp 3 schedule zb-h1 microbatches 5",
    "pp 2 schedule zb-v chunks 2 microbatches 5"])
def test_a_stack_for_each_stage_is_named_under_any_schedule(examine, layout):
    bug = next(bug for bug in bugs.BUGS if "newest microbatch in flight" in bug.name)
    by_stage = bugs.change("engine/pipeline.py", "x, y, losses = self.in_flight.pop((s, k))",
                           "newest = [key for key in self.in_flight if key[0] == s][-1]\n"
                           "        x, y, losses = self.in_flight.pop(newest)")
    answer = answer_of(examine, bug._replace(changes=by_stage), layout, "float32")
    assert answer.names and not answer.wrong, answer


# ---- the command ----


@pytest.fixture
def doctor(capsys, monkeypatch):
    """doctor(reference, mine) or doctor(reference, mine, again): the command, in this process.
    deep: with --deep. Returns (exit code, what it said)."""
    def run(*folders, deep=False):
        given = {"again": None, "deep": deep}
        given |= zip(("reference", "mine", "again"), map(str, folders), strict=False)
        monkeypatch.setattr(command, "args", SimpleNamespace(**given), raising=False)
        monkeypatch.setattr("sys.argv", ["doctor"])
        with pytest.raises(SystemExit) as end:
            command.main()
        out, err = capsys.readouterr()
        return end.value.code, out + err
    return run


def test_two_runs_that_differ_in_bits_are_not_deterministic(right, doctor, tmp_path):
    """AGAIN is MINE's dump; in copies of it the last bit of one number is another one."""
    mine = right().folder

    def in_tensor(tensors):
        shape, data = tensors["transformer.h.1.ln_2.bias"]
        tensors["transformer.h.1.ln_2.bias"] = shape, bytes([data[0] ^ 1]) + data[1:]

    def in_norm(folder):
        steps = json.loads(Path(folder, DUMP).read_text())["steps"]
        steps[1]["norm"] = math.nextafter(steps[1]["norm"], math.inf)
        change_json(folder, steps=steps)

    def in_file(name):
        return lambda folder: rewrite(folder / f"{name}.safetensors", in_tensor)

    wait = "-> not deterministic: look for a missing wait"
    for change, where, says in (
            (in_file("gradients-2"), "step 2 gradients: 1 of 40 tensors; first transformer.h.1.ln",
             wait),
            (in_norm, "step 2 norm: ", wait),
            (in_file("weights-0"), "initial weights: 1 of 40 tensors; first transformer.h.1.ln_2",
             "-> other weights or tokens go into the two runs")):
        again = Path(shutil.copytree(mine, tmp_path / "again", dirs_exist_ok=True))
        assert doctor(mine, mine, again)[1].startswith("MINE, run again          equal\n")
        change(again)
        code, said = doctor(mine, mine, again)
        first, second, *rest = said.splitlines()
        assert code == 1 and first.startswith(f"MINE, run again          differs: {where}"), said
        assert second.strip().startswith(says)
        assert all(line.endswith("equal") for line in rest) and rest[-1] == "not equal"


def test_a_run_of_other_flags_is_no_second_run(right):
    mine = right()
    for other, says in (({"layout": {**mine.layout, "dp": 2}}, "its layout is not that of"),
                        ({"steps": [{**step, "lr": 1.0} for step in mine.steps]}, "its rates"),
                        ({"tokens": {}}, "has other files or tensors than")):
        with pytest.raises(ValueError, match=says):
            check_again(mine, replace(mine, **other))


def test_a_large_dump_is_tried_with_all_bugs_only_under_deep(right, doctor, tmp_path, monkeypatch):
    """Its gradients are those of a bug that no sum of the right terms gives."""
    one = right()
    mine = Path(shutil.copytree(one.folder, tmp_path / "mine"))
    step = SimulatedStep(one.model, one.layout, 0.0, dict(one.weights(0)), one.ids(1),
                         one.targets(1))
    (bug,) = (change for change in changes(step) if "sqrt(head width)" in change.words)
    terms = step.run(bug)

    def wrong(tensors):
        for name, (shape, _) in tensors.items():
            tensors[name] = shape, terms.full[name].numpy().tobytes()

    rewrite(mine / "gradients-1.safetensors", wrong)
    change_json(mine, steps=[{**one.steps[0], "loss": terms.loss()}, one.steps[1]])

    def causes(**flags):
        said = [line.strip() for line in doctor(one.folder, mine, **flags)[1].splitlines()]
        at = next(i for i, line in enumerate(said) if line.startswith("step 1 gradients"))
        return said[at - 1], said[at + 1]

    named = f"-> {bug.words}", "-> the same"
    assert causes() == named
    monkeypatch.setattr(command, "SMALL", 0)  # every dump is large
    assert causes() == ("fits nothing that was tried; --deep tries all known bugs",) * 2
    assert causes(deep=True) == named


def test_the_command_ends_with_0_1_or_2(dumps, doctor, tmp_path):
    bug = next(bug for bug in bugs.BUGS if bug.name == "gradients are not clipped")
    flags = {**bugs.flags_of("dp 2"), "dtype": "float32"}
    code, said = doctor(*dumps(**flags))
    assert code == 0
    assert said.endswith("\nequal\n")
    reference, mine = dumps(bug.changes, **flags)
    code, said = doctor(reference, mine)
    assert code == 1
    assert "-> gradients are not clipped\n" in said
    assert said.endswith("\nnot equal\n")
    for other, words in ((tmp_path, "dump.json"), (tmp_path / "none", "no such folder")):
        code, said = doctor(reference, other)
        assert code == 2
        assert said.startswith("doctor: ")
        assert words in said
        assert said.count("\n") == 1


# ---- numbers that are near those of a bug: a wrong name is worse than none ----


def finding_of(reference, mine, stage, deep=False):
    (finding,) = (finding for finding in diagnose(reference, mine, deep) if finding.stage == stage)
    return finding


def with_layout(dump, **layout):
    return replace(dump, layout={**dump.layout, **layout})


def lacking(dump, *files):
    """The dump without these files; a name like "tokens" is that of both steps' file."""
    def kept(found):
        return {file: found[file] for file in found if not file.startswith(files)}

    return replace(dump, tensors=kept(dump.tensors), tokens=kept(dump.tokens))


def nan_in(*parts):
    """For changed(): one element of the tensors with these names is not a number."""
    def change(name, tensor):
        if name.endswith(parts):
            tensor = tensor.clone()
            tensor.view(-1)[0] = torch.nan
        return tensor
    return change


UNTIED = {**LLAMA, "untied": True}
WTE = "transformer.wte.weight"


def without_gradients(dump, rows=slice(0, 3)):
    """An untied Llama in whose step 1 the first rows of the embedding have no gradient: their
    tokens are not in the batch."""
    def change(name, grad):
        if name == WTE:
            grad = grad.clone()
            grad[rows] = 0
        return grad

    mine = changed(dump, "gradients-1", change=change)
    after = Steps(dump, mine).after(1, WTE, Way())
    return changed(mine, "weights-1", change=lambda name, new: after if name == WTE else new)


def test_a_rate_of_one_tensor_whose_rows_have_no_gradient_is_not_an_epsilon(right):
    """With an epsilon of 0 the weights of these rows would be 0/0."""
    reference = without_gradients(right(**UNTIED))
    old = reference.weights(0)[WTE]

    def other_rate(name, new):
        return old + 3 * (new - old) if name == WTE else new

    mine = lacking(changed(reference, "weights-1", change=other_rate), "weights-2")
    finding = finding_of(reference, mine, "step 1 weights")
    assert not finding.equal and not finding.causes, finding


def test_weights_after_a_gradient_that_is_not_a_number_are_not_called_equal(right):
    mine = changed(right(), "gradients-1", change=nan_in("0.mlp.c_fc.weight"))
    finding = finding_of(right(), mine, "step 1 weights")
    assert not finding.equal or finding.differs.startswith("not examined"), finding


def test_one_weight_that_is_not_a_number_was_not_left_unsent(right):
    mine = changed(with_layout(right(), dp=2), "weights-1", change=nan_in("0.mlp.c_fc.weight"))
    (finding,) = check_updates(right(), mine)
    assert not finding.equal and not finding.causes, finding


@pytest.mark.parametrize("rows,layout,is_named", [
    (slice(0, 3), {}, False), (slice(0, 3), {"dp": 2}, False), (slice(0, 5), {}, False),
    (slice(0, 5), {"dp": 2}, True)], ids=str)
def test_weights_were_not_sent_only_if_there_are_ranks_and_the_rows_have_a_gradient(
        right, rows, layout, is_named):
    """A sparse optimizer leaves rows without a gradient, here 0 to 2, what they are."""
    reference = without_gradients(right(**UNTIED))
    old = reference.weights(0)[WTE]

    def keeps_old(name, new):
        if name != WTE:
            return new
        return torch.cat([old[rows], new[rows.stop :]])

    mine = changed(with_layout(reference, **layout), "weights-1", change=keeps_old)
    (finding,) = check_updates(reference, mine)
    assert not finding.equal
    assert any("new weights were not sent" in words for words in finding.causes) == is_named


def is_norm(name):
    return ".ln_" in name


@pytest.mark.parametrize("spoil", [
    lambda name, weight: weight * 0 + is_norm(name) if name.endswith("bias") or is_norm(name)
    else weight,
    lambda name, weight: weight.flip(0) if "wpe" in name else weight,
    lambda name, weight: weight * 0 if name.endswith("c_proj.weight") else weight,
    lambda name, weight: weight * 0 + is_norm(name) if name.endswith("c_proj.weight")
    or is_norm(name) else weight], ids=["matrices only", "positions", "zeros", "zeros and ones"])
def test_replicated_and_constant_tensors_were_not_drawn_with_one_seed(right, spoil):
    reference = with_layout(right(), tp=2)
    mine = changed(reference, "weights-0", change=spoil)
    finding = check_initial_weights(reference, mine)
    assert not finding.equal
    assert not any("seed" in words for words in finding.causes), finding


def test_experts_were_not_drawn_slice_by_slice(right):
    """No tensor rank has a slice of an expert."""
    reference = with_layout(right(**EXPERTS), tp=2)
    mine = changed(reference, "weights-0", change=lambda name, weight:
                   weight.flip(0) if ".experts." in name else weight)
    finding = check_initial_weights(reference, mine)
    assert not finding.equal and not finding.causes, finding


def test_blocks_that_are_swapped_in_a_later_stage_were_not_drawn_with_a_seed_of_their_own(right):
    reference = with_layout(right(n_layer=6), pp=2)
    weights = reference.weights(0)

    def swapped(name, weight):
        for one, other in ((".4.", ".5."), (".5.", ".4.")):
            if one in name and name.endswith("c_fc.weight"):
                return weights[name.replace(one, other)]
        return weight

    mine = changed(reference, "weights-0", change=swapped)
    finding = check_initial_weights(reference, mine)
    assert not finding.equal and not finding.causes, finding


@pytest.mark.parametrize("layout,changes", [
    ("dp 2 microbatches 5", bugs.change(
        "engine/optimizer.py", "torch._foreach_copy_(self.weights, self.masters)",
        "torch._foreach_copy_(self.weights, self.masters)\n"
        "            torch._foreach_copy_(self.masters, self.weights)")),
    ("tp 3 zero 1 microbatches 2 root", bugs.change(
        "optimizer.py", "self.weights.copy_(self.master)",
        "self.weights.copy_(self.master)\n        self.master.copy_(self.weights)")),
    ("dp 2 microbatches 5 root", bugs.change(
        "optimizer.py", "torch.promote_types(weights.dtype, torch.float32)", "weights.dtype"))],
    ids=str)
def test_masters_that_are_rounded_in_each_step_or_missing_are_named(examine, layout, changes):
    findings = examine(changes, dtype="bfloat16", **bugs.flags_of(layout))
    (wrong,) = [finding for finding in findings if not finding.equal]
    assert wrong.stage == "step 1 weights"
    assert wrong.causes == ["the weights are stepped in bfloat16: masters of 32 bits are missing, "
                            "or are rounded in each step"]


@pytest.mark.parametrize("words", ["multiple of 2 count", "epsilon is 1e-12",
                                   "GELU is computed exactly"])
def test_a_loss_that_is_rounded_is_no_bug_of_forward(right, words):
    """In bfloat16 these bugs change gradients by less than its noise. Any of them would explain
    a loss that was printed in bfloat16, because such a loss may be anything near the right one."""
    mine = changed(right(dtype="bfloat16"), change=None)
    step = step_of(mine, 1)
    (change,) = (change for change in changes(step) if words in change.words)
    loss = step.run().loss()
    for off_by in (step.run(change).loss() - loss, 0.0111):
        mine.steps[0]["loss"] = loss + off_by
        finding = finding_of(right(dtype="bfloat16"), mine, "step 1 loss", deep=True)
        assert not finding.causes, finding


def test_a_table_of_another_form_decays_whatever_its_name_is(right):
    """The loops of the page let every tensor of two dims decay."""
    def renamed(tensors):
        return Tensors({name.replace("transformer.wpe.weight", "pos_embed"): read
                        for name, read in tensors.readers.items()})

    one = right()
    reference = replace(one, model=None, tensors={file: renamed(tensors)
                                                  for file, tensors in one.tensors.items()})
    findings = [*check_updates(reference, reference)]
    assert len(findings) == 2
    assert all(finding.equal and not finding.differs for finding in findings), findings


def test_a_factor_that_no_size_explains_is_no_weight_of_microbatches(right):
    flags = {"microbatches": 3, "dtype": "float32"}
    mine = changed(right(**flags), "gradients-1", change=lambda name, grad: 1.37 * grad)
    finding = finding_of(right(**flags), mine, "step 1 gradients", deep=True)
    assert not finding.equal and not finding.causes, finding


@pytest.mark.parametrize("dtype", ["float64", "float32"])
def test_gradients_that_are_dumped_after_clipping_are_told_and_nothing_follows(right, dtype):
    """Else the weights, which are right, would be those of a step without clipping."""
    mine = reference = right(microbatches=3, dtype=dtype, grad_clip=0.1)
    for n in (1, 2):
        factor = 0.1 / (mine.steps[n - 1]["norm"] + 1e-6)
        assert factor < 0.9
        mine = changed(mine, f"gradients-{n}", change=lambda name, grad, by=factor: by * grad)
    findings = [finding for finding in diagnose(reference, mine) if not finding.equal]
    assert [(finding.stage, finding.causes) for finding in findings] == [
        ("step 1 gradients", [CLIPPED])]


def test_gradients_that_are_averaged_twice_are_not_told_as_clipped(right):
    """The limit is half of MINE's norm, so clipping would halve the gradients, too."""
    reference = right(dp=2, dtype="bfloat16")
    halved = changed(reference, "gradients-1", change=lambda name, grad: grad / 2)
    norm = halved.steps[0]["norm"] / 2
    halved.steps[0]["norm"] = norm
    mine = replace(halved, optimizer={**halved.optimizer, "grad_clip": norm / 2})
    (cause,) = finding_of(reference, mine, "step 1 gradients").causes
    assert "averaged over the 2 data ranks" in cause, cause


def test_what_is_equal_in_mines_dtype_is_equal_in_float64(right):
    """Also a number at the very limit, on the side away from float64's."""
    mine = right(dtype="float32", microbatches=2)
    step = step_of(mine, 1)
    own = InOwnDtype(mine, 1, step)
    exact = Computed(mine, 1, step, own.terms)
    for name, grad in own.gradients.items():
        error = grad.double() - exact.gradients[name]
        further = own.tolerance(name) * error / norm_of(error)
        assert own.gradient_is_right(name, grad + 0.999 * further)
        assert exact.gradient_is_right(name, grad + 0.999 * further), name
        assert not own.gradient_is_right(name, grad + 1.001 * further)
    further = math.copysign(own.loss_floor(own.loss), own.loss - exact.loss)
    assert own.loss_is(own.loss + 0.999 * further, own.loss)
    assert exact.loss_is(own.loss + 0.999 * further, exact.loss)
    assert not own.loss_is(own.loss + 1.001 * further, own.loss)


def test_the_noise_of_a_run_in_float64_is_measured_too(right):
    """No number is more exact than those of float64. The least tolerance may be too small: a sum
    over 432 tokens has rounding errors of its own, which depend on the number of threads."""
    mine = right()
    exact = Computed(mine, 1, step_of(mine, 1))
    for name, grad in exact.gradients.items():
        rounding = torch.finfo(torch.double).eps * grad  # each element's rounding
        assert exact.gradient_is_right(name, grad + 60 * rounding), name
        assert not exact.gradient_is_right(name, grad + 800 * rounding), name


def test_a_process_that_overflows_in_mines_dtype_has_no_known_cause(right):
    """Else the tolerance would be infinite, too."""
    mine = with_layout(right(dtype="float32"), cp=2)
    own = InOwnDtype(mine, 1, step_of(mine, 1))
    for name, grad in own.gradients.items():
        grad.fill_(math.inf)
        own.terms.gradients[name][:, :, 1] = math.inf
    (share,) = (share for share in known_shares(mine.layout, own.terms, 1)
                if share.context == 0 and share.factor == 1)
    assert check_in_own_dtype(own, 1, [share.words]) is None


def test_uneven_slices_of_one_matrix_are_no_known_bug_of_a_llama(right):
    """Of its 37 hidden units the three ranks have 13, 12 and 12."""
    mine = with_layout(right(**LLAMA), tp=3)
    for change in changes(step_of(mine, 1)):
        step_of(mine, 1).run(change)


@pytest.mark.parametrize("factors, dtypes", [
    ((1, 1), ["float32", "float32"]),
    ((0.5, 0.5), ["float32", "float64", "float32"]),  # step 2 has the cause of step 1
    ((1, 0.5), ["float32", "float32", "float64"]),
    ((0.5, 1), ["float32", "float64", "float32"]),
    ((0.5, 0.37), ["float32", "float64", "float32", "float64"])])
def test_a_step_is_run_in_float64_only_where_its_cause_is_unknown(right, monkeypatch, factors,
                                                                dtypes):
    mine = reference = right(dp=2, dtype="float32")
    for n, factor in zip((1, 2), factors, strict=True):
        mine = changed(mine, f"gradients-{n}", change=lambda name, grad, by=factor: by * grad)
        mine.steps[n - 1]["norm"] *= factor
    run = SimulatedStep.run
    ran = []

    def noting(step, *args, dtype=torch.double, **more):
        ran.append(str(dtype).removeprefix("torch."))
        return run(step, *args, dtype=dtype, **more)

    monkeypatch.setattr(SimulatedStep, "run", noting)
    findings = [*diagnose(reference, mine, deep=False)]
    assert ran == dtypes
    causes = [words for finding in findings if "gradients" in finding.stage
              for words in finding.causes]
    assert len(causes) == (0.5 in factors) and all("averaged" in words for words in causes)


@pytest.mark.parametrize("given", [None, "active"])
def test_threads_sleep_while_they_wait_unless_the_user_says_otherwise(tmp_path, given):
    """OpenMP prints its settings when torch loads it: how often a thread looks before it sleeps."""
    env = {**os.environ, "OMP_DISPLAY_ENV": "verbose"}
    env.pop("OMP_WAIT_POLICY", None)
    if given:
        env["OMP_WAIT_POLICY"] = given
    missing = str(tmp_path / "missing")
    run = subprocess.run([sys.executable, "-m", "extras.doctor", missing, missing], env=env,
                         cwd=HERE, capture_output=True, text=True)
    assert run.returncode == 2, run.stderr
    (looks,) = re.findall(r"GOMP_SPINCOUNT = '(\w+)'", run.stderr)
    assert (looks == "0") == (given is None), looks


def test_microbatches_of_padding_are_in_no_mean_of_means(right):
    """The mean of such a microbatch is 0/0."""
    class Padded(Dump):
        def targets(self, number):
            targets = super().targets(number)
            targets[0, 0] = ABSENT
            return targets

    one = changed(right(microbatches=3), "gradients-1", change=lambda name, grad: grad.flip(0))
    mine = Padded(**vars(one))
    finding = finding_of(one, mine, "step 1 gradients")
    assert not finding.equal and not finding.causes, finding


def test_a_norm_that_torch_sums_in_32_bits_is_equal(right):
    """It adds up squares one after the other: small ones are lost beside a large sum, like in a
    tensor of 4e7 elements."""
    grad = torch.full((1 << 20,), 2e-4)
    grad[:64] = 1.0
    norm = torch.nn.utils.get_total_norm([grad]).item()
    exact = grad.double().norm().item()
    assert abs(norm - exact) > 1e-4 * exact
    read = Tensors({"one": lambda: grad})
    mine = replace(changed(right(dtype="float32"), change=None), model=None,
                   tensors={"weights-0": read, "gradients-1": read})
    for given, is_equal in ((norm, True), (exact, True), (0.99 * exact, False),
                            (1.01 * exact, False)):
        mine.steps[0]["norm"] = given
        (finding,) = judge_norm(mine, 1)
        assert finding.equal == is_equal and not finding.causes, finding


def test_a_norm_whose_noise_would_hide_a_cause_has_it_only_if_it_is_exact(right):
    """Counting the replicated gradients twice makes the norm larger by 20 times the noise: too
    little for a name, unless the norm is that one exactly."""
    large = torch.full((1 << 20,), 2e-4)
    large[:64] = 1.0
    noise = large.double().norm().item() - torch.nn.utils.get_total_norm([large]).item()
    exact = large.double().norm().item()
    small = torch.tensor([(40 * noise * exact) ** 0.5])
    read = Tensors({"h.0.mlp.c_fc.weight": lambda: large, "h.0.ln_1.weight": lambda: small})
    mine = replace(with_layout(changed(right(dtype="float32"), change=None), tp=2), model=None,
                   tensors={"weights-0": read, "gradients-1": read})
    norm = (exact**2 + small.double().square().sum().item()) ** 0.5
    twice = (exact**2 + 2 * small.double().square().sum().item()) ** 0.5
    for given, n_causes in ((norm + 6 * noise, 0), (twice - 2 * noise, 0), (twice, 1)):
        mine.steps[0]["norm"] = given
        (finding,) = judge_norm(mine, 1)
        assert not finding.equal and len(finding.causes) == n_causes, finding


# ---- what is not examined is said, and is never equal if it is not finite ----


def test_a_stage_whose_files_are_missing_is_not_examined(right):
    mine = lacking(changed(right(), change=None), "tokens", "gradients", "weights-1", "weights-2")
    mine.steps[0]["loss"] = 99.0
    said = {line[:24].strip(): line[24:].strip()
            for line, _ in lines(diagnose(right(), mine), mine.layout)}
    assert said.pop("initial weights") == "equal"
    stages = {f"step {n} {what}" for n in (1, 2)
              for what in ("tokens", "loss", "gradients", "norm", "weights")}
    assert said.keys() == stages
    assert all(words.startswith("not examined: MINE has no ") for words in said.values()), said


@pytest.mark.parametrize("missing", ["tokens", "gradients"])
@pytest.mark.parametrize("number", ["loss", "norm"])
def test_a_number_that_is_not_finite_is_never_equal(right, missing, number):
    mine = lacking(changed(right(), change=None), missing)
    mine.steps[0][number] = float("nan")
    finding = finding_of(right(), mine, f"step 1 {number}")
    assert not finding.equal and finding.differs == "not finite"


def test_gradients_that_are_not_finite_are_never_equal(right):
    mine = lacking(changed(right(), "gradients-1", change=nan_in("wte.weight")), "tokens")
    mine.steps[0]["norm"] = float("nan")
    finding = finding_of(right(), mine, "step 1 gradients")
    assert not finding.equal and "not finite" in finding.differs
    # The norm follows from them
    assert finding_of(right(), mine, "step 1 norm").equal


@pytest.mark.parametrize("spoil,says", [
    (lambda mine: mine.optimizer.update(beta2=0.999), "beta2 is 0.999, not 0.95"),
    (lambda mine: mine.optimizer.update(grad_clip=0), "grad_clip is 0, not 0.2"),
    (lambda mine: mine.optimizer.update(name="lion"), "optimizer is lion, not adamw"),
    (lambda mine: setattr(mine, "balance", 0.5), "balance is 0.5, not 0.0"),
    (lambda mine: setattr(mine, "loss", "sum"), "loss is sum, not mean")])
def test_settings_that_are_not_references_are_not_equal(right, spoil, says):
    mine = replace(changed(right(), change=None), optimizer=dict(right().optimizer))
    spoil(mine)
    said = [*lines(diagnose(right(), mine, deep=False), mine.layout)]
    at = next(i for i, (line, _) in enumerate(said) if line.startswith("settings"))
    assert said[at] == (f"{'settings':24} differs: {says}", False)
    assert "fits nothing" not in said[at + 1][0]


@pytest.mark.parametrize("padding", [-1, -100])
def test_a_batch_of_padding_only_is_refused(right, monkeypatch, padding):
    one = right()
    entry = one.tokens["tokens-1"]["targets"]
    monkeypatch.setattr("extras.doctor.dump.read_tensor", lambda given, usual=read_tensor:
                        usual(given) * 0 + padding if given is entry else usual(given))
    for deep in (False, True):
        with pytest.raises(ValueError, match="tensor targets: all are padding"):
            list(diagnose(one, one, deep))


def test_tokens_of_step_2_are_examined_without_those_of_step_1(right):
    class OtherIds(Dump):
        def ids(self, number):
            ids = super().ids(number)
            return ids if ids is None else ids.flip(-1)

    mine = OtherIds(**vars(lacking(right(), "tokens-1")))
    finding = finding_of(right(), mine, "step 2 tokens")
    assert not finding.equal and not finding.causes


@pytest.mark.parametrize("spoil", ["loss", "weights", "gradients"])
def test_zeros_of_another_form_are_compared(right, spoil):
    reference = replace(changed(right(), change=None), model=None)
    if spoil == "loss":
        reference.steps[0]["loss"] = 0.0
    else:
        files = [file for file in reference.tensors if file.startswith(spoil)]
        reference = changed(reference, *files[:-1], change=lambda name, tensor: 0 * tensor)
    mine = replace(changed(right(), change=None), model=None)
    for pair in ((reference, mine), (mine, reference)):
        assert not all(finding.equal for finding in diagnose(*pair))


def test_the_command_leaves_malloc_as_it_is_where_it_is_imported(right, doctor, monkeypatch):
    monkeypatch.setattr(command, "keep_freed_memory", lambda: pytest.fail("mallopt"))
    folder = right().folder
    assert doctor(folder, folder)[0] == 0
