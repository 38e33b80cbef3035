"""Sizes of a model and bytes per parameter. No torch here: what only counts starts at once."""

from dataclasses import dataclass


@dataclass(frozen=True)
class GPTConfig:
    vocab_size: int = 50257
    block_size: int = 1024
    n_layer: int = 12
    n_head: int = 12
    n_embd: int = 768
    n_experts: int = 0  # 0: an MLP in each block
    top_k: int = 2  # of the experts, that each token goes through

    def layer_costs(self):
        """Forward FLOPs per token of each layer in the list, by which stages are cut."""
        C = self.n_embd
        block = 24 * C * C + 4 * C * self.block_size + 2 * C * self.n_experts
        return [0, *[block] * self.n_layer, 2 * C * self.vocab_size]

    def flops_per_token(self, n_params):
        """Forward and backward, as nanoGPT and PaLM (arXiv 2204.02311, appendix B) count them; of
        experts, those that a token goes through."""
        H = 4 * self.n_embd // self.top_k
        idle = max(0, self.n_experts - self.top_k) * (2 * self.n_embd * H + H + self.n_embd)
        active = n_params - self.n_layer * idle
        return 6 * active + 12 * self.n_layer * self.n_embd * self.block_size


def bytes_per_parameter(zero, ranks, width=2, grad_width=None):
    """(weights, gradients, optimizer) bytes that a rank holds per parameter. 16-bit training keeps
    an fp32 master, exp_avg and exp_avg_sq: 12; wider weights are their own master. grad_width: 4
    if 16-bit training keeps its gradients in 32 (--grad-dtype), which makes 18 of 16."""
    adam = 12 if width == 2 else 2 * width
    # bytes, and the stage from which on they are split
    parts = ((width, 3), (grad_width or width, 2), (adam, 1))
    return tuple(part / (ranks if zero >= stage else 1) for part, stage in parts)
