"""A table of common GPUs, to plan for a device that this machine lacks."""

from collections.abc import Mapping
from dataclasses import dataclass

from outpace.offload.numbers import Rates

REACHED = Rates(bandwidth=0.90, flops=0.80, link=0.86)
"""Fractions of a data sheet's figures that are reached: an H200 was measured at 4.3 of 4.8 TB/s, 790 of 989 TFLOP/s in
bf16, and 55 of 64 GB/s over its link (PCIe 5.0 x16)."""
DISK = 5e9
"""Bytes per second of a common NVMe drive (PCIe 4.0 x4 reads 5 to 7 GB/s), if none can be measured."""
_PCIE3, _PCIE4, _PCIE5 = 16e9, 32e9, 64e9  # x16


@dataclass(frozen=True)
class Card:
    """A device with the figures of its data sheet."""

    memory: float
    """Bytes."""
    bandwidth: float
    """Bytes per second."""
    flops: float
    """Operations per second of dense products in bf16 or fp16."""
    link: float
    """Bytes per second from the host."""
    fp8: bool = False
    """Whether it can multiply in fp8."""

    @property
    def rates(self) -> Rates:
        """The rates that are reached in practice."""
        assert REACHED.link is not None
        return Rates(self.bandwidth * REACHED.bandwidth, self.flops * REACHED.flops, self.link * REACHED.link)


# NVIDIA's data sheets and white papers: dense figures with fp32 accumulation (half of those with sparsity).
CARDS: Mapping[str, Card] = {
    "t4": Card(16e9, 320e9, 65e12, _PCIE3),
    "4090": Card(24e9, 1008e9, 165.2e12, _PCIE4, fp8=True),
    "3090": Card(24e9, 936e9, 71e12, _PCIE4),
    "a10": Card(24e9, 600e9, 125e12, _PCIE4),
    "l4": Card(24e9, 300e9, 121e12, _PCIE4, fp8=True),
    "5090": Card(32e9, 1792e9, 209.5e12, _PCIE5, fp8=True),
    "v100": Card(32e9, 900e9, 125e12, _PCIE3),
    "a100-40gb": Card(40e9, 1555e9, 312e12, _PCIE4),
    "a6000": Card(48e9, 768e9, 154.8e12, _PCIE4),
    "l40s": Card(48e9, 864e9, 362e12, _PCIE4, fp8=True),
    "a100": Card(80e9, 2039e9, 312e12, _PCIE4),
    "h100": Card(80e9, 3350e9, 989e12, _PCIE5, fp8=True),
    "h200": Card(141e9, 4800e9, 989e12, _PCIE5, fp8=True),
    "b200": Card(180e9, 7700e9, 2250e12, _PCIE5, fp8=True),
}
"""Name on the command line -> card, smallest memory first."""


def card_with(memory: float) -> str:
    """The first card with at least this memory, or else the largest."""
    return next((name for name, card in CARDS.items() if card.memory >= memory), list(CARDS)[-1])
