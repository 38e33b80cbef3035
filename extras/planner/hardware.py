"""Devices, links and models by name, with the sources of their figures. A program reaches only
fractions of a data sheet's figures. The fractions are fitted to published runs, which
`python -m extras.planner --published` prints.
"""

from dataclasses import dataclass, replace

from extras.planner.mixture import Mixture
from sizes import GPTConfig, LlamaConfig


@dataclass(frozen=True)
class Device:
    tflops: float  # dense 16-bit matrix products, 10^12 FLOPs per second
    gb: float  # memory, 10^9 bytes
    hbm: float  # bandwidth of that memory, 10^9 bytes per second
    nvlink: float  # to another device of the node, each way, 10^9 bytes per second
    network: float  # to another node, each way, for each device, 10^9 bytes per second
    node: int = 8  # devices of a node
    # Fraction of gb that a plan leaves free: CUDA, NCCL and fragmentation take 5% to 7%
    reserve: float = 0.07
    # Fractions of the figures above that programs reach. All are fitted but one: f_attention of
    # A100s is that of arXiv 2307.08691, figure 4. V100s take the A100s' value.
    # A matrix product takes FLOPs / (tflops f_products), plus the time in which it reads and writes
    # tensors, bytes / (hbm f_hbm)
    f_products: float = 0.81  # fraction of tflops, in matrix products
    f_attention: float = 0.6  # fraction of tflops, in a fused attention kernel
    f_hbm: float = 0.66  # fraction of hbm
    f_nvlink: float = 0.52  # fraction of nvlink, in a ring (each rank waits for the one before)
    f_network: float = 0.65  # fraction of network
    # A message beside compute slows the compute down, by this fraction of the message's own time
    unhidden: float = 0.27
    latency: float = 5e-6  # seconds until a message starts to flow (NCCL's tuning.cc)
    launch: float = 0.0  # seconds to launch a kernel, if not hidden by the one before

    @property
    def usable(self):
        """Memory that a plan may fill, 10^9 bytes."""
        return self.gb * (1 - self.reserve)


HOPPER = {"f_products": 0.78, "f_attention": 0.24}  # H100 and H200
# tflops, gb, hbm, nvlink: NVIDIA's data sheets; network: one port for each device of a node
DEVICES = {
    "v100": Device(125, 32, 900, 150, 12.5),  # SXM, NVLink 2, EDR InfiniBand
    "a100-40": Device(312, 40, 1555, 300, 25),  # SXM, NVLink 3, HDR
    "a100-80": Device(312, 80, 2039, 300, 25),  # SXM, NVLink 3, HDR
    "h100": Device(989, 80, 3350, 450, 50, **HOPPER),  # SXM, NVLink 4, NDR
    "h200": Device(989, 141, 4800, 450, 50, **HOPPER),  # SXM, NVLink 4, NDR
    "h800": Device(989, 80, 3350, 200, 50, **HOPPER),  # an H100 with 8 of its 18 NVLinks
    # Of these two no published run was checked. 4090: PCIe 4.0 in place of NVLink, and one port of
    # 100 Gb/s for a node; products add in 32 bits. MI300X: AMD's data sheet, Infinity Fabric, 400
    # Gb/s; public measurements of its products reach 45% of the peak
    "4090": Device(165, 24, 1008, 32, 1.5625),
    "mi300x": Device(1307, 192, 5300, 448, 50, f_products=0.45, f_attention=0.24),
}


# (words in the name that CUDA gives, name of the device, what differs): the first row counts whose
# words are all there. What differs is from the data sheets of cards that are slower than SXM
CARDS = (
    (("h200", "nvl"), "h200", {"tflops": 835}),
    (("h200",), "h200", {}),
    (("h100", "nvl"), "h100", {"tflops": 835, "gb": 94, "hbm": 3900}),
    (("h100", "pcie"), "h100", {"tflops": 756, "hbm": 2000}),
    (("h100",), "h100", {}),
    (("a100", "80gb", "pcie"), "a100-80", {"hbm": 1935}),
    (("a100", "80gb"), "a100-80", {}),
    (("a100",), "a100-40", {}),
    (("v100", "pcie"), "v100", {"tflops": 112}),
    (("v100",), "v100", {}))


def card(gpu):
    """(name in DEVICES, Device) of a GPU by the name that CUDA gives; ("", None) if unknown."""
    for words, name, different in CARDS:
        if all(word in gpu.lower() for word in words):
            return name, replace(DEVICES[name], **different)
    return "", None


