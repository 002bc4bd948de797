"""Ranks that compute something together, and what they tell each other."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor

from outpace.errors import NotSupported

GATHER: Any = vars(dist).get("all_gather_single") or dist.all_gather_into_tensor  # which newer versions warn of


@dataclass(frozen=True, slots=True, eq=False)
class Group:
    """Some ranks of the world, seen from one of them. Every rank of a group must make the same calls in order."""

    rank: int = 0
    """This one, in the group."""
    size: int = 1
    handle: "dist.ProcessGroup | None" = None
    """torch's; None: this rank is alone."""
    by_host: bool = False
    """Whether tensors of a GPU go through the memory of the host: ranks that share a GPU cannot use NCCL."""

    @classmethod
    def of(cls, handle: "dist.ProcessGroup") -> "Group":
        """A group that torch knows."""
        by_host = "nccl" not in str(dist.get_backend_config(handle))
        return cls(dist.get_rank(handle), dist.get_world_size(handle), handle, by_host)

    @property
    def ranks(self) -> tuple[int, ...]:
        """Their numbers in the world; none: this one is alone."""
        return () if self.handle is None else tuple(dist.get_process_group_ranks(self.handle))

    @property
    def capturable(self) -> bool:
        """Whether a CUDA graph can hold what they tell each other."""
        return self.size == 1 or not self.by_host

    def sum(self, x: Tensor) -> Tensor:
        """The sum of what all ranks have, in place."""
        if self.size > 1:
            there = self._there(x)
            dist.all_reduce(there, group=self.handle)
            self._back(there, x)
        return x

    def joined(self, x: Tensor, sizes: Sequence[int]) -> Tensor:
        """What all ranks have [..., sizes[rank]], side by side in the last dimension."""
        if self.size == 1:
            return x
        widest = max(sizes)
        padded = x if x.shape[-1] == widest else torch.nn.functional.pad(x, (0, widest - x.shape[-1]))
        found = self.stacked(padded)
        return torch.cat([part[..., :size] for part, size in zip(found, sizes, strict=True)], dim=-1)

    def stacked(self, x: Tensor) -> Tensor:
        """What all ranks have, of the same shape everywhere: [size, ...]."""
        if self.size == 1:
            return x[None]
        there = self._there(x.contiguous().view(-1))
        found = there.new_empty(self.size * x.numel())
        GATHER(found, there, group=self.handle)
        return found.view(self.size, *x.shape).to(x.device)

    def from_first(self, x: Tensor) -> Tensor:
        """What the first rank has, in place."""
        if self.size > 1:
            there = self._there(x)
            dist.broadcast(there, group=self.handle, group_src=0)
            self._back(there, x)
        return x

    def start_from_first(self, x: Tensor) -> Callable[[], None]:
        """`from_first` beside other work; what it returns waits for the end of it."""
        if self.size == 1 or not x.numel():
            return lambda: None
        there = self._there(x).contiguous()
        work = dist.broadcast(there, group=self.handle, group_src=0, async_op=True)
        assert work is not None, "this rank is in the group"

        def finish() -> None:
            work.wait()
            self._back(there, x)

        return finish

    def exchanged(self, rows: Tensor, sent: list[int], received: list[int]) -> Tensor:
        """Rows for every rank, in the order of the ranks; those that they have for this one. Counts: of each rank."""
        there = self._there(rows.contiguous())
        found = there.new_empty(sum(received), *rows.shape[1:])
        dist.all_to_all_single(found, there, received, sent, group=self.handle)
        return found.to(rows.device)

    def least(self, number: int, device: torch.device) -> int:
        """The smallest of the numbers of all ranks. Waits for the device: for a start, not for a step."""
        return self.lowest([number], device)[0]

    def lowest(self, numbers: list[int], device: torch.device) -> list[int]:
        """The smallest of all ranks, of each number."""
        if self.size == 1:
            return numbers
        found = self._there(torch.tensor(numbers, dtype=torch.int64, device=device))
        dist.all_reduce(found, op=dist.ReduceOp.MIN, group=self.handle)
        return [int(number) for number in found.tolist()]

    def __deepcopy__(self, memo: object) -> "Group":
        return self

    def __reduce__(self) -> NoReturn:
        raise NotSupported(
            "pickle: the group of a rank means nothing in another process; write shards with save_mp_checkpoint_path"
        )

    def _there(self, x: Tensor) -> Tensor:
        """The tensor where it can be told to others."""
        return x.cpu() if self.by_host and x.is_cuda else x

    def _back(self, there: Tensor, x: Tensor) -> None:
        if there is not x:
            x.copy_(there)


ALONE = Group()
"""Nobody else."""


def same_draws(group: Group, device: torch.device) -> None:
    """Let the generators of all ranks go on from where the first one's are, so that they draw the same."""
    if group.size == 1:
        return
    torch.set_rng_state(group.from_first(torch.get_rng_state().to(device)).cpu())
    if device.type == "cuda":
        torch.cuda.set_rng_state(group.from_first(torch.cuda.get_rng_state(device).to(device)).cpu(), device)
