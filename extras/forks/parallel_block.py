"""A block whose attention and MLP run side by side: GPT-J's, and PaLM's (arXiv 2204.02311).

    x = x + attention(ln_1(x)) + MLP(ln_1(x))        usual: x = x + attention(ln_1(x))
                                                            x = x + MLP(ln_2(x))

What the fork shows: a block of another form needs no parallel code (tags, hooks and messages are
those of its layers), but with a few lines it sends less. Under --tp both columns read the same
ln_1(x), and both rows' partial sums are added up anyway: so ln_1(x) enters the region once, and the
sum leaves the region once. A trap: the rows' biases must be added after the sum has left the
region, or they count T times.

Sent per block and microbatch: 2 all-reduces in place of 4; under --sp 2 gathers and 2 scatters in
place of 6 and 4. (There a usual column keeps 1/T of its input, and gathers again in backward; here
the whole ln_1(x), B S C elements, is kept.) It needs the engine's tensor parallelism. Left out:
experts, dropout.

    git apply extras/forks/parallel_block.patch && torchrun train.py --tp 2 --parallel-block
"""

from torch import nn

from engine.sequence_parallel import Region, enter_region, leave_region
from model import Block


class ParallelBlock(Block):
    """Made of the parts of a usual block."""

    def __init__(self, block):
        nn.Module.__init__(self)
        self.ln_1 = block.ln_1
        self.attn = block.attn
        self.mlp = block.mlp
        self.region = None  # Region of the T ranks, which the block enters and leaves once
        self.biases = nn.ParameterList()  # those of the rows, to be added after leaving

    def forward(self, x):  # (B, S, C), under --sp (B, S/T, C)
        inputs = self.ln_1(x)
        if self.region:
            inputs = enter_region(inputs, self.region)  # (B, S, C), under --sp (T B, S/T, C)
        y = self.attn(inputs) + self.mlp(inputs)  # the same shape, partial over tp
        if self.region:
            y = leave_region(y, self.region)  # (B, S, C), under --sp (B, S/T, C)
        for bias in self.biases:
            y = y + bias
        return x + y


class Inside(Region):
    """The region of columns and rows whose block has entered a region already: no messages.
    (Attention's two layers still sort the tokens, which come rank by rank.)"""

    def start_enter(self, x, async_op=True):
        return lambda: x

    start_leave = start_enter


def make_parallel(model):
    """Replace the blocks of a whole model."""
    for i, block in enumerate(model.layers[1:-1], start=1):
        model.layers[i] = ParallelBlock(block)
    return model


def share_region(model, group, sp):
    """Give each block a region, and its columns and rows an Inside in place of their own regions;
    move the rows' biases to the block. Call it after parallelize (engine/tensor_parallel.py)."""
    if group.size == 1:
        return
    for block in model.layers[1:-1]:
        block.region = Region(group, sp)
        for linear in (block.attn.c_attn, block.attn.c_proj):
            linear.region = Inside(group, sp, has_attention=True)
        for linear in (block.mlp.c_fc, block.mlp.c_proj):
            linear.region = Inside(group, sp)
        for row in (block.attn.c_proj, block.mlp.c_proj):
            if row.bias is not None:
                block.biases.append(row.bias)
                row.bias = None
