"""A Llama whose sizes train.py has no flags for: the published mixtures of experts, and Llamas with
wider heads. The planner has flags for them; its answer is of use for other programs (--for)."""

from dataclasses import dataclass

from sizes import LlamaConfig


@dataclass(frozen=True)
class Mixture(LlamaConfig):
    """n_hidden is the width inside the MLP; with experts it is top_k times an expert's, like in a
    LlamaConfig."""
    head_width: int = 0  # width of a head of queries, keys or values; 0: n_embd / n_head
    shared_width: int = 0  # hidden units of an MLP beside the experts, for all tokens
    # Do the tensor ranks split each expert? Else each expert is whole on one of E x T ranks
    split_experts: bool = False

    @property
    def query_width(self):
        """Width of a token's queries, all heads together."""
        return self.n_head * (self.head_width or self.n_embd // self.n_head)

    @property
    def kv_width(self):
        return self.query_width // self.n_head * self.n_kv_head

    def block_weights(self):
        h = self.n_embd
        attention = 2 * h * (self.query_width + self.kv_width)
        return attention + 3 * h * (self.n_hidden + self.shared_width)


def splits_experts(model):
    """Do the tensor ranks split each expert?"""
    return isinstance(model, Mixture) and model.split_experts
