"""What a step of GPT-2 should take on a GPU, by arithmetic: 16 x 1024 tokens in bfloat16, one GPU.

    python -m extras.bench.expected "NVIDIA H200"        the card's name, as CUDA gives it

The fractions of the data sheet are those that the planner fitted to published runs
(extras/planner/hardware.py); the kernels and bytes of a step are counted on meta tensors
(tests/counts.py).
"""

import sys

from extras.planner.hardware import DEVICES, card
from extras.planner.published import ATTENTION as ATTENTION_SPEED
from run.signals import end_quietly
from sizes import GPTConfig
from tests.counts import GPT2, PRODUCTS, count_step
from tests.first_gpu import N_PARAMETERS

ATTENTION = ("_scaled_dot_product_flash_attention", "_scaled_dot_product_flash_attention_backward")
GAP = 1.5e-6  # seconds from the end of a kernel to the full speed of the next kernel; assumed


def expectation(name, device):
    """[(part, milliseconds without --compile, milliseconds with it, their arithmetic)] of a step of
    GPT-2 on a Device of the planner. name: the device's in DEVICES."""
    # Of what --compile saves only the loss is counted. --compile also joins residual sums with
    # LayerNorms, which is not counted: so it should save more than this
    plain, compiled = count_step(), count_step(fused_loss=True)
    tokens = GPT2["batch_size"] * GPT2["block_size"]
    products = 6 * N_PARAMETERS * tokens
    causal = 6 * GPT2["n_layer"] * GPT2["n_embd"] * GPT2["block_size"] * tokens  # half of all pairs
    f_attention = device.f_attention  # FlashAttention-2's share of the peak
    if name in ("h100", "h200"):  # there torch takes cuDNN's kernel, as fast as FlashAttention-3
        f_attention *= ATTENTION_SPEED["fa3"]
    speed = device.tflops * 1e12

    def per_step(flops, share):
        ms = 1e3 * flops / (speed * share)
        return ms, ms  # --compile makes neither products nor attention faster

    others = [counting.gigabytes(but=(*PRODUCTS, *ATTENTION)) for counting in (plain, compiled)]
    kernels = [counting.num_kernels for counting in (plain, compiled)]
    return [
        ("products", *per_step(products, device.f_products),
         f"{products / 1e12:.1f} TFLOP at {device.f_products:.0%} of {device.tflops} TFLOP/s"),
        ("attention", *per_step(causal, f_attention),
         f"{causal / 1e12:.1f} TFLOP, the visible half, at {f_attention:.0%}"),
        ("all else", *(1e3 * gigabytes / (device.hbm * device.f_hbm) for gigabytes in others),
         "{:.0f} and {:.0f} GB".format(*others)
         + f" at {device.f_hbm:.0%} of {device.hbm} GB/s"),
        ("between", *(1e3 * GAP * n for n in kernels),
         "{} and {} kernels".format(*kernels) + f", {GAP * 1e6:.1f} us from one to the next"),
    ]


def expected(gpu):
    """The lines of the arithmetic, for the card of this name or, if the planner does not know it,
    for an H200."""
    name, device = card(gpu)
    if not device:
        name, device = "h200", DEVICES["h200"]
    tokens = GPT2["batch_size"] * GPT2["block_size"]
    parts = expectation(name, device)
    plain = sum(ms for _, ms, _, _ in parts)
    compiled = sum(ms for _, _, ms, _ in parts)
    flops = GPTConfig().flops_per_token(N_PARAMETERS) * tokens
    least = 1e3 * flops / (device.tflops * 1e12)
    rates = f"{tokens / plain * 1e3:,.0f} and {tokens / compiled * 1e3:,.0f} tokens/s"
    rows = [*parts, ("together", plain, compiled, rates),
            ("at the peak", least, least,
             f"{flops / 1e12:.1f} TFLOP: 6 Psi + 12 L C S per token, the count of train.py's MFU")]
    lines = [f"{'ms':12}{'without':>8}{'--compile':>11}"]
    lines += [f"{what:12}{ms:8.1f}{with_it:11.1f}   {how}" for what, ms, with_it, how in rows]
    lines += [f"{'so MFU':12}{least / plain:8.0%}{least / compiled:11.0%}   on {name}, if no "
              "kernel waits for the host"]
    return lines


if __name__ == "__main__":
    end_quietly()
    print(*expected(" ".join(sys.argv[1:])), sep="\n")
