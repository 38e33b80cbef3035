"""DiLoCo, arXiv 2311.08105: D workers train apart, and meet once in H steps. Between two meetings
no gradient travels between workers. A worker takes a data rank's place: with its pipeline, tensor
and context ranks it is a replica of the model, and trains on its 1/D of each batch.

    H times    each worker steps by AdamW on its own gradients
    meet       d = w0 - mean of the workers' w;  v = MOMENTUM v + d
               w0 = w0 - OUTER_LR (d + MOMENTUM v);  all go on from w0

w0: the weights after the last meeting. MOMENTUM v in the last line is Nesterov's form of momentum.
With SGD, OUTER_LR 1 and MOMENTUM 0 this is federated averaging (1602.05629), and with H = 1, too,
data parallelism. What the fork shows: mesh.summed alone says over which axes of the mesh is summed.
Without the data axes in mesh.summed gradients, norm, ZeRO's shards and the check of replicas stay
within a worker.

Sent by data ranks: 2 (D-1)/D of the weights in H steps, in place of H times the gradients. Held: w0
and v, two more numbers per weight. Each worker has its own moments, so --resume is refused. A run
that ends or is stopped between meetings meets once more, and saves the weights after that meeting.
The logged loss is the mean over workers, the norm is the first worker's.

    git apply forks/diloco.patch && torchrun train.py --dp 4 --diloco 20
"""

import torch

from engine.collectives import all_reduce

OUTER_LR, MOMENTUM = 0.7, 0.9


def diloco(usual):
    """A Trainer whose data ranks are workers, if --diloco is given."""
    class DiLoCo(usual):
        def __init__(self, cfg, mesh, vocab_size):
            if cfg.diloco:
                mesh.summed = ("cp",)
            super().__init__(cfg, mesh, vocab_size)
            self.workers = mesh.group("dp") if cfg.diloco else None
            self.apart = 0  # steps since the last meeting
            self.outer = []  # (bucket, its w0, its v)
            if cfg.diloco:
                self.reducer.unsaved = "moments of --diloco"
                self.outer = [(bucket, bucket.master.clone(), torch.zeros_like(bucket.master))
                              for bucket in self.reducer.buckets]

        def run_microbatches(self, actions, batches, scale=1.0):
            """Multiply gradients by the number of workers: the loss is divided by the tokens of
            all workers, but a worker's gradient is a sum over its own tokens only."""
            if self.workers:
                scale = scale * self.workers.size
            return super().run_microbatches(actions, batches, scale)

        def update(self, norm, lr):
            super().update(norm, lr)
            self.apart += 1
            if self.apart == self.cfg.diloco:
                self.meet()

        @torch.no_grad()
        def meet(self):
            """Collective. Does nothing if no step has been taken since the last meeting."""
            if not self.workers or not self.apart:
                return
            self.apart = 0
            for work in getattr(self.reducer, "gathered", {}).values():
                work.wait()  # ZeRO-1 and 2: the last step's weights are still on their way
            for bucket, start, velocity in self.outer:
                change = all_reduce(start - bucket.master, self.workers) / self.workers.size
                velocity.mul_(MOMENTUM).add_(change)
                start.sub_(OUTER_LR * (change + MOMENTUM * velocity))
                bucket.master.copy_(start)
                self.optimizer.publish(bucket)

    return DiLoCo
