"""Experts on ranks that have tokens of their own: each token goes to the ranks of its experts, and comes back."""

import torch
from torch import Tensor, nn

from outpace.inject.experts import Experts
from outpace.parallel.copies import Held, copies_of
from outpace.parallel.group import Group


class ExchangedExperts(Experts):
    """The experts of this rank behind the call of all experts. Every rank of the group must make the same calls.

    A token is sent once to each rank that has some of its experts, with their weights; no token is dropped, and a rank
    may have none.
    """

    def __init__(self, inner: Experts, where: "Whereabouts", group: Group, sliced: Group) -> None:
        torch.nn.Module.__init__(self)
        self.recipes = {}
        self.inner = inner
        self.num_experts = where.count
        self.where = where
        self.group = group
        self.sliced = sliced
        """Ranks that have the same tokens and other parts of the same experts."""

    def forward(self, x: Tensor, weights: Tensor, chosen: Tensor, add: Tensor | None = None) -> Tensor:
        """See `Experts`."""
        owner = self.where.owners(chosen)  # [T, K]; -1: nobody's
        wanted = (owner[None] == torch.arange(self.group.size, device=x.device)[:, None, None]).any(-1)  # [ranks, T]
        rank, token = wanted.nonzero().unbind(1)  # in the order of the ranks
        asked = torch.where(owner[token] == rank[:, None], chosen[token], -1)  # of its choices, a rank's own
        sent = wanted.sum(1)
        received = self.group.exchanged(sent, [1] * self.group.size, [1] * self.group.size)
        counts = _Counts(sent.tolist(), received.tolist(), self.group)
        own = self.inner(
            counts.there(x.index_select(0, token)),
            counts.there(weights.index_select(0, token)),
            self.where.places(counts.there(asked)),
        )
        back = counts.back(self.sliced.sum(own))
        result = torch.zeros_like(x) if add is None else add
        return result.index_add_(0, token, back.to(x.dtype))

    def extra_repr(self) -> str:
        """What is printed of it."""
        return f"{self.num_experts} experts on {self.group.size} ranks"


class Whereabouts(nn.Module):
    """Which rank has which experts, and where among its own. Tokens take the copies of an expert by turns."""

    owner: Tensor
    copies: Tensor
    place: Tensor

    def __init__(self, held: Held, rank: int) -> None:
        super().__init__()
        self.count = 1 + max(expert for each in held for expert in each)
        self.rank = rank
        ranks, own = copies_of(held, self.count), held[rank]
        most = max(map(len, ranks))
        place = [own.index(expert) if expert in own else -1 for expert in range(self.count)]
        self.first = own[0] if most == 1 else None
        """The first of its experts, where these are consecutive and nobody else has them."""
        tables = {"owner": [each + each[:1] * (most - len(each)) for each in ranks], "copies": list(map(len, ranks))}
        for name, values in {**tables, "place": place}.items():
            self.register_buffer(name, torch.tensor(values, dtype=torch.int32), persistent=False)

    def owners(self, chosen: Tensor) -> Tensor:
        """The rank that computes each choice [T, K] of each token; -1: none."""
        expert = chosen.clamp(0, self.count - 1).long()
        turn = torch.arange(len(chosen), device=chosen.device)[:, None] % self.copies[expert]
        found = self.owner[expert].gather(2, turn[:, :, None].long())[:, :, 0]
        return torch.where((chosen >= 0) & (chosen < self.count), found, -1)

    def places(self, chosen: Tensor) -> Tensor:
        """Where the chosen experts are among this rank's own; -1: they are not."""
        expert = chosen.clamp(0, self.count - 1).long()
        return torch.where((chosen >= 0) & (chosen < self.count), self.place[expert], -1)

    def own(self, chosen: Tensor) -> Tensor:
        """The same, of those choices that are this rank's to compute; all ranks have the same tokens."""
        if self.first is not None:
            return chosen - self.first if self.first else chosen
        return torch.where(self.owners(chosen) == self.rank, self.places(chosen), -1)


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
