"""The two ends of the model, split along the vocabulary, in less memory. (With --tp 1 only the head
is replaced, unless a schedule splits the backward.)

    VocabularyEmbedding   the root's, leaving through a Region (engine/sequence_parallel.py)
    ChunkedLoss           product with lm_head and cross-entropy, some tokens at a time, so that the
                          logits of all tokens, often the largest tensor of a step, never exist at
                          once. A rank sends T-1 numbers per token, by one all-gather, and
                          all-reduces the loss, one number per microbatch. (The plain loss sends
                          6 (T-1)/T numbers per token: three numbers in two all-reduces)

Held for backward by the head, per token (--sp: 1/T): LayerNorm's input and statistics, and the
gradient of its output, 2 C + 2 numbers; and, because ChunkedLoss computes gradients in forward, the
gradient of the matrix, V C/T elements of at least 32 bits.
"""

import torch
import torch.nn as nn
import torch.nn.functional as F

from engine.collectives import all_gather, all_reduce
from engine.sequence_parallel import leave_region
from model import ABSENT
from shard import split
from tensor_parallel import to_local


class VocabularyEmbedding(nn.Module):
    """Each token's row is on one rank; the other ranks add zero to it."""

    def __init__(self, embedding, region):
        super().__init__()
        self.region = region
        self.weight = split(embedding.weight, 0, region.group)

    def forward(self, idx):  # (B, S)
        if self.region.sp:  # rank by rank (Region)
            idx = idx.unflatten(1, (self.region.group.size, -1)).movedim(1, 0).flatten(0, 1)
        local, outside = to_local(idx, *self.weight.tag.ranges[0])
        x = F.embedding(local, self.weight).masked_fill(outside.unsqueeze(-1), 0)
        return leave_region(x, self.region)  # (B, S, C), under --sp (B, S/T, C)


# ---- the loss, some tokens at a time ----


def log_share(logits, log_probs, group):
    """log of the total probability of this rank's words, (c, 1), for c tokens. log_probs (c, V/T):
    log-softmax over this rank's words only; with the result added, over all words."""
    # This rank's logsumexp is logit - log_prob of any word. Take the word with the largest logit,
    # where rounding is least.
    largest, word = logits.max(-1, keepdim=True)
    own = largest - log_probs.gather(-1, word)
    of_ranks = own.new_empty(group.size, len(own))
    of_ranks[group.rank] = own.squeeze(-1)
    all_gather(of_ranks, group)
    return own - of_ranks.logsumexp(0).unsqueeze(-1)


def gradient_of_logits(log_probs, of_target, local, outside, out):
    """softmax - onehot(target), written into `out` (c, V/T), which may have 16 bits. log_probs
    (c, V/T); of_target (c, 1): log-probability at `local`, the target's column on this rank."""
    # At the target p - 1, from 32 bits: a p of 16 bits may have been rounded to 1 already.
    # If another rank has the target, `local` is 0, and p of word 0 is written over itself.
    of_target = torch.where(outside, of_target.exp(), of_target.expm1())
    if torch.compiler.is_compiling():  # the compiler would copy all of `grad` to scatter into it
        words = torch.arange(out.size(-1), device=out.device)
        return out.copy_(torch.where(words == local, of_target, log_probs.exp()))
    grad = torch.exp(log_probs, out=out)  # the probability p of every word
    return grad.scatter_(-1, local, of_target.to(grad.dtype))


def add_weight_gradient(grad_weight, grad, inputs):
    """grad_weight += grad^T inputs, for c tokens. A product of 16-bit tensors is summed in the 32
    bits of grad_weight. On a CPU torch has no such product: its result has 16 bits, and a sum of c
    terms may overflow float16. To prevent that, divide the inputs by a power of two larger than c:
    each |grad| <= 1, so no sum exceeds the largest input. Then multiply the product by the power,
    in 32 bits. (Exact but for inputs below 2^-14 times the power: float16 has fewer digits
    there.)"""
    if grad_weight.dtype == inputs.dtype:
        grad_weight.addmm_(grad.t(), inputs)
    elif grad_weight.device.type != "cpu":
        torch.addmm(grad_weight, grad.t(), inputs, out_dtype=grad_weight.dtype, out=grad_weight)
    else:
        power = 2.0 ** len(inputs).bit_length()
        grad_weight.add_(grad.t() @ (inputs / power), alpha=power)


# Bytes of a chunk's logits on a GPU. Smaller chunks take less memory, but launch more kernels, and
# read and write the gradient of the matrix more often (tests/counts.py counts both)
CHUNK = 256 << 20


