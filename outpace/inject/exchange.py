"""Expert parallelism between ranks with different tokens: each token is sent to the ranks of its experts and back."""

import torch
from torch import Tensor, nn

from outpace.inject.experts import Experts
from outpace.parallel.copies import Held, copies_of
from outpace.parallel.group import Group


class ExchangedExperts(Experts):
    """All experts of a layer, of which this rank computes its own. Every rank of the group must make the same calls.

    A token is sent once to each rank with some of its experts. No token is dropped. A rank may have no tokens.
    """

    def __init__(self, inner: Experts, where: "ExpertMap", group: Group, sliced: Group) -> None:
        nn.Module.__init__(self)  # not that of Experts: the weights are in `inner`
        self.recipes = {}
        self.inner = inner
        self.num_experts = where.count
        self.where = where
        self.group = group
        self.sliced = sliced
        """Ranks with the same tokens and other parts of the same experts."""

    def forward(self, x: Tensor, weights: Tensor, chosen: Tensor, add: Tensor | None = None) -> Tensor:
        owner = self.where.owners(chosen)  # [T, K]; -1: none
        wanted = (owner[None] == torch.arange(self.group.size, device=x.device)[:, None, None]).any(-1)  # [ranks, T]
        rank, token = wanted.nonzero().unbind(1)  # in the order of the ranks
        asked = torch.where(owner[token] == rank[:, None], chosen[token], -1)  # each rank gets its own choices
        sent = wanted.sum(1)
        received = self.group.exchanged(sent, [1] * self.group.size, [1] * self.group.size)
        outgoing, incoming = sent.tolist(), received.tolist()
        rows, shares, own = (
            self.group.exchanged(each, outgoing, incoming)
            for each in (x.index_select(0, token), weights.index_select(0, token), asked)
        )
        computed = self.sliced.sum(self.inner(rows, shares, self.where.places(own)))
        returned = self.group.exchanged(computed, incoming, outgoing)
        result = torch.zeros_like(x) if add is None else add
        return result.index_add_(0, token, returned.to(x.dtype))

    def extra_repr(self) -> str:
        return f"{self.num_experts} experts on {self.group.size} ranks"


class ExpertMap(nn.Module):
    """Which ranks hold each expert, and its index on this rank. Tokens use the copies of an expert in turn."""

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
        """The first of this rank's experts, if they are consecutive and have no copies."""
        tables = {"owner": [each + each[:1] * (most - len(each)) for each in ranks], "copies": list(map(len, ranks))}
        for name, values in {**tables, "place": place}.items():
            self.register_buffer(name, torch.tensor(values, dtype=torch.int32), persistent=False)

    def owners(self, chosen: Tensor) -> Tensor:
        """The rank that computes each choice [T, K]; -1: none."""
        expert = chosen.clamp(0, self.count - 1).long()
        turn = torch.arange(len(chosen), device=chosen.device)[:, None] % self.copies[expert]
        found = self.owner[expert].gather(2, turn[:, :, None].long())[:, :, 0]
        return torch.where((chosen >= 0) & (chosen < self.count), found, -1)

    def places(self, chosen: Tensor) -> Tensor:
        """Index of each chosen expert on this rank; -1: it is on another rank."""
        expert = chosen.clamp(0, self.count - 1).long()
        return torch.where((chosen >= 0) & (chosen < self.count), self.place[expert], -1)

    def own(self, chosen: Tensor) -> Tensor:
        """`places` if all ranks have the same tokens: -1 also for a choice that another rank computes."""
        if self.first is not None:
            return chosen - self.first if self.first else chosen
        return torch.where(self.owners(chosen) == self.rank, self.places(chosen), -1)
