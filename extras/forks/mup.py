"""muP's rates, arXiv 2203.03466: a learning rate chosen for a narrow model fits a wide one.

    matrices of the blocks      lr BASE_WIDTH / C          C: the model's width
    all other tensors           lr

Adam moves each weight by about lr, whatever its gradient. A hidden unit sums C inputs, so a step
would change the unit by about C lr; with these rates the change does not depend on C. Initial
values need no change: model.py draws with a deviation that falls like 1 / sqrt(C). Left out: the
paper's output multiplier (embedding and head are one matrix here) and its attention scale, 1/hs in
place of 1/sqrt(hs).

What the fork shows: a setting per tensor is one method, which gets the tag. The tag has the full
shape; the slice on a rank (1/T of C) would give other rates in other layouts.

    git apply extras/forks/mup.patch && torchrun train.py --tp 2 --n-embd 512 --optimizer mup
"""

from engine.optimizer import AdamW

BASE_WIDTH = 128  # the width that --lr was chosen for, train.py's default


def hidden(tag):
    return len(tag.shape) == 2 and ".h." in tag.name and tag.name.endswith("weight")


class MuP(AdamW):
    def settings(self, tag):
        decay, rate = super().settings(tag)
        if hidden(tag):
            width = min(tag.shape)  # C: shapes are (3C, C), (C, C), (4C, C) and (C, 4C)
            rate *= BASE_WIDTH / width
        return decay, rate
