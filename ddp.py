"""Data parallelism: D replicas of the model, each with 1/D of the batch; gradients are summed.

Split: the batch. Replicated: weights, gradients, optimizer states. Sent per rank and step:
2 (D-1)/D Psi elements for Psi parameters, whatever the number of microbatches.

No average is taken. The loss was divided by the number of tokens in the whole batch before
backward, so the sum of the ranks' gradients is the gradient of the whole batch. PyTorch
Distributed, arXiv 2006.15704.

    python ddp.py                  a small GPT on 4 ranks
    torchrun plain.py --dp 2       plain.py on 2 ranks
"""

from collectives import all_reduce


def parameters_of(layers):
    """The parameters of some layers, each once: two layers may share one (the tied embedding)."""
    return list(dict.fromkeys(param for layer in layers for param in layer.parameters()))


class DDP:
    """Sums gradients over the replicas.

    In: a list of layers whose parameters are tagged (shard.py); replicas hold the same weights.
    ZeRO (zero.py) shards what is replicated here. All four classes have the same members:

        params         a tagged tensor for each parameter of the layers: the parameter itself; in
                       ZeRO-3 this rank's chunk of it
        weights        the tensors that this rank's optimizer steps, in place, in the order of
                       params. Here: whole parameters
        gradients()    after the last backward of a step: the gradient of each of `weights`, summed
                       over the replicas. Clears the gradients for the next step
        publish()      after the optimizer's step: every rank has the new weights
    """

    def __init__(self, layers):
        self.params = parameters_of(layers)
        self.weights = [param.data for param in self.params]

    def gradients(self):
        summed = []
        for param in self.params:
            replicas = param.shard.sum_over[0]
            summed.append(all_reduce(param.grad, replicas))
            param.grad = None
        return summed

    def publish(self):
        """Nothing to send: every rank has stepped every weight, with the same gradients."""


# plain.py trains with this DDP; train.py with engine/ddp.py: gradients lie side by side in buckets,
# and a bucket travels while backward goes on: 1.4 to 1.5 times the speed where messages rule, 1.04
# where computing does.


def demo(mesh):
    """One backward of a small GPT: 2 sequences on each rank, against all of them in one process."""
    from show.demonstrations import show_difference, small_gpt
    model, mine = small_gpt(mesh)
    model(mine, mine).backward()
    ddp = DDP(model.layers)
    for param, grad in zip(ddp.params, ddp.gradients(), strict=True):
        param.grad = grad
    show_difference("DDP", mesh, model, summed=True)


if __name__ == "__main__":
    from show.demonstrations import demonstrate
    demonstrate(demo, dp=4)
