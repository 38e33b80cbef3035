"""Text from the last complete checkpoint, on one process, whatever layout trained it.

A token's key and value do not change when others follow, so they are kept: 2 L C numbers per token
and sample; a new token costs one row of attention and 2 Psi FLOPs. Positions are absolute: once the
window is full all of them shift, and each further token is computed from the whole window anew.

    python sample.py --prompt "def " --out out --samples 3
"""

import argparse
import sys

import torch
import torch.nn.functional as F

from data.batches import load_tokenizer
from run import checkpoint
from run.signals import end_quietly
from run.weights import load_model


class CachedAttention:
    """Attention.attend of one layer while it generates: keeps the keys and values of the
    tokens so far. Either there are none yet or one token follows: no mask but the causal one."""

    def __init__(self):
        self.keys = self.values = None  # (B, nh, tokens so far, hs)

    def __call__(self, q, k, v):
        if self.keys is not None:
            k, v = torch.cat([self.keys, k], dim=2), torch.cat([self.values, v], dim=2)
        self.keys, self.values = k, v
        return F.scaled_dot_product_attention(q, k, v, is_causal=q.size(2) > 1)


@torch.no_grad()
def generate(model, ids, n, samples=1, temperature=0.8, top_k=50, seed=1337):
    """`samples` continuations of the list `ids` by n tokens each, as lists that begin with it.
    Temperature 0 takes the likeliest token; top_k 0 draws from all."""
    embedding, *blocks, head = model.layers
    window, V = model.config.block_size, model.config.vocab_size
    out = torch.tensor([ids] * samples, device=embedding.wte.weight.device)
    rng = torch.Generator(out.device).manual_seed(seed)
    for i in range(n):
        anew = i == 0 or out.size(1) > window  # or else the caches have all but the last token
        start = 0 if anew else out.size(1) - 1
        positions = torch.arange(start, min(out.size(1), window), device=out.device)
        embedding.positions = lambda idx, positions=positions: positions
        x = embedding(out[:, -window:][:, start:])
        for block in blocks:
            if anew:
                block.attn.attend = CachedAttention()
            x = block(x)
        logits = head(x[:, -1:]).squeeze(1)  # (samples, V)
        top, index = logits.topk(min(top_k or V, V))  # sorted
        pick = torch.zeros_like(index[:, :1])
        if temperature:
            weights = ((top - top[:, :1]).double() / temperature).softmax(1)  # 1e-300, too
            pick = torch.multinomial(weights, 1, generator=rng)
        out = torch.cat([out, index.gather(1, pick)], dim=1)
    del embedding.positions  # the model's own methods again
    for block in blocks:
        del block.attn.attend
    return out.tolist()


def sample_text(folder, data):
    """A continuation of the validation text, by the checkpoint just saved: the whole model, in
    float32, in this process. No run fails because of its sample."""
    try:
        model = load_model(folder)
        ids, = generate(model, data.val[:16].tolist(), 96)
        text = load_tokenizer(data.folder).decode(ids)
    except (ValueError, OSError, RuntimeError) as error:  # no tokenizer, logits of nan, ...
        text = f"(none: {error})"
    return "\n".join("  | " + line for line in text.splitlines())


def main():
    parser = argparse.ArgumentParser(description="Text from a checkpoint.")
    parser.error = lambda message: parser.exit(2, f"sample.py: {message}\n")
    parser.add_argument("--prompt", default="def ", help="the text to go on from (def )")
    parser.add_argument("--out", default="out", help="a run's folder, or one checkpoint's (out)")
    parser.add_argument("--data", help="folder of the tokenizer (the one of the training data)")
    parser.add_argument("--samples", type=int, default=1, help="number of continuations (1)")
    parser.add_argument("--max-tokens", type=int, default=200, help="length of each (200)")
    parser.add_argument("--temperature", type=float, default=0.8, help="0: the likeliest (0.8)")
    parser.add_argument("--top-k", type=int, default=50, help="draw from so many; 0: all (50)")
    parser.add_argument("--seed", type=int, default=1337, help="of the draws (1337)")
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"), help="(cpu)")
    args = parser.parse_args()
    try:
        for name, least, most in (("samples", 1, 1000), ("max_tokens", 1, 10**6),
                                  ("temperature", 0, 1e308), ("top_k", 0, 2**31)):
            value = getattr(args, name)
            if not least <= value <= most:
                raise ValueError(f"--{name.replace('_', '-')} {value} must be from {least} to "
                                 f"{most:g}")
        if not 0 <= args.seed < 2**63:
            raise ValueError(f"--seed {args.seed} must be at least 0, and below 2^63")
        if args.device == "cuda" and not torch.cuda.is_available():
            raise ValueError("--device cuda: no GPU here; use --device cpu")
        folder = checkpoint.find(args.out)
        model = load_model(folder, args.device)
        tokenizer = load_tokenizer(args.data or checkpoint.read_manifest(folder)["data"])
        if tokenizer.n_vocab != model.config.vocab_size:
            raise ValueError(f"the tokenizer has {tokenizer.n_vocab} tokens, the model "
                             f"{model.config.vocab_size}; --data names the training data's folder")
        ids = tokenizer.encode_ordinary(args.prompt)
        if not ids:
            raise ValueError("--prompt '' must not be empty")
    except (ValueError, OSError) as error:
        parser.exit(2, f"sample.py: {error}\n")
    sys.stdout.reconfigure(errors="replace")  # whatever the terminal can show
    for tokens in generate(model, ids, args.max_tokens, args.samples, args.temperature,
                           args.top_k, args.seed):
        print(tokenizer.decode(tokens), end="\n---\n", flush=True)


if __name__ == "__main__":
    end_quietly()
    main()
