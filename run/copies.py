"""Do all ranks that should hold the same bits hold them? Compared by hashes: a rank sends at most
16 bytes per tensor and group for the hashes, and 16 per tensor to count the ranks that found a
difference. train.py asks at the end of a run."""

import hashlib

import torch

from collectives import all_reduce, maximum


class Copies:
    """Hashes of this rank's tensors, for each group of ranks that all hold the same slice: the
    replicas, and with tensor or pipeline ranks the groups in the tag's shared_by."""

    def __init__(self):
        self.hashes = {}  # group -> {name: hash of this rank's copy}

    def add(self, tag, copy):
        """Keep the hash of `copy`, a tensor on the CPU: this rank's whole slice of the parameter of
        this tag. Every rank of a group adds the group's tensors in the same order."""
        digest = hashlib.sha256(copy.contiguous().view(-1).view(torch.uint8).numpy()).digest()
        number = int.from_bytes(digest[:7], "little")  # 7 bytes fit a torch.long, which is signed
        for group in (tag.sum_over[0], *tag.shared_by):
            self.hashes.setdefault(group, {})[tag.name] = number

    def differing(self, names, world):
        """Collective: the names of tensors whose copies differ. names: all tensors of the model,
        the same list on all ranks."""
        differ = dict.fromkeys(names, False)
        for group in sorted(self.hashes, key=lambda group: group.name):  # all ranks in one order
            hashes = self.hashes[group]
            own = torch.tensor([*hashes.values()], device=group.device)
            # If the hashes differ, at least one rank's is not the largest, and that rank notices
            unequal = all_reduce(own.clone(), group, maximum) != own
            for name, is_unequal in zip(hashes, group.read(unequal), strict=True):
                differ[name] |= is_unequal
        counts = torch.tensor([*differ.values()], dtype=torch.long, device=world.device)
        counts = world.read(all_reduce(counts, world))
        return [name for name, count in zip(names, counts, strict=True) if count]


def replicas_agree(trainer):
    """Collective: does every weight that several ranks hold have the same bits on all of them?"""
    copies = Copies()
    for tag, weights in trainer.reducer.whole():
        copies.add(tag, weights.cpu())
    return not copies.differing([*trainer.shapes], trainer.mesh.world)


def whole_slices(reducer, pieces):
    """Yields (tag, a new tensor: this rank's whole slice) for tensors of which this rank has a
    piece, such as gradients: pieces[i] is arranged like reducer.weights[i]. Collective under ZeRO,
    where each replica has a piece of the slice: a sum puts the pieces together, because each rank
    has zeros around its own."""
    for piece, tag, start in zip(pieces, reducer.tags, reducer.starts, strict=True):
        whole = piece.new_zeros(tag.slice_shape.numel())
        whole[start : start + piece.numel()] = piece.flatten()
        if reducer.sharded:
            all_reduce(whole, tag.sum_over[0])
        yield tag, whole.view(tag.slice_shape)
        del whole  # free it before the next is made
