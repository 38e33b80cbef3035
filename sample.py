"""Text from the last complete checkpoint, on one process, whatever layout trained it.

The key and value of a token do not change when others follow, so they are kept: 2 L C numbers per
token and sample. A new token then costs one row of attention and 2 N FLOPs, not the whole window.
Positions are learned and absolute: once the window is full all of them shift, nothing can be kept,
and each further token is computed from the last --block-size tokens anew.

    python sample.py --prompt "def " --out out --samples 3
"""

import argparse
import math
import signal
import sys

import torch
import torch.nn.functional as F

import checkpoint
from data.prepare import load_tokenizer
from model import GPT, GPTConfig, canonical_name


def load(folder, device="cpu"):
    """The whole model of a checkpoint, in float32. CheckpointError."""
    config = GPTConfig(**checkpoint.read_manifest(folder)["model"])
    with torch.device("meta"):
        model = GPT(config)
    names = {name: canonical_name(name, config.n_layer) for name, _ in model.named_parameters()}
    shapes = {names[name]: param.shape for name, param in model.named_parameters()}
    get = checkpoint.read_weights(folder / checkpoint.MODEL, shapes, config)
    model.to_empty(device=device)
    model.layers[-1].lm_head.weight = model.layers[0].wte.weight
    for name, param in model.named_parameters():
        param.data.copy_(get(names[name]))
    return model


def attend(attn, x, cache):
    """model.Attention's forward for the tokens after those in `cache` = [keys, values], which
    grows. Either the cache is empty or there is one token: no mask but the causal one is needed."""
    B, T, _ = x.size()
    q, k, v = (t.view(B, T, -1, attn.head_dim).transpose(1, 2)
               for t in attn.c_attn(x).chunk(3, dim=-1))  # (B, nh, T, hs) each
    cache[:] = [torch.cat([past, new], dim=2) for past, new in zip(cache or (k[:, :, :0],) * 2,
                                                                  (k, v), strict=True)]
    y = F.scaled_dot_product_attention(q, *cache, is_causal=T > 1)
    return attn.c_proj(y.transpose(1, 2).reshape(B, T, -1))


def forward(model, idx, caches):
    """(B, T) token ids that follow what the caches hold, a list for each block -> (B, V) logits
    after the last one."""
    embedding, *blocks, head = model.layers
    start = caches[0][0].size(2) if caches[0] else 0
    x = embedding.wte(idx) + embedding.wpe.weight[start : start + idx.size(1)]
    for block, cache in zip(blocks, caches, strict=True):
        x = x + attend(block.attn, block.ln_1(x), cache)
        x = x + block.mlp(block.ln_2(x))
    return head(x[:, -1:]).squeeze(1)


@torch.no_grad()
def generate(model, ids, n, samples=1, temperature=0.8, top_k=50, seed=1337):
    """`samples` continuations of the list `ids` by n tokens each, as lists that begin with it.
    Temperature 0 takes the likeliest token; top_k 0 draws from all."""
    device = next(model.parameters()).device
    rng = torch.Generator(device).manual_seed(seed)
    out = torch.tensor([ids] * samples, device=device)
    block, caches = model.config.block_size, None
    for _ in range(n):
        if caches is None or out.size(1) > block:  # all that the window holds, anew
            caches = [[] for _ in range(model.config.n_layer)]
            logits = forward(model, out[:, -block:], caches)
        else:
            logits = forward(model, out[:, -1:], caches)
        top, index = logits.topk(min(top_k or logits.size(1), logits.size(1)))  # sorted
        pick = torch.zeros_like(index[:, :1])
        if temperature:
            pick = torch.multinomial((top / temperature).softmax(1), 1, generator=rng)
        out = torch.cat([out, index.gather(1, pick)], dim=1)
    return out.tolist()


def main():
    parser = argparse.ArgumentParser(description="Text from a checkpoint.")
    parser.add_argument("--prompt", default="def ", help="the text to go on from (def )")
    parser.add_argument("--out", default="out", help="a run's folder, or one checkpoint's (out)")
    parser.add_argument("--data", help="folder of the tokenizer (the one of the training data)")
    parser.add_argument("--samples", type=int, default=1, help="number of continuations (1)")
    parser.add_argument("--max-tokens", type=int, default=200, help="length of each (200)")
    parser.add_argument("--temperature", type=float, default=0.8, help="0: the likeliest (0.8)")
    parser.add_argument("--top-k", type=int, default=50, help="draw from so many; 0: all (50)")
    parser.add_argument("--seed", type=int, default=1337, help="of the draws (1337)")
    parser.add_argument("--device", default="cpu", help="cpu or cuda (cpu)")
    args = parser.parse_args()
    try:
        for name, least in (("samples", 1), ("max_tokens", 1), ("temperature", 0), ("top_k", 0)):
            if not least <= getattr(args, name) < math.inf:
                raise ValueError(f"--{name.replace('_', '-')} {getattr(args, name)} must be at "
                                 f"least {least}")
        folder = checkpoint.find(args.out)
        model = load(folder, args.device)
        tokenizer = load_tokenizer(args.data or checkpoint.read_manifest(folder)["data"])
        if tokenizer.n_vocab != model.config.vocab_size:
            raise ValueError(f"the tokenizer has {tokenizer.n_vocab} tokens, the model "
                             f"{model.config.vocab_size}; --data names the training data's folder")
        ids = tokenizer.encode_ordinary(args.prompt)
        if not ids:
            raise ValueError("--prompt '' must not be empty")
    except ValueError as error:
        sys.exit(print(f"sample.py: {error}", file=sys.stderr) or 2)
    if hasattr(signal, "SIGPIPE"):
        signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # `| head` ends it without a traceback
    for tokens in generate(model, ids, args.max_tokens, args.samples, args.temperature,
                           args.top_k, args.seed):
        print(tokenizer.decode(tokens), end="\n---\n", flush=True)


if __name__ == "__main__":
    main()
