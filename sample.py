"""Text from the last complete checkpoint, on T ranks (--tp), whatever layout trained it.

Held by a rank: 1/T of the matrices, and 1/T of the cache: keys and values of the tokens so far,
which do not change when others follow. In all 2 L C / T numbers per token and sample, for L blocks
of width C (a Llama: n_kv/nh of that). Sent by a rank: 2 (T-1)/T (2 L + 1) C numbers for each token
that enters the model, and (T-1)/T V, its logits, for each new one.

Only tensor ranks make one sample faster, and only on fast links: a new token costs a read of all
weights, of which each of T ranks reads 1/T. Data ranks sample for other users. A pipeline rank has
1/P of the layers, but a token passes them one by one. ZeRO would send all weights for each token.

    python sample.py --prompt "def " --out out --samples 3
"""

import sys

if getattr(sys.flags, "safe_path", False):  # under PYTHONSAFEPATH Python leaves this folder out
    sys.path.insert(0, __file__.rpartition("/")[0] or ".")

from run.config import Parser
from run.launch import start_ranks
from run.signals import end_quietly


def sample_flags():
    parser = Parser("Text from a checkpoint.")
    parser.add_argument("--prompt", default="def ", help="the text to go on from (def )")
    parser.add_argument("--out", default="out", help="a run's folder, or one checkpoint's (out)")
    parser.add_argument("--data", help="folder of the tokenizer (the one of the training data)")
    parser.add_argument("--tp", type=int, default=1,
                        help="tensor-parallel ranks, which split each matrix (1)")
    parser.add_argument("--samples", type=int, default=1, help="number of continuations (1)")
    parser.add_argument("--max-tokens", type=int, default=200, help="length of each (200)")
    parser.add_argument("--temperature", type=float, default=0.8, help="0: the likeliest (0.8)")
    parser.add_argument("--top-k", type=int, default=50,
                        help="draw from the K likeliest tokens; 0: from all (50)")
    parser.add_argument("--seed", type=int, default=1337, help="decides all draws (1337)")
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"), help="(cpu)")
    return parser


def read_flags():
    """The flags of this command line; a wrong one ends the process with one line."""
    parser = sample_flags()
    args = parser.parse_args()
    for name, least, most in (("tp", 1, 64), ("samples", 1, 1000), ("max_tokens", 1, 10**6),
                              ("temperature", 0, 1e308), ("top_k", 0, 2**31)):
        value = getattr(args, name)
        if not least <= value <= most:
            parser.error(f"--{name.replace('_', '-')} {value} must be from {least} to {most:g}")
    if not 0 <= args.seed < 2**63:
        parser.error(f"--seed {args.seed} must be at least 0, and below 2^63")
    if args.tp > 1 and args.device == "cuda":
        parser.error(f"--tp {args.tp}: tensor ranks sample on CPUs; leave out --device cuda")
    return args


# A wrong flag ends the process here, without torch. With --tp this process starts the ranks, waits
# for them, and exits, unless it is a rank itself
if __name__ == "__main__":
    end_quietly()
    start_ranks(read_flags().tp)

import time
from pathlib import Path

import torch
import torch.nn as nn

from collectives import all_gather
from data.batches import load_tokenizer
from ddp import give_values
from experts import kind_of
from mesh import Mesh
from model import causal_attention
from run import checkpoint
from run.config import Config
from run.processes import all_gather_text, joined
from run.signals import in_words, note
from run.tensorfile import CheckpointError
from run.weights import MODEL, load_model, read_weights, refuse_sizes
from shard import tag_whole
from sizes import config_from
from tensor_parallel import tensor_parallel

# ---- the model, split over T ranks ----


class WholeLogits(nn.Module):
    """Replaces the head of a tensor-parallel model, for a few positions: gathers the logits, of
    which each rank has computed those of its own words."""

    def __init__(self, head, group, vocab_size):
        super().__init__()
        self.head = head
        self.group = group
        words = torch.arange(vocab_size, device="cpu")
        self.counts = [len(part) for part in words.tensor_split(group.size)]  # of each rank

    def forward(self, x):  # (B, S, C) -> (B, S, V)
        own = self.head(x)  # (B, S, V/T)
        # T need not divide V, but all_gather takes equal chunks: leave room for the largest part
        parts = own.new_empty(self.group.size, *x.shape[:2], max(self.counts))
        parts[self.group.rank, ..., : own.size(-1)] = own
        all_gather(parts, self.group)
        return torch.cat([part[..., :n] for part, n in zip(parts, self.counts, strict=True)], -1)


def split_model(model, mesh):
    """Split a whole model over the mesh's tensor ranks, in place. Each parameter is then tagged as
    this rank's slice (shard.py); the logits are whole on every rank. One rank's model stays as it
    is, but for the tags."""
    group = mesh.group("tp")
    tag_whole(model, mesh.group("dp"))
    if group.size > 1:
        tensor_parallel(model, group)
        model.layers[-1] = WholeLogits(model.layers[-1], group, model.config.vocab_size)


def load_slices(folder, mesh):
    """Collective: the model of a checkpoint in float32, split over the mesh's tensor ranks. A rank
    reads one whole tensor after the other, and keeps its slice. CheckpointError on all ranks if the
    file is damaged or not finite, ValueError if T does not divide the heads."""
    path = Path(folder, MODEL)
    with checkpoint.together(mesh.world):
        config = config_from(checkpoint.read_manifest(folder)["model"])
        refuse_sizes(path, config)
        with torch.device("meta"):  # shapes without memory
            model = kind_of(config)(config)
        shapes = {name: param.shape for name, param in model.canonical_parameters()}
        whole = read_weights(path, shapes, config)
    split_model(model, mesh)
    with checkpoint.together(mesh.world):
        for param in model.parameters():
            values = param.tag.slice(whole(param.tag.name)).to(
                torch.float32, copy=True, memory_format=torch.contiguous_format)
            if not values.isfinite().all():
                raise CheckpointError(f"{folder}: {param.tag.name} is not finite; take an earlier "
                                      "checkpoint")
            give_values(param, values)
    return model


