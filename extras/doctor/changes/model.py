"""Changes that any layout may have: one function of the model in one of its usual wrong forms.

    function        a wrong form of it
    activation      form(x): of an MLP's or an expert's hidden units
    norm            form(norm, x): norm is the LayerNorm or RMSNorm whose place it takes
    attention       form(q, k, v, own): of the queries at the positions `own` and of all keys
    rotary angles   form(x, positions, config, of_queries): of x (B, S, heads, hs), not yet turned
    loss            form(logits, targets, right): right is the loss whose place it takes

put_... puts a form in the place of its function, in all layers; swapped() makes the Changes of a
table of forms. (experts.py has the forms of gates and of the order of experts' rows, context.py
those of a ring's merge.)
"""

from dataclasses import replace
from functools import partial

import torch
import torch.nn.functional as F

from context_parallel import zigzag
from extras.doctor.changes.context import gather_keys
from extras.doctor.step import Change
from llama import frequencies, rotate
from sizes import LlamaConfig


def swapped(put, forms, **how):
    """The Changes that put wrong forms, {words: form}, in the place of the right one. how: the
    other fields of each Change."""
    return [Change(words, after=put(form), **how) for words, form in forms.items()]


# ---- activation ----


def put_activation(form):
    def forward(mlp, x):
        return mlp.c_proj(form(mlp.c_fc(x)))

    def after(model, mesh):
        for block in model.layers[1:-1]:
            if hasattr(block.mlp, "experts"):
                block.mlp.experts.activation = form
            else:
                block.mlp.forward = partial(forward, block.mlp)
    return after


def quick_gelu(x):
    return x * torch.sigmoid(1.702 * x)


GELU = {"GELU is computed exactly (erf), not by tanh": F.gelu,
        "the activation is x sigmoid(1.702 x), not GELU by tanh": quick_gelu,
        "the activation is ReLU, not GELU": F.relu,
        "the activation is SiLU, not GELU": F.silu}


def gated(activation):
    def form(x):
        gate, up = x.chunk(2, dim=-1)
        return activation(gate) * up
    return form


def swapped_gate(x):
    gate, up = x.chunk(2, dim=-1)
    return F.silu(up) * gate


def interleaved_gate(x):
    return F.silu(x[..., ::2]) * x[..., 1::2]


SWIGLU = {"gate and up are swapped: SiLU is of up": swapped_gate,
          "gate and up are taken for every second hidden unit, not for halves": interleaved_gate,
          "the gate's activation is GELU by tanh, not SiLU":
              gated(partial(F.gelu, approximate="tanh")),
          "the gate's activation is GELU by erf, not SiLU": gated(F.gelu),
          "the gate's activation is ReLU, not SiLU": gated(F.relu),
          "the gate's activation is the sigmoid, not SiLU": gated(torch.sigmoid)}

# ---- norm ----


def put_norm(form):
    def after(model, mesh):
        for module in model.modules():
            if isinstance(module, torch.nn.LayerNorm | torch.nn.RMSNorm):
                module.forward = partial(form, module)
    return after


def times_gain(norm, x, plus=0.0):
    """The end of a norm: the gain, and a LayerNorm's bias. plus: is added to the gain."""
    x = x * (plus + norm.weight)
    return x + norm.bias if is_layer_norm(norm) else x


def is_layer_norm(norm):
    return isinstance(norm, torch.nn.LayerNorm)


def centered(norm, x):
    """x as the norm divides it by its root mean square: a LayerNorm subtracts the mean first."""
    return x - x.mean(-1, keepdim=True) if is_layer_norm(norm) else x


def mean_square(x):
    return x.square().mean(-1, keepdim=True)


def norm_with(eps):
    def form(norm, x):
        x = centered(norm, x)
        return times_gain(norm, x / (mean_square(x) + eps).sqrt())
    return form


def eps_after_root(norm, x):
    x = centered(norm, x)
    return times_gain(norm, x / (mean_square(x).sqrt() + norm.eps))


def gain_of_one_more(norm, x):
    x = centered(norm, x)
    return times_gain(norm, x / (mean_square(x) + norm.eps).sqrt(), plus=1.0)


def without_mean(norm, x):
    return times_gain(norm, x / (mean_square(x) + norm.eps).sqrt())


def with_mean(norm, x):
    x = x - x.mean(-1, keepdim=True)
    return times_gain(norm, x / (mean_square(x) + norm.eps).sqrt())


def unbiased(norm, x):
    C = x.size(-1)
    x = centered(norm, x)
    return times_gain(norm, x / (mean_square(x) * C / (C - 1) + norm.eps).sqrt())


