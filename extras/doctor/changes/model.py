"""Changes that any layout may have: attention, the loss, the norms' epsilon, GELU."""

from functools import partial

import torch
import torch.nn.functional as F

from extras.doctor.step import Change
from sizes import LlamaConfig


def each_attention(attend):
    """attend(q, k, v): takes the place of causal_attention in all blocks."""
    def after(model, mesh):
        for block in model.layers[1:-1]:
            block.attn.attend = attend
    return after


def all_tokens_seen(q, k, v):
    return F.scaled_dot_product_attention(q, k, v, enable_gqa=True)


def unscaled_attention(q, k, v):
    return F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=1.0, enable_gqa=True)


def shifted_targets(model, mesh):
    """The loss shifts targets that are the next tokens already, and leaves out the last place. (It
    is then the mean over S - 1 places.)"""
    head = model.layers[-1]
    right = head.loss

    def loss(logits, targets):
        S = targets.size(1)
        return right(logits[:, :-1], targets[:, 1:]) * S / (S - 1)

    head.loss = loss


def padded_rows(multiple):
    """The loss counts padded rows, with logits of 0: those that fill a rank's slice of the
    vocabulary up to a multiple of this number."""
    def after(model, mesh):
        head = model.layers[-1]
        right = head.loss

        def loss(logits, targets):
            n_padded = -logits.size(-1) % multiple  # 10 rows, a multiple of 8: 6 more
            return right(F.pad(logits, (0, n_padded)), targets)

        head.loss = loss
    return after


def norms_with(eps):
    def before(model):
        for module in model.modules():
            if isinstance(module, torch.nn.LayerNorm | torch.nn.RMSNorm):
                module.eps = eps
    return before


def exact_gelu(model):
    def forward(mlp, x):
        return mlp.c_proj(F.gelu(mlp.c_fc(x)))

    for block in model.layers[1:-1]:
        block.mlp.forward = partial(forward, block.mlp)


def model_changes(config, N):
    """The Changes of a model, under N context ranks."""
    found = []
    if N == 1:  # with more, attention is replaced, and a rank's tokens are not one after the other
        found += [
            Change("attention sees later tokens", after=each_attention(all_tokens_seen)),
            Change("attention scores are not divided by sqrt(head width)",
                   after=each_attention(unscaled_attention)),
            Change("targets are shifted twice: the loss shifts labels that are the next tokens "
                   "already", after=shifted_targets)]
    for multiple in (2, 4, 8, 16, 32, 64, 128):
        found.append(Change(f"the rows that pad the vocabulary to a multiple of {multiple} count "
                            "in the loss", after=padded_rows(multiple)))
    for eps in (1e-6, 1e-8, 1e-12, 1e-5):
        found.append(Change(f"the norms' epsilon is {eps:g}", before=norms_with(eps)))
    if not isinstance(config, LlamaConfig) and not config.n_experts:
        found.append(Change("GELU is computed exactly (erf), not by tanh", before=exact_gelu))
    return found
