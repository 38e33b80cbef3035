"""Bugs from public reports of Megatron-LM, build-nanogpt and accelerate, computed in one process as
so many ranks would compute them: the doctor names them."""

import json
import math
from types import ModuleType

import pytest
import torch
import torch.nn.functional as F

from extras.doctor.dump import read_dump
from extras.doctor.tests.test_dump import recording
from extras.doctor.tests.test_foreign import DUMPING, answer
from model import ABSENT, GPT

PADDED = [i * 3 % 9 for i in range(12)]  # targets at the start of each sequence that are padding


@pytest.fixture(scope="module")
def reference(corpus, tmp_path_factory):
    """A folder with the dump of one process."""
    folder = tmp_path_factory.mktemp("reports")
    flags = "--n-layer 2 --n-head 2 --n-embd 16 --block-size 12 --batch-size 12".split()
    run = recording(1, folder / "reference", [*flags, "--data", corpus], folder)
    assert run.wait() == [0], run.read()
    return folder / "reference"


def losses_of(logits, targets):
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="none").view_as(
        targets)


def dump_of_loop(reference, folder, backward, padded=(), D=1, m=1, **layout):
    """The dump of two steps of a loop. backward(model, ids, targets) computes the gradients and
    returns the loss; ids, targets: (sequences, S). padded: see PADDED."""
    given = read_dump(reference)
    page = ModuleType("dumping")
    exec(DUMPING, page.__dict__)
    page.of_all_ranks = lambda tensor: tensor  # all ranks' tokens are here
    model = GPT(given.model)
    params = dict(model.canonical_parameters())
    for name, param in params.items():
        param.data.copy_(given.weights(0)[name])
    optimizer = torch.optim.AdamW([
        {"params": [p for p in params.values() if p.dim() > 1], "weight_decay": 0.1},
        {"params": [p for p in params.values() if p.dim() == 1], "weight_decay": 0.0}],
        betas=(0.9, 0.95))
    about = json.loads((reference / "dump.json").read_text())
    about["layout"].update(dp=D, microbatches=m, **layout)
    steps = []
    for number in (1, 2):
        ids = given.ids(number).flatten(0, 2)
        targets = given.targets(number).flatten(0, 2).clone()
        for row, n in zip(targets, padded, strict=False):
            row[:n] = ABSENT
        optimizer.zero_grad()
        loss = backward(model, ids, targets)
        tokens = ids.view(D, m, -1, ids.size(-1)), targets.view(D, m, -1, ids.size(-1))
        page.dump(folder, about, steps, params, *tokens)
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for group in optimizer.param_groups:
            group["lr"] = given.steps[number - 1]["lr"]
        optimizer.step()
        steps.append({"loss": loss.item(), "norm": norm.item(), "lr": group["lr"]})
    page.dump(folder, about, steps, params, *tokens)
    return read_dump(folder)


def mean_loss(model, ids, targets):
    loss = (losses_of(model(ids), targets.clamp(min=0)) * (targets != ABSENT)).sum()
    loss = loss / (targets != ABSENT).sum()
    loss.backward()
    return loss


@pytest.mark.parametrize("data_ranks", [1, 2])
def test_means_of_context_ranks_own_tokens_are_named(reference, tmp_path, data_ranks):
    """Each of two context ranks has a quarter of a sequence at the start and one at the end."""
    right = dump_of_loop(reference, tmp_path / "right", mean_loss, PADDED)
    own = torch.zeros(2, 12, dtype=torch.bool)
    own[0, :3] = own[0, 9:] = own[1, 3:9] = True

    def means(model, ids, targets):
        losses = losses_of(model(ids), targets.clamp(min=0)) * (targets != ABSENT)
        found = []
        for part, counts in zip(losses.chunk(data_ranks), (targets != ABSENT).chunk(data_ranks),
                                strict=True):
            found += [(part * mask).sum() / (counts & mask).sum() for mask in own]
        loss = sum(found) / len(found)
        loss.backward()
        return loss

    mine = dump_of_loop(reference, tmp_path / "mine", means, PADDED, D=data_ranks, cp=2)
    printed, causes = answer(read_dump(tmp_path / "right"), mine)
    assert causes and all("a mean of the context ranks' (cp) means" in words
                          for words in causes), printed
    assert not any("fits nothing" in line for line in printed), printed
    assert answer(right, right)[0][-1] == "equal"


def test_a_loss_of_gathered_logits_is_log_T_too_large(reference, tmp_path):
    """A vocabulary-parallel loss that is given whole logits: each of T = 2 ranks has all
    exponentials, and rank 0 alone takes 1 off, at its own words."""
    def gathered(model, ids, targets):
        logits = model(ids)
        V = logits.size(-1)
        own = F.one_hot(targets, V) * (torch.arange(V) < -(-V // 2))
        logits.backward((logits.detach().softmax(-1) / 2 - own) / targets.numel())
        return losses_of(logits.detach(), targets).mean() + math.log(2)

    mine = dump_of_loop(reference, tmp_path / "mine", gathered, tp=2)
    printed, causes = answer(read_dump(reference), mine)
    assert any("the loss is log(2) too large per token" in words for words in causes), printed


@pytest.mark.parametrize("k,which", [(0, "first"), (2, "last")])
def test_ddp_that_averages_one_microbatch_only_is_named(reference, tmp_path, k, which):
    """torch's DDP on D = 2 ranks, m = 3; rank 0's gradient is in the dump."""
    def one_microbatch(model, ids, targets):
        total = 0.0
        for d in range(2):
            for i in range(3):
                part = ids.view(2, 3, 2, -1)[d, i], targets.view(2, 3, 2, -1)[d, i]
                loss = losses_of(model(part[0]), part[1]).sum() / (targets.numel() / 2)
                total += loss.detach() / 2
                if i == k:
                    (loss / 2).backward()
                elif d == 0:
                    loss.backward()
        return total

    mine = dump_of_loop(reference, tmp_path / "mine", one_microbatch, D=2, m=3)
    printed, causes = answer(read_dump(reference), mine)
    assert any(f"only the {which} microbatch's gradients are averaged over the data ranks" in words
               for words in causes), printed


def test_exact_gelu_is_named_where_the_loss_counts_as_equal(reference, tmp_path, monkeypatch):
    gelu = F.gelu
    monkeypatch.setattr(F, "gelu", lambda x, approximate: gelu(x))
    mine = dump_of_loop(reference, tmp_path / "mine", mean_loss)
    monkeypatch.setattr(F, "gelu", gelu)
    printed, causes = answer(read_dump(reference), mine)
    assert any("GELU is computed exactly" in words for words in causes), printed
