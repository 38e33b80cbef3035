"""Sizes of a model, FLOPs, bytes per parameter. Imports no torch.

    python -m extras.show sizes 7e9
"""

from dataclasses import dataclass, fields

ITEMSIZES = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2}  # bytes of an element

# (words in the name that CUDA gives, 10^12 FLOPs per second of dense 16-bit products: NVIDIA's data
# sheets). Take the first row whose words all occur
TFLOPS = ((("h200", "nvl"), 835), (("h200",), 989), (("h100", "nvl"), 835), (("h100", "pcie"), 756),
          (("h100",), 989), (("a100",), 312), (("v100", "pcie"), 112), (("v100",), 125))


@dataclass(frozen=True)
class GPTConfig:
    """A GPT-2 (model.py)."""
    vocab_size: int = 50257
    block_size: int = 1024  # tokens in a sequence
    n_layer: int = 12
    n_head: int = 12
    n_embd: int = 768
    n_experts: int = 0  # experts in each block; 0 means an MLP in each block
    top_k: int = 2  # experts per token

    @property
    def arch(self):
        """The value of --arch."""
        return "gpt2"

    @property
    def query_width(self):
        """Width of a token's queries, all heads together."""
        return self.n_embd

    def layer_costs(self):
        """Forward FLOPs per token of each layer: [embedding, block, ..., block, head].
        schedules.cut balances the pipeline stages by these costs."""
        C = self.n_embd
        matrices = 2 * self.block_weights()  # 2 FLOPs for each weight
        attention = 4 * self.query_width * self.block_size  # scores and values, masked ones too
        router = 2 * C * self.n_experts
        block = matrices + attention + router
        head = 2 * C * self.vocab_size
        return [0, *[block] * self.n_layer, head]

    def block_weights(self):
        """Elements of the matrices of a block that a token runs through. Experts do not change
        this number: a token runs through top_k of them, each 1/top_k as wide as the MLP."""
        return 12 * self.n_embd**2

    def expert_parameters(self):
        """Parameters of an expert: two matrices and two biases."""
        C = self.n_embd
        hidden = 4 * C // self.top_k
        return 2 * C * hidden + hidden + C

    def flops_per_token(self, n_params):
        """Forward and backward FLOPs, counted as in PaLM (arXiv 2204.02311, appendix B). Only the k
        experts that a token runs through count."""
        # Parameters of a block that a token skips. max: without experts it skips none
        unused = max(0, self.n_experts - self.top_k) * self.expert_parameters()
        active = n_params - self.n_layer * unused
        return 6 * active + 12 * self.n_layer * self.query_width * self.block_size


@dataclass(frozen=True)
class LlamaConfig(GPTConfig):
    """A Llama or a Qwen (llama.py)."""
    n_kv_head: int = 12  # heads of keys and values; n_head / n_kv_head heads of queries share one
    n_hidden: int = 2048  # hidden units of the MLP
    rope_theta: float = 10000.0  # the base of the rotary frequencies
    rope_scaling: str = ""  # "factor" or "factor,low,high,original": see llama.stretch
    norm_eps: float = 1e-5
    tied: bool = True  # are lm_head and the embedding one matrix?
    head_dim: int = 0  # width of a head; 0: n_embd / n_head (hs, below, is never 0)
    qkv_bias: bool = False  # has c_attn biases? (Qwen2)
    qk_norm: bool = False  # is each head's query and key normalized? (Qwen3)

    @property
    def arch(self):
        return "qwen3" if self.qk_norm else "qwen2" if self.qkv_bias else "llama"

    @property
    def hs(self):
        """Width of a head."""
        return self.head_dim or self.n_embd // self.n_head

    @property
    def query_width(self):
        return self.hs * self.n_head

    @property
    def kv_width(self):
        """Width of a token's keys, all heads together; its values are as wide."""
        return self.hs * self.n_kv_head

    def block_weights(self):
        return self.n_embd * (2 * self.query_width + 2 * self.kv_width + 3 * self.n_hidden)

    def expert_parameters(self):
        """Parameters of an expert: three matrices."""
        return 3 * self.n_embd * (self.n_hidden // self.top_k)


def config_of(cfg, vocab_size):
    """The GPTConfig or LlamaConfig that a Config (run/flags.py) describes."""
    config_class = GPTConfig if cfg.arch == "gpt2" else LlamaConfig
    given = {f.name: getattr(cfg, f.name) for f in fields(config_class) if hasattr(cfg, f.name)}
    given["vocab_size"] = vocab_size
    if cfg.experts:
        given["n_experts"] = cfg.experts
    else:
        given.pop("top_k")  # without effect here: keep the default, so equal models compare equal
    if config_class is LlamaConfig:
        given.update(tied=not cfg.untied, qkv_bias=cfg.arch == "qwen2",
                     qk_norm=cfg.arch == "qwen3")
    return config_class(**given)


def config_from(values):
    """The GPTConfig or LlamaConfig with these {name: value}, from a checkpoint's manifest."""
    return (LlamaConfig if "n_kv_head" in values else GPTConfig)(**values)


def peak_flops(gpu):
    """FLOPs per second of a GPU in 16 bits, by the name that CUDA gives; 0.0 if unknown."""
    for words, tflops in TFLOPS:
        if all(word in gpu.lower() for word in words):
            return 1e12 * tflops
    return 0.0


def bytes_per_parameter(zero, ranks, itemsize=2):
    """(weights, gradients, optimizer) bytes per parameter on a rank under ZeRO stage `zero`
    (zero.py): 1 splits the optimizer states over `ranks`, 2 also the gradients, 3 the weights.

    itemsize: bytes of a weight and of a gradient. 16-bit training (itemsize 2) keeps 32-bit master
    weights, 4 bytes, and AdamW's two moments, 8: 2 + 2 + 12 = 16. Wider weights are their own
    master: itemsize 4 takes 4 + 4 + 8 = 16."""
    weights = itemsize / (ranks if zero >= 3 else 1)
    gradients = itemsize / (ranks if zero >= 2 else 1)
    optimizer = (12 if itemsize == 2 else 2 * itemsize) / (ranks if zero >= 1 else 1)
    return weights, gradients, optimizer