def norm_in(dtype):
    """The norm's function of torch, called in this dtype: its inputs and its result are rounded."""
    def form(norm, x):
        weight = norm.weight.to(dtype)
        if is_layer_norm(norm):
            y = F.layer_norm(x.to(dtype), norm.normalized_shape, weight, norm.bias.to(dtype),
                             norm.eps)
        else:
            y = F.rms_norm(x.to(dtype), norm.normalized_shape, weight, norm.eps)
        return y.to(x.dtype)
    return form


def norms(config):
    """The forms of norms whose numbers differ from the right ones."""
    is_llama = isinstance(config, LlamaConfig)
    eps = config.norm_eps if is_llama else 1e-5
    found = {f"the norms' epsilon is {wrong:g}": norm_with(wrong)
             for wrong in (1e-6, 1e-8, 1e-12, 1e-5) if wrong != eps}
    found |= {"the norms' epsilon is added after the root": eps_after_root,
              "the norms multiply by 1 + their weight": gain_of_one_more}
    if is_llama:
        found["the norms subtract the mean, like LayerNorm, not RMSNorm"] = with_mean
    else:
        found |= {"the norms do not subtract the mean, like RMSNorm, not LayerNorm": without_mean,
                  "the norms' variance is divided by C - 1, not by C": unbiased}
    return found


# ---- attention ----


def put_attention(form):
    """Keys and values of all context ranks are gathered first."""
    def attend(q, k, v, group):
        N = group.size
        own = zigzag(N * q.size(2), N, group.rank)
        if N > 1:
            k = gather_keys(k, group, comes_back=True)
            v = gather_keys(v, group, comes_back=True)
        return form(q, k, v, own)

    def after(model, mesh):
        for block in model.layers[1:-1]:
            block.attn.attend = partial(attend, group=mesh.group("cp"))
    return after


