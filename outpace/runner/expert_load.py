"""Tokens per expert: counted on the device by the routers, copied to the host on request."""

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from outpace.inject.experts import MixtureOfExperts, Router
from outpace.inject.modules import FusedLayer

OFTEN_ENOUGH = 1 << 30
"""Tokens after which the int32 counts are read in any case, before they can wrap around unnoticed."""


class ExpertLoad:
    """The counts of a model, a row for each layer with experts. Not thread-safe."""

    def __init__(self, routers: Mapping[int, Router], device: torch.device) -> None:
        """Make these routers count from now on, also in graphs captured later."""
        self.layers = tuple(routers)
        """The layer number of each row."""
        self._width = max(router.num_experts for router in routers.values())
        aligned = -(-self._width // 4) * 4  # rows aligned to 16 bytes, so that one compiled kernel serves all
        self._counts = torch.zeros(len(routers), aligned, dtype=torch.int32, device=device)
        for row, router in zip(self._counts, routers.values(), strict=True):
            router.counts = row[: router.num_experts]
        self._host = torch.zeros(self._counts.shape, dtype=torch.int32, pin_memory=device.type == "cuda")
        self._before = torch.zeros(self._counts.shape, dtype=torch.int64)
        self._total = torch.zeros(self._counts.shape, dtype=torch.int64)
        self._coming: torch.cuda.Event | None = None
        self._asked = False
        self._tokens_read = 0

    @classmethod
    def of(cls, module: nn.Module, device: torch.device) -> "ExpertLoad | None":
        """The counts of a model with fused experts; None: it has none."""
        routers = {
            layer.index: layer.mixture.router
            for layer in module.modules()
            if isinstance(layer, FusedLayer) and isinstance(layer.mixture, MixtureOfExperts)
        }
        return cls(routers, device) if routers else None

    def clear(self) -> None:
        """Reset the counts, to leave out the steps of the start-up."""
        self._counts.zero_()

    def ask(self) -> None:
        """Start copying the counts of all steps so far, without waiting. See `arrived`."""
        if not self._asked:
            self._asked = True
            self._host.copy_(self._counts, non_blocking=True)
            if self._counts.is_cuda:
                self._coming = torch.cuda.current_stream(self._counts.device).record_event()

    def arrived(self, *, wait: bool = False) -> Tensor | None:
        """Tokens of each expert [layers, experts] when `ask` was called, once; None: not asked for, or not ready."""
        if not self._asked:
            return None
        if self._coming is not None:
            if wait:
                self._coming.synchronize()
            elif not self._coming.query():
                return None
        now = self._host.long()
        self._total += (now - self._before) & 0xFFFFFFFF  # int32 counts wrap around
        self._before, self._asked = now, False
        return self._total[:, : self._width].clone()

    def read(self) -> Tensor:
        """Tokens of each expert [layers, experts], int64. Waits for launched steps."""
        self.arrived(wait=True)
        self.ask()
        found = self.arrived(wait=True)
        assert found is not None, "it was asked for"
        return found

    def keep_up(self, tokens: int) -> None:
        """Read the counts before they could wrap around twice. tokens: of all steps so far."""
        if tokens - self._tokens_read > OFTEN_ENOUGH:
            self._tokens_read = tokens
            self.read()
