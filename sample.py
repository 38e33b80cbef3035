"""Text from the last complete checkpoint, in one process, whatever layout trained it.

Held: the model, and a cache of the keys and values of all tokens so far (later tokens do not change
them): 2 L C numbers per token and sample, for L blocks of width C (a Llama: 2 L times its kv_width,
sizes.py).

    python sample.py --prompt "def " --out out --samples 3
"""

import sys
import time

from run.flags import fail, read_sample_flags
from run.launch import say  # (importing run.launch also makes Ctrl-C end without a traceback)

if __name__ == "__main__":
    ARGS = read_sample_flags()  # a wrong flag ends the process here, before torch is imported

import torch

from data.batches import load_tokenizer
from data.files import drop
from model import causal_attention
from run import checkpoint


class CachedAttention:
    """Replaces Attention.attend in one layer: keeps the keys and values of the tokens so far. The
    first call has all tokens so far, each later call has one token."""

    def __init__(self):
        # (B, nh, tokens so far, hs); a Llama's have n_kv heads
        self.keys = self.values = None

    def __call__(self, q, k, v):
        if self.keys is not None:
            k = torch.cat([self.keys, k], dim=2)
            v = torch.cat([self.values, v], dim=2)
        self.keys, self.values = k, v
        return causal_attention(q, k, v)


def pick_tokens(logits, temperature, top_k, rng):
    """(B, V) -> (B, 1): for each row a token, drawn from its top_k likeliest (0: from all).
    Temperature 0: the likeliest."""
    V = logits.size(1)
    top, tokens = logits.topk(min(top_k or V, V))  # sorted, the likeliest first
    if temperature == 0:
        return tokens[:, :1]
    # Weights in float64, with the largest logit at 0: no overflow however small the temperature
    weights = ((top - top[:, :1]).double() / temperature).softmax(1)
    return tokens.gather(1, torch.multinomial(weights, 1, generator=rng))


def next_logits(model, tokens, positions):
    """(samples, V): logits of the token that follows `tokens` (samples, n), which stand at
    positions (n,) of the window."""
    for module in model.positioned():  # GPT-2's embedding, or a Llama's attentions
        module.positions = positions
    *layers, head = model.layers
    x = tokens
    for layer in layers:
        x = layer(x)
    return head(x[:, -1:]).squeeze(1)


@torch.no_grad()
def generate(model, ids, n, samples=1, temperature=0.8, top_k=50, seed=1337):
    """`samples` continuations of the list `ids` by n tokens each: lists that begin with `ids`. For
    temperature and top_k see pick_tokens. After: the model still has the caches and positions.

    The model sees the last block_size tokens, the window. Positions count from the window's
    beginning: once it is full, each new token shifts all others by one position, so keys and values
    change, and each further token is computed from the whole window."""
    embedding, *blocks, _ = model.layers
    window = model.config.block_size
    out = torch.tensor([ids] * samples, device=embedding.wte.weight.device)  # (samples, tokens)
    rng = torch.Generator(out.device).manual_seed(seed)
    for i in range(n):
        length = out.size(1)
        if i == 0 or length > window:  # no cache yet, or the window has moved: all anew
            for block in blocks:
                block.attn.attend = CachedAttention()
            tokens = out[:, -window:]
            positions = torch.arange(tokens.size(1), device=out.device)
        else:  # the caches have all tokens but the last
            tokens = out[:, -1:]
            positions = torch.tensor([length - 1], device=out.device)
        logits = next_logits(model, tokens, positions)
        out = torch.cat([out, pick_tokens(logits, temperature, top_k, rng)], dim=1)
    return out.tolist()


def sample_text(folder, data):
    """Continue the validation text with the checkpoint just saved: the whole model, in float32, in
    this process. If that fails, return the reason: no run fails because of its sample."""
    try:
        model = checkpoint.load_model(folder)
        ids = generate(model, data.val[:16].tolist(), n=96)[0]
        text = load_tokenizer(data.folder).decode(ids)
    except (ValueError, OSError, RuntimeError, MemoryError) as error:  # no tokenizer, nan, ...
        text = f"(none: {error})"
    return "\n".join("  | " + line for line in text.splitlines())


def read_all(args):
    """(model, tokenizer, token ids of the prompt) of these flags. ValueError or OSError if one of
    them cannot be read."""
    if args.device == "cuda" and not torch.cuda.is_available():
        raise ValueError("--device cuda: no GPU here; use --device cpu")
    folder = checkpoint.find(args.out)
    model = checkpoint.load_model(folder, args.device)
    tokenizer = load_tokenizer(args.data or checkpoint.read_manifest(folder)["data"])
    if tokenizer.n_vocab != model.config.vocab_size:
        raise ValueError(f"the tokenizer has {tokenizer.n_vocab} tokens, the model "
                         f"{model.config.vocab_size}; --data names the training data's folder")
    ids = tokenizer.encode_ordinary(args.prompt)
    if not ids:
        raise ValueError("--prompt must not be empty")
    return model, tokenizer, ids


def main(args):
    try:
        model, tokenizer, ids = read_all(args)
    except (ValueError, OSError) as error:
        fail(error)
    start = time.perf_counter()
    texts = generate(model, ids, args.max_tokens, args.samples, args.temperature, args.top_k,
                     args.seed)
    seconds = time.perf_counter() - start
    try:
        for tokens in texts:
            print(tokenizer.decode(tokens), end="\n---\n", flush=True)
    except OSError as error:  # a full disk, or a pipe that was closed, as by head
        drop(sys.stdout)  # what is not yet written
        fail(error)
    say(f"{1e3 * seconds / args.max_tokens:.2f} ms per token")


if __name__ == "__main__":
    main(ARGS)