def tokens_of_chunk(x, weight):
    """How many tokens ChunkedLoss takes at a time: as many as the model is wide, so that their
    logits are as large as the gradient of the matrix; at least 256, because each chunk costs
    launches and, under --tp, messages. On a GPU as many as CHUNK holds, if that is more."""
    tokens = max(x.size(-1), 256)
    if x.device.type == "cpu":
        return tokens
    return max(tokens, CHUNK // (weight.size(0) * x.element_size()))


def positions_of_chunk(x, weight, rows):
    """How many of x's positions ChunkedLoss takes at a time, of `rows` sequences together. On a GPU
    all chunks are equally long if some number in the upper half of what is allowed divides the
    length: --compile compiles for one shape, and products have whole tiles. If none does (a prime
    length), the chunks are as even as they can be. GPT-2, 16 sequences of 1024 tokens: 8 chunks of
    128 positions, where 6 of 166 and one of 28 would do."""
    most = max(1, tokens_of_chunk(x, weight) // rows)
    if x.device.type == "cpu":
        return most
    length = x.size(1)
    even = [n for n in range(most // 2 + 1, most + 1) if length % n == 0]
    num_chunks = -(-length // most)
    return even[-1] if even else -(-length // num_chunks)


class ChunkedLoss(torch.autograd.Function):
    """Product with lm_head and cross-entropy, over chunks of tokens: for each chunk its logits,
    then at once their loss and gradient. Forward saves the gradients of x and weight. Backward only
    multiplies them, in place, by the gradient of the loss; so it can run only once.

    In: x (B, S, C), under --sp (B, S/T, C); weight (V/T, C); targets (B, S). Out: the
    loss, summed over the tokens, the same on all ranks. For the loss each rank sends its
    log(sum(exp(logits))), one number per token, to all others; for the gradient it sums grad_x over
    the ranks."""

    @staticmethod
    def forward(ctx, x, weight, targets, head, training):
        region = head.region
        group = region.group
        start, stop = weight.tag.ranges[0]  # this rank's words
        wide = torch.promote_types(x.dtype, torch.float)  # sums have 32 bits at least
        parts = group.size if region.sp else 1  # the sequence is in so many parts, one per rank
        B, length, C = x.shape  # length: S, under --sp S/T
        targets = targets.unflatten(1, (parts, -1)).movedim(1, 0)  # (parts, B, length)
        loss = x.new_zeros(1, dtype=wide)
        grad_x = torch.empty_like(x) if training else None
        weight_trained = training and ctx.needs_input_grad[1]
        grad_weight = torch.zeros_like(weight, dtype=wide) if weight_trained else None
        # A chunk: n positions of each part, in the order in which region.enter() gathers them:
        # c = parts * B * n tokens
        n = positions_of_chunk(x, weight, B * parts)
        for i in range(0, length, n):
            wanted = targets[:, :, i : i + n].flatten()  # (c,)
            # padding tokens: no word of any rank, so no loss; zero inputs, so no gradient
            present = (wanted != ABSENT).unsqueeze(-1)
            inputs = region.enter(x[:, i : i + n]).flatten(0, 1) * present  # (c, C)
            logits = inputs @ weight.t()  # (c, V/T)
            local, outside = (part.unsqueeze(-1) for part in to_local(wanted, start, stop))
            # In training log_likelihood() also overwrites the logits with their gradient
            loss -= head.log_likelihood(logits, local, outside, training)
            if training:
                grad = logits
                grad_inputs = (grad @ weight) * present  # (c, C), partial over tp
                leaving = region.start_leave(grad_inputs.view(parts * B, -1, C))
                if weight_trained:
                    add_weight_gradient(grad_weight, grad, inputs)  # while grad_inputs is reduced
                grad_x[:, i : i + n] = leaving()
        ctx.dtype = x.dtype
        ctx.save_for_backward(grad_x, grad_weight)
        return all_reduce(loss, group)[0]

    @staticmethod
    def backward(ctx, grad):
        grad_x, grad_weight = ctx.saved_tensors
        grad = grad.view(1)  # 1-dim: CUDA would first round a 0-dim tensor to grad_x's dtype
        grad_x.mul_(grad)
        if grad_weight is not None:
            grad_weight = grad_weight.mul_(grad).to(ctx.dtype)
        return grad_x, grad_weight, None, None, None


class ChunkedHead(nn.Module):
    """model.Head with ChunkedLoss."""

    def __init__(self, head, region):
        super().__init__()
        self.ln_f = head.ln_f
        self.lm_head = head.lm_head  # its weight: (V/T, C)
        self.region = region

    @property
    def read_in_backward(self):
        """ChunkedLoss computes the matrix's gradient already in forward (engine/zero.py)."""
        return [self.ln_f]

    def log_likelihood(self, logits, local, outside, training):
        """In: the logits (c, V/T) of c tokens. Returns the sum of the log-probabilities of those
        targets that are words of this rank. In training the logits then hold their gradient.
        All of it is one function, so that --compile reads the logits twice and writes them
        once."""
        log_probs = F.log_softmax(logits, -1, dtype=torch.promote_types(logits.dtype, torch.float))
        if self.region.group.size > 1:
            log_probs += self.share(logits, log_probs)
        of_target = log_probs.gather(-1, local)  # (c, 1)
        if training:
            gradient_of_logits(log_probs, of_target, local, outside, out=logits)
        return of_target.masked_fill(outside, 0).sum()

    def share(self, logits, log_probs):
        """A method of its own, because log_share sends: --compile leaves this method in Python
        (engine/compiled.py)."""
        return log_share(logits, log_probs, self.region.group)

    def loss(self, x, targets):
        return ChunkedLoss.apply(x, self.lm_head.weight, targets, self, torch.is_grad_enabled())

    def forward(self, x, targets):  # (B, S, C), under --sp (B, S/T, C); (B, S)
        return self.loss(self.ln_f(x), targets)
