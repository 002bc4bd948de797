"""Embeddings of prompts: the mean or the last of their hidden states, collected chunk by chunk on the device."""

from collections.abc import Iterable

import torch
from torch import Tensor

from outpace.runner.results import Arriving
from outpace.runner.rows import Layout


class PoolingSums:
    """Running sums of prompts being computed. A preempted request keeps its sum unless it is recomputed."""

    def __init__(self) -> None:
        self._sums: dict[str, Tensor] = {}

    @staticmethod
    def wanted(layout: Layout) -> list[int]:
        """Sequences of a step that want an embedding."""
        return [index for index, owner in enumerate(layout.owners) if owner.request.pooling is not None]

    def forget(self, requests: Iterable[str]) -> None:
        for name in requests:
            self._sums.pop(name, None)

    def clear(self) -> None:
        self._sums.clear()

    def add(self, layout: Layout, hidden: Tensor) -> "Vectors":
        """Add the hidden states [T, hidden_size] of a step; returns the embeddings of prompts that are complete."""
        names, vectors = [], []
        for index, part in enumerate(hidden.split(layout.counts)):
            request, start = layout.owners[index].request, layout.starts[index]
            if request.pooling == "last":
                vector = part[-1].float()
            else:
                vector = part.sum(0, dtype=torch.float32)
                vector = vector if start == 0 else self._sums[request.request_id] + vector
                self._sums[request.request_id] = vector
                vector = vector / (start + layout.counts[index])
            if layout.samples[index]:  # its last chunk is in this step
                names.append(request.request_id)
                vectors.append(vector)
        return Vectors(names, vectors)


class Vectors:
    """Embeddings being copied to the host."""

    def __init__(self, names: list[str], vectors: list[Tensor]) -> None:
        self._names = names
        self._arriving = Arriving([torch.stack(vectors)] if vectors else [])

    def read(self) -> dict[str, list[float]]:
        """Wait for them; the embeddings by request id."""
        found = self._arriving.read()
        return dict(zip(self._names, found[0].tolist(), strict=True)) if found else {}
