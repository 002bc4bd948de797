"""Logits that are sharded over ranks by vocabulary."""

from dataclasses import dataclass

import torch
from torch import Tensor

from outpace.parallel.group import ALONE, Group


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """How the vocabulary is sharded over the ranks of a group, in rank order."""

    group: Group = ALONE
    sizes: tuple[int, ...] = ()
    """Number of tokens of each rank; empty: this rank has all."""

    def likeliest(self, logits: Tensor) -> Tensor:
        """Argmax [S] over the vocabulary of all ranks, from this rank's logits."""
        if self.group.size == 1:
            return logits.argmax(-1)
        values, ids = logits.float().max(-1)
        ids = ids + sum(self.sizes[: self.group.rank])
        # token ids below 2 ** 24 are exact as floats
        found = self.group.stacked(torch.stack([values, ids.float()]))  # [ranks, 2, S]
        best = found[:, 0].argmax(0, keepdim=True)
        return found[:, 1].gather(0, best)[0].long()

    def whole(self, logits: Tensor) -> Tensor:
        """Gather the logits of the whole vocabulary [S, V]."""
        return self.group.joined(logits, self.sizes)


ALL = Vocabulary()
"""Not sharded: this rank has all logits."""