def scores_of(q, k):
    """(B, nh, Sq, S), divided by sqrt(head width)."""
    return q @ k.repeat_interleave(q.size(1) // k.size(1), 1).mT / q.size(-1) ** 0.5


def weighted(weights, v):
    """(B, nh, Sq, hs): the sum of the values, each times its weight (B, nh, Sq, S)."""
    return weights @ v.repeat_interleave(weights.size(1) // v.size(1), 1)


def softmax_up_to(scores, last):
    """The softmax over the keys up to the position last (Sq,) of each query."""
    is_later = torch.arange(scores.size(-1)) > last.unsqueeze(1)  # (Sq, S)
    return scores.masked_fill(is_later, -torch.inf).softmax(-1)


def all_tokens_seen(q, k, v, own):
    return weighted(scores_of(q, k).softmax(-1), v)


def next_token_seen(q, k, v, own):
    return weighted(softmax_up_to(scores_of(q, k), own + 1), v)


def masked_after_softmax(q, k, v, own):
    is_later = torch.arange(k.size(2)) > own.unsqueeze(1)
    return weighted(scores_of(q, k).softmax(-1).masked_fill(is_later, 0), v)


def attention_scaled(power):
    """Scores are divided by the head width to this power."""
    def form(q, k, v, own):
        scores = scores_of(q, k) * q.size(-1) ** (0.5 - power)
        return weighted(softmax_up_to(scores, own), v)
    return form


def heads_in_turn(q, k, v, own):
    """Query heads 0 1 2 3 use the heads 0 1 0 1 of keys and values. Right: 0 0 1 1."""
    n = q.size(1) // k.size(1)
    k = k.repeat(1, n, 1, 1)
    v = v.repeat(1, n, 1, 1)
    return weighted(softmax_up_to(scores_of(q, k), own), v)


def softmax_in(dtype):
    def form(q, k, v, own):
        scores = scores_of(q, k)
        return weighted(softmax_up_to(scores.to(dtype), own).to(scores.dtype), v)
    return form


ATTENTION = {"attention sees later tokens": all_tokens_seen,
             "attention sees one later token: the mask is off by one": next_token_seen,
             "attention is masked after the softmax: the weights do not add up to 1":
                 masked_after_softmax,
             "attention scores are not divided by sqrt(head width)": attention_scaled(0),
             "attention scores are divided by the head width, not by its root":
                 attention_scaled(1)}
GROUPED = {"the query heads that share a key head are taken in turn (repeat), not next to one "
           "another (repeat_interleave)": heads_in_turn}

# ---- rotary angles ----


def angles_of(x, positions, config):
    """(S, hs/2), with 32 bits at least."""
    wide = torch.promote_types(x.dtype, torch.float)
    return positions.unsqueeze(1) * frequencies(config, wide)


def put_rotary(form):
    """Queries and keys are turned back, then turned by the form."""
    def attend(q, k, v, attn, right):
        positions = attn.positions(q.transpose(1, 2))
        angles = angles_of(q, positions, attn.config)

        def turned(x, of_queries):  # (B, heads, S, hs)
            original = rotate(x.transpose(1, 2), -angles)
            return form(original, positions, attn.config, of_queries).transpose(1, 2)

        return right(turned(q, True), turned(k, False), v)

    def after(model, mesh):
        for block in model.layers[1:-1]:
            block.attn.attend = partial(attend, attn=block.attn, right=block.attn.attend)
    return after


def unturned(x, positions, config, of_queries):
    return x


def only_queries(x, positions, config, of_queries):
    return rotate(x, angles_of(x, positions, config)) if of_queries else x


def other_way(x, positions, config, of_queries):
    return rotate(x, -angles_of(x, positions, config))


def neighbours(x, positions, config, of_queries):
    """The pairs of a head are 0 1, 2 3, ... Right: i and i + hs/2."""
    halves = torch.cat([x[..., ::2], x[..., 1::2]], dim=-1)
    turned = rotate(halves, angles_of(x, positions, config))
    return torch.stack(turned.chunk(2, dim=-1), dim=-1).flatten(-2)


def with_frequencies(**sizes):
    """sizes: of the config."""
    def form(x, positions, config, of_queries):
        return rotate(x, angles_of(x, positions, replace(config, **sizes)))
    return form


def angles_in(dtype):
    """Frequencies, positions and their products are rounded."""
    def form(x, positions, config, of_queries):
        frequency = frequencies(config, torch.float).to(dtype)
        return rotate(x, positions.to(dtype).unsqueeze(1) * frequency)
    return form


def cosines_in(dtype):
    """Only the cosines and sines of the angles are rounded."""
    def form(x, positions, config, of_queries):
        angles = angles_of(x, positions, config)
        cos, sin = (each.to(dtype).to(x.dtype).unsqueeze(1) for each in (angles.cos(),
                                                                         angles.sin()))
        first, second = x.chunk(2, dim=-1)
        return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)
    return form


def rotary(config):
    found = {"queries and keys are not turned by their positions": unturned,
             "queries are turned by their positions, keys are not": only_queries,
             "queries and keys are turned the other way round": other_way,
             "the rotary pairs are neighbours (GPT-J's), not the two halves of a head":
                 neighbours}
    for base in (1e4, 5e5, 1e6):
        if base != config.rope_theta:
            found[f"the rotary base is {base:,.0f}, not {config.rope_theta:,.0f}"] = (
                with_frequencies(rope_theta=base))
    if config.rope_scaling:
        found["the rotary frequencies are not scaled"] = with_frequencies(rope_scaling="")
    return found


# ---- the loss ----


def put_loss(form):
    def after(model, mesh):
        head = model.layers[-1]
        head.loss = partial(form, right=head.loss)
    return after


def shifted_targets(logits, targets, right):
    """The loss shifts targets that are the next tokens already, and leaves out the last place. (It
    is then the mean over S - 1 places.)"""
    S = targets.size(1)
    return right(logits[:, :-1], targets[:, 1:]) * S / (S - 1)


def padded_rows(multiple):
    """The loss counts padded rows, with logits of 0: those that fill a rank's slice of the
    vocabulary up to a multiple of this number."""
    def form(logits, targets, right):
        n_padded = -logits.size(-1) % multiple  # 10 rows, a multiple of 8: 6 more
        return right(F.pad(logits, (0, n_padded)), targets)
    return form


LOSS = {f"the rows that pad the vocabulary to a multiple of {multiple} count in the loss":
        padded_rows(multiple) for multiple in (2, 4, 8, 16, 32, 64, 128)}

# ---- all of them ----


def rounded_changes(is_llama):
    """Changes whose wrong forms round to bfloat16. (A gradient that is rounded depends on the
    microbatch over which it is summed.)"""
    dtype = torch.bfloat16
    how = {"by_microbatch": True, "rounds": True}
    found = swapped(put_norm, {"norms are computed in bfloat16": norm_in(dtype)}, **how)
    found += swapped(put_attention, {"attention's softmax is computed in bfloat16":
                                     softmax_in(dtype)}, **how)
    if is_llama:
        found += swapped(put_rotary, {
            "the rotary angles are computed in bfloat16": angles_in(dtype),
            "the cosines and sines of the rotary angles are rounded to bfloat16":
                cosines_in(dtype)}, **how)
    return found


def model_changes(config, N):
    """The Changes of a model, under N context ranks."""
    is_llama = isinstance(config, LlamaConfig)
    found = swapped(put_attention, ATTENTION)
    if is_llama and 1 < config.n_kv_head < config.n_head:
        found += swapped(put_attention, GROUPED)
    if N == 1:  # else a rank's tokens are not one after the other
        found += swapped(put_loss, {"targets are shifted twice: the loss shifts labels that are "
                                    "the next tokens already": shifted_targets})
    found += swapped(put_loss, LOSS)
    found += swapped(put_norm, norms(config))
    found += swapped(put_activation, SWIGLU if is_llama else GELU)
    if is_llama:
        found += swapped(put_rotary, rotary(config))
    return found + rounded_changes(is_llama)
