"""A group of ranks and its collectives."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor

from outpace.errors import NotSupported

# newer versions of torch warn about all_gather_into_tensor
GATHER: Any = vars(dist).get("all_gather_single") or dist.all_gather_into_tensor


@dataclass(frozen=True, slots=True, eq=False)
class Group:
    """A group of ranks, seen from one of them. All its ranks must make the same calls in the same order."""

    rank: int = 0
    """The number of this rank in the group."""
    size: int = 1
    handle: "dist.ProcessGroup | None" = None
    """torch's process group; None: this rank is alone."""
    by_host: bool = False
    """Whether GPU tensors go through host memory: ranks that share a GPU cannot use NCCL."""

    @classmethod
    def of(cls, handle: "dist.ProcessGroup") -> "Group":
        by_host = "nccl" not in str(dist.get_backend_config(handle))
        return cls(dist.get_rank(handle), dist.get_world_size(handle), handle, by_host)

    @property
    def ranks(self) -> tuple[int, ...]:
        """World ranks of the members; empty: this rank is alone."""
        return () if self.handle is None else tuple(dist.get_process_group_ranks(self.handle))

    @property
    def capturable(self) -> bool:
        """Whether its collectives can be captured in a CUDA graph."""
        return self.size == 1 or not self.by_host

    def sum(self, x: Tensor) -> Tensor:
        """All-reduce (sum), in place."""
        if self.size > 1:
            there = self._there(x)
            dist.all_reduce(there, group=self.handle)
            self._back(there, x)
        return x

    def joined(self, x: Tensor, sizes: Sequence[int]) -> Tensor:
        """Gather [..., sizes[rank]] of all ranks, concatenated in the last dimension."""
        if self.size == 1:
            return x
        widest = max(sizes)
        padded = x if x.shape[-1] == widest else torch.nn.functional.pad(x, (0, widest - x.shape[-1]))
        found = self.stacked(padded)
        return torch.cat([part[..., :size] for part, size in zip(found, sizes, strict=True)], dim=-1)

    def stacked(self, x: Tensor) -> Tensor:
        """Gather tensors of equal shape from all ranks: [size, ...]."""
        if self.size == 1:
            return x[None]
        there = self._there(x.contiguous().view(-1))
        found = there.new_empty(self.size * x.numel())
        GATHER(found, there, group=self.handle)
        return found.view(self.size, *x.shape).to(x.device)

    def from_first(self, x: Tensor) -> Tensor:
        """Broadcast from the first rank, in place."""
        if self.size > 1:
            there = self._there(x)
            dist.broadcast(there, group=self.handle, group_src=0)
            self._back(there, x)
        return x

    def start_from_first(self, x: Tensor) -> Callable[[], None]:
        """`from_first` without blocking; call the result to wait for its end."""
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
        """All-to-all of rows: sends each rank its rows, returns the rows sent to this one. Counts are per rank."""
        there = self._there(rows.contiguous())
        found = there.new_empty(sum(received), *rows.shape[1:])
        dist.all_to_all_single(found, there, received, sent, group=self.handle)
        return found.to(rows.device)

    def least(self, number: int, device: torch.device) -> int:
        """The minimum over all ranks. It synchronizes with the device: use it at start-up, not in a step."""
        return self.lowest([number], device)[0]

    def lowest(self, numbers: list[int], device: torch.device) -> list[int]:
        if self.size == 1:
            return numbers
        found = self._there(torch.tensor(numbers, dtype=torch.int64, device=device))
        dist.all_reduce(found, op=dist.ReduceOp.MIN, group=self.handle)
        return [int(number) for number in found.tolist()]

    def __deepcopy__(self, memo: object) -> "Group":
        return self

    def __reduce__(self) -> NoReturn:
        raise NotSupported("pickle: a model over ranks cannot be pickled; write shards with save_mp_checkpoint_path")

    def _there(self, x: Tensor) -> Tensor:
        """The tensor on the device that the collectives use."""
        return x.cpu() if self.by_host and x.is_cuda else x

    def _back(self, there: Tensor, x: Tensor) -> None:
        if there is not x:
            x.copy_(there)


ALONE = Group()
"""A group of this rank alone."""


def same_draws(group: Group, device: torch.device) -> None:
    """Set the random generators of all ranks to the state of the first rank's, so that they draw the same."""
    if group.size == 1:
        return
    torch.set_rng_state(group.from_first(torch.get_rng_state().to(device)).cpu())
    if device.type == "cuda":
        torch.cuda.set_rng_state(group.from_first(torch.cuda.get_rng_state(device).to(device)).cpu(), device)