# ---- one token after the other ----


class CachedAttention:
    """Replaces Attention.attend in one layer: keeps the keys and values of the tokens so far. The
    first call has all tokens so far, each later call has one token."""

    def __init__(self):
        # (B, nh, tokens so far, hs), or nh/T heads; a Llama's have n_kv heads
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
    # in float64, with the largest logit at 0: no overflow however small the temperature
    weights = ((top - top[:, :1]).double() / temperature).softmax(1)
    return tokens.gather(1, torch.multinomial(weights, 1, generator=rng))


def next_logits(model, tokens, positions):
    """(samples, V): logits of the token that follows `tokens` (samples, n), which stand at these
    positions of the window (n,)."""
    for module in model.positioned():  # GPT-2's embedding, or a Llama's attentions
        module.positions = lambda x: positions
    *layers, head = model.layers
    x = tokens
    for layer in layers:
        x = layer(x)
    return head(x[:, -1:]).squeeze(1)


@torch.no_grad()
def generate(model, ids, n, samples=1, temperature=0.8, top_k=50, seed=1337):
    """`samples` continuations of the list `ids` by n tokens each: lists that begin with `ids`. For
    temperature and top_k see pick_tokens. T ranks that share a model (split_model) call this
    together, and draw the same tokens: they have the same logits, bit for bit, and the same seed.

    The model sees the last block_size tokens, the window. Positions count from the window's
    beginning: once it is full, each new token shifts all others by one position, so all keys and
    values change (in a Llama nearly all), and each further token is computed from the whole
    window."""
    embedding, *blocks, _ = model.layers
    window = model.config.block_size
    out = torch.tensor([ids] * samples, device=embedding.wte.weight.device)  # (samples, tokens)
    rng = torch.Generator(out.device).manual_seed(seed)
    for i in range(n):
        length = out.size(1)
        if i == 0 or length > window:  # no cache yet, or all positions have changed
            for block in blocks:
                block.attn.attend = CachedAttention()
            tokens = out[:, -window:]
            positions = torch.arange(tokens.size(1), device=out.device)
        else:  # the caches have all tokens but the last
            tokens = out[:, -1:]
            positions = torch.tensor([length - 1], device=out.device)
        logits = next_logits(model, tokens, positions)
        out = torch.cat([out, pick_tokens(logits, temperature, top_k, rng)], dim=1)
    # Remove what replaced the model's own methods
    for module in model.positioned():
        vars(module).pop("positions", None)
    for block in blocks:
        vars(block.attn).pop("attend", None)
    return out.tolist()


def sample_text(folder, data):
    """Continue the validation text with the checkpoint just saved: the whole model, in float32, in
    this process. If that fails, return the reason: no run fails because of its sample."""
    try:
        model = load_model(folder)
        ids, = generate(model, data.val[:16].tolist(), n=96)
        text = load_tokenizer(data.folder).decode(ids)
    except (ValueError, OSError, RuntimeError) as error:  # no tokenizer, logits of nan, ...
        text = f"(none: {error})"
    return "\n".join("  | " + line for line in text.splitlines())


def read_all(args, mesh):
    """Collective: (model, tokenizer, token ids of the prompt) of these flags. CheckpointError if
    one of them cannot be."""
    def read(folder):
        # Rank 0's: a run may have saved another one since
        folder = all_gather_text(str(folder), mesh.world)[0]
        return load_slices(folder, mesh), checkpoint.read_manifest(folder)["data"]

    try:
        if args.device == "cuda" and not torch.cuda.is_available():
            raise ValueError("--device cuda: no GPU here; use --device cpu")
        model, data = checkpoint.read_newest(args.out, read)
        tokenizer = load_tokenizer(args.data or data)
        if tokenizer.n_vocab != model.config.vocab_size:
            raise ValueError(f"the tokenizer has {tokenizer.n_vocab} tokens, the model "
                             f"{model.config.vocab_size}; --data names the training data's folder")
        ids = tokenizer.encode_ordinary(args.prompt)
        if not ids:
            raise ValueError("--prompt '' must not be empty")
    except (ValueError, OSError) as error:
        raise CheckpointError(in_words(error)) from None
    return model.to(args.device), tokenizer, ids


def main():
    args = read_flags()
    with joined(Config(dp=1, tp=args.tp, device="cpu"), args.tp):
        mesh = Mesh(tp=args.tp)
        model, tokenizer, ids = read_all(args, mesh)
        start = time.perf_counter()
        texts = generate(model, ids, args.max_tokens, args.samples, args.temperature,
                         args.top_k, args.seed)
        seconds = time.perf_counter() - start
    if mesh.rank == 0:
        for tokens in texts:
            print(tokenizer.decode(tokens), end="\n---\n", flush=True)
        sent = mesh.group("tp").bytes_sent
        note(f"{args.tp} rank{'s' * (args.tp > 1)}: {1e3 * seconds / args.max_tokens:.2f} ms and "
             f"{sent / args.max_tokens:,.0f} bytes sent by each, per token")


if __name__ == "__main__":
    main()
