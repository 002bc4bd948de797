"""A model that counts: the runner's steps without a real one."""

from dataclasses import dataclass, field

import torch
from torch import Tensor

from outpace.cache.kv_cache import Pages
from outpace.inject.paged import Batch
from outpace.kernels.dispatch import Kernels, choose_kernels
from outpace.offload.streaming import Streaming
from outpace.parallel.group import ALONE, Group
from outpace.parallel.pipeline import ONLY, Stage
from outpace.parallel.vocabulary import ALL, Vocabulary

CPU = torch.device("cpu")


@dataclass
class Counting:
    """A model over pages whose logits at a token t say t + 1, and which remembers its batches."""

    kv_heads: list[tuple[int, int, int]] = field(default_factory=lambda: [(2, 8, 8), (2, 8, 8)])
    dtype: torch.dtype = torch.float32
    device: torch.device = CPU
    capturable: bool = True
    reentrant: bool = True
    gives_hidden: bool = True
    ranks: Group = ALONE
    vocabulary: Vocabulary = ALL
    stage: Stage = ONLY
    hidden_size: int = 2
    vocab_size: int = 50
    streaming: Streaming | None = None
    max_tokens: int = 8192
    kernels: Kernels = field(default_factory=lambda: choose_kernels(CPU))
    batches: list[Batch] = field(default_factory=list)

    def forward(self, batch: Batch, pages: Pages, rows: Tensor | None = None, given: Tensor | None = None) -> Tensor:
        self.batches.append(batch)
        logits = torch.zeros(len(batch.ids), 50)
        logits[torch.arange(len(batch.ids)), (batch.ids + 1) % 50] = 1.0
        keys = pages.keys[0].view(-1, *pages.keys[0].shape[2:])  # [slots, heads, size]
        real = batch.slots >= 0
        keys[batch.slots[real]] = batch.ids[real, None, None].float().expand(-1, *keys.shape[1:])
        return logits if rows is None else logits.index_select(0, rows)

    def hidden(self, batch: Batch, pages: Pages, given: Tensor | None = None) -> Tensor:
        """Each token and its position."""
        self.forward(batch, pages)
        return torch.stack([batch.ids, batch.positions], 1).float()

    def sketch(self) -> "Counting":
        return self
