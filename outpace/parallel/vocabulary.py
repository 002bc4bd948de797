"""Logits of which each rank has those of its own tokens."""

from dataclasses import dataclass

import torch
from torch import Tensor

from outpace.parallel.group import ALONE, Group


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """Which tokens each rank of a group has the logits of: those of the first rank come first."""

    group: Group = ALONE
    sizes: tuple[int, ...] = ()
    """Tokens of each rank; empty: this one has all."""

    def likeliest(self, logits: Tensor) -> Tensor:
        """The token with the highest logit of all ranks [S], of logits [S, tokens of this rank]."""
        if self.group.size == 1:
            return logits.argmax(-1)
        values, ids = logits.float().max(-1)
        ids = ids + sum(self.sizes[: self.group.rank])
        found = self.group.stacked(torch.stack([values, ids.float()]))  # [ranks, 2, S]; ids stay exact below 2 ** 24
        best = found[:, 0].argmax(0, keepdim=True)
        return found[:, 1].gather(0, best)[0].long()

    def whole(self, logits: Tensor) -> Tensor:
        """The logits of all tokens [S, V]."""
        return self.group.joined(logits, self.sizes)


ALL = Vocabulary()
"""This rank has the logits of every token."""
