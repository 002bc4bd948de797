"""One vector for a prompt: a forward of the Hugging Face module, and the mean or the last of its hidden states."""

from typing import Any

import torch
from transformers import PreTrainedModel

from outpace.errors import InputError, NotSupported
from outpace.prepare import PagedParts

POOLING = ("mean", "last")


class Embedder:
    """Embeds with the loaded model, one prompt at a time."""

    def __init__(self, parts: PagedParts, max_model_len: int) -> None:
        self._module = parts.module
        self._vocab_size = parts.vocab_size
        self._device = parts.device
        self._max_model_len = max_model_len

    @torch.no_grad()
    def __call__(self, prompt_token_ids: list[int], pooling: str) -> list[float]:
        """The vector [hidden_size], not normalised."""
        self._check(prompt_token_ids, pooling)
        module = self._module
        if not isinstance(module, PreTrainedModel):
            raise NotSupported(f"embeddings: {type(module).__name__} is not a Hugging Face model; load one that is")
        ids = torch.tensor([prompt_token_ids], device=self._device)  # [1, S]
        try:
            output: Any = module.base_model(input_ids=ids, use_cache=False)
            hidden: torch.Tensor = output.last_hidden_state[0].float()  # [S, hidden_size]
        except torch.OutOfMemoryError:
            raise InputError(
                f"input: no memory for the hidden states of {len(prompt_token_ids)} tokens; send shorter ones"
            ) from None
        except (TypeError, AttributeError) as error:
            raise NotSupported(f"embeddings: {type(module).__name__} does not give its hidden states") from error
        vector: list[float] = (hidden.mean(0) if pooling == "mean" else hidden[-1]).tolist()
        return vector

    def _check(self, ids: list[int], pooling: str) -> None:
        if pooling not in POOLING:
            raise InputError(f"pooling: expected one of {', '.join(POOLING)}, got {pooling!r:.80}")
        if not ids:
            raise InputError("input: expected one or more token ids, got none")
        if len(ids) > self._max_model_len:
            raise InputError(f"input: {len(ids)} tokens are more than max_model_len={self._max_model_len}")
        if min(ids) < 0 or (self._vocab_size is not None and max(ids) >= self._vocab_size):
            raise InputError(f"input: token ids have to be from 0 to {(self._vocab_size or 0) - 1}")
