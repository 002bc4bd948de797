"""Experts on ranks that have tokens of their own: each token goes to the ranks of its experts, and comes back."""

from collections.abc import Sequence

import torch
from torch import Tensor

from outpace.inject.experts import Experts
from outpace.parallel.group import Group


class ExchangedExperts(Experts):
    """The experts of this rank behind the call of all experts. Every rank of the group must make the same calls.

    A token is sent once to each rank that has some of its experts, with their weights; no token is dropped, and a rank
    may have none.
    """

    def __init__(self, inner: Experts, firsts: Sequence[int], total: int, group: Group, sliced: Group) -> None:
        torch.nn.Module.__init__(self)
        self.recipes = {}
        self.inner = inner
        self.num_experts = total
        self.firsts = tuple(firsts)
        """The first expert of each rank."""
        self.group = group
        self.sliced = sliced
        """Ranks that have the same tokens and other parts of the same experts."""

    def forward(self, x: Tensor, weights: Tensor, chosen: Tensor, add: Tensor | None = None) -> Tensor:
        """See `Experts`."""
        bounds = torch.tensor([*self.firsts, self.num_experts], device=x.device)
        owner = torch.bucketize(chosen.long(), bounds, right=True) - 1  # [T, K]; -1: nobody's
        wanted = (owner[None] == torch.arange(self.group.size, device=x.device)[:, None, None]).any(-1)  # [ranks, T]
        token = wanted.nonzero()[:, 1]  # in the order of the ranks
        sent = wanted.sum(1)
        received = self.group.exchanged(sent, [1] * self.group.size, [1] * self.group.size)
        counts = _Counts(sent.tolist(), received.tolist(), self.group)
        own = self.inner(
            counts.there(x.index_select(0, token)),
            counts.there(weights.index_select(0, token)),
            counts.there(chosen.index_select(0, token)) - self.firsts[self.group.rank],
        )
        back = counts.back(self.sliced.sum(own))
        result = torch.zeros_like(x) if add is None else add
        return result.index_add_(0, token, back.to(x.dtype))

    def extra_repr(self) -> str:
        """What is printed of it."""
        return f"{self.num_experts} experts on {self.group.size} ranks"


class _Counts:
    """How many rows go to each rank, and how many come from each."""

    def __init__(self, sent: list[int], received: list[int], group: Group) -> None:
        self._sent, self._received, self._group = sent, received, group

    def there(self, rows: Tensor) -> Tensor:
        """Rows for the other ranks; those that they have for this one."""
        return self._group.exchanged(rows, self._sent, self._received)

    def back(self, rows: Tensor) -> Tensor:
        """What became of them."""
        return self._group.exchanged(rows, self._received, self._sent)