def gpt(n_layer, n_head, n_embd, vocab_size=51200, block_size=2048):
    return GPTConfig(vocab_size, block_size, n_layer, n_head, n_embd)


def llama(n_layer, n_head, n_embd, n_hidden, n_kv_head, vocab_size=32000, block_size=4096, **rope):
    return LlamaConfig(vocab_size, block_size, n_layer, n_head, n_embd, n_kv_head=n_kv_head,
                       n_hidden=n_hidden, tied=False, **rope)


def mixture(n_layer, n_head, n_embd, n_kv_head, n_experts, top_k, width, vocab_size,
            block_size=4096, head_width=0, shared_width=0):
    """width: hidden units of an expert."""
    return Mixture(vocab_size, block_size, n_layer, n_head, n_embd, n_experts, top_k,
                   n_kv_head=n_kv_head, n_hidden=top_k * width, tied=False, rope_theta=1e6,
                   head_width=head_width, shared_width=shared_width)


MODELS = {  # gpt(layers, heads, width, ...), llama(layers, heads, width, MLP width, key heads, ...)
    # Radford et al. 2019, as released
    "gpt2": gpt(12, 12, 768, 50257, 1024), "gpt2-medium": gpt(24, 16, 1024, 50257, 1024),
    "gpt2-large": gpt(36, 20, 1280, 50257, 1024), "gpt2-xl": gpt(48, 25, 1600, 50257, 1024),
    # GPT-3, arXiv 2005.14165, table 2.1, with two corrections, because the heads' widths must add
    # up to the model's: 1.3B has 16 heads (there 24), 13B is 5120 wide (there 5140). The vocabulary
    # is padded like in arXiv 2104.04473
    "gpt3-1.3b": gpt(24, 16, 2048), "gpt3-2.7b": gpt(32, 32, 2560), "gpt3-6.7b": gpt(32, 32, 4096),
    "gpt3-13b": gpt(40, 40, 5120), "gpt3-175b": gpt(96, 96, 12288),
    # Megatron, arXiv 2104.04473, table 1
    "megatron-1.7b": gpt(24, 24, 2304), "megatron-3.6b": gpt(30, 32, 3072),
    "megatron-7.5b": gpt(36, 32, 4096), "megatron-18b": gpt(40, 48, 6144),
    "megatron-39b": gpt(48, 64, 8192), "megatron-76b": gpt(60, 80, 10240),
    "megatron-146b": gpt(80, 96, 12288), "megatron-310b": gpt(96, 128, 16384),
    "megatron-530b": gpt(105, 128, 20480), "megatron-1t": gpt(128, 160, 25600),
    "megatron-22b": gpt(48, 64, 6144),  # arXiv 2205.05198, table 3
    # Llama 2 and 3, arXiv 2307.09288, 2407.21783. (llama-7b to llama-70b are Llama 2)
    "llama-7b": llama(32, 32, 4096, 11008, 32), "llama-13b": llama(40, 40, 5120, 13824, 40),
    "llama-70b": llama(80, 64, 8192, 28672, 8),
    "llama3-8b": llama(32, 32, 4096, 14336, 8, 128256, 8192, rope_theta=500000.0),
    "llama3-70b": llama(80, 64, 8192, 28672, 8, 128256, 8192, rope_theta=500000.0),
    "llama-405b": llama(126, 128, 16384, 53248, 8, 128256, 8192, rope_theta=500000.0),
    # Mixtral, arXiv 2401.04088, and its successor's config.json. (Their sizes are all a Llama's)
    "mixtral-8x7b": llama(32, 32, 4096, 2 * 14336, 8, n_experts=8, rope_theta=1e6),
    "mixtral-8x22b": llama(56, 48, 6144, 2 * 16384, 8, 32768, n_experts=8, rope_theta=1e6),
    # Qwen3, arXiv 2505.09388, tables 1 and 2, and their config.json
    "qwen3-8b": llama(36, 32, 4096, 12288, 8, 151936, rope_theta=1e6),
    "qwen3-30b-a3b": mixture(48, 32, 2048, 4, 128, 8, 768, 151936, head_width=128),
    "qwen3-235b-a22b": mixture(94, 64, 4096, 4, 128, 8, 1536, 151936, head_width=128),
    # DeepSeek-V3, arXiv 2412.19437, section 4.2: a stand-in. Its latent attention has no form here:
    # heads of 96 have as many parameters. Its first three blocks are dense; here all have experts
    "deepseek-v3": mixture(61, 128, 7168, 8, 256, 8, 2048, 129280, head_width=96,
                           shared_width=2048),
}
