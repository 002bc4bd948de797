"""Finds out what a model needs of its attention, by one forward of two tokens instead of guesses from its config."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from transformers import DynamicCache

from outpace.errors import NotSupported
from outpace.inject.attention_interface import KEYWORD, PROBE, AttentionLayer, Mask, MaskFunction, switched

KNOWN = frozenset(
    {"scaling", "dropout", "sliding_window", "softcap", "s_aux", "is_causal", "position_ids", "output_attentions"}
)
"""Keywords of attention that are supported, or change nothing."""
REACH = 1 << 15  # positions of queries at which masks are evaluated
DISTANCES = (-1000, -2, -1, *(1 << power for power in range(15)))


def probe(model: nn.Module, configs: Sequence[Any], num_layers: int) -> dict[int, AttentionLayer]:
    """The attention of each layer by number. Raises for a model that pages cannot run."""
    recorder = _Recorder()
    ids = torch.zeros(1, 2, dtype=torch.int64, device=next(model.parameters()).device)
    places = torch.arange(2, device=ids.device)[None]
    with torch.no_grad(), switched(configs, PROBE):
        model.forward(input_ids=ids, position_ids=places, use_cache=False, **{KEYWORD: recorder})
    if sorted(recorder.layers) != list(range(num_layers)):
        raise NotSupported(
            f"{len(recorder.layers)} of its {num_layers} layers call attention; the others keep a state of their own"
        )
    _check_cache(model, recorder.layers)
    return recorder.layers


def _check_cache(model: Any, layers: Mapping[int, AttentionLayer]) -> None:
    """Raise if the mask sees more than the cache keeps: then generate and forward differ."""
    for index, kept in enumerate(DynamicCache(config=model.config).layers[: len(layers)]):
        size = getattr(kept, "sliding_window", None)
        if size is not None and not 0 < layers[index].window <= size:
            raise NotSupported(f"its cache keeps {size} keys, and its mask lets it see more")


class _Recorder:
    """Called as attention: records its arguments and returns zeros."""

    def __init__(self) -> None:
        self.layers: dict[int, AttentionLayer] = {}
        self._windows: dict[Mask, int] = {}

    def __call__(self, module: Any, query: Tensor, key: Tensor, value: Tensor, mask: object, **options: Any) -> Tensor:
        index = getattr(module, "layer_idx", None)
        if not isinstance(index, int) or index in self.layers:
            raise NotSupported(f"{type(module).__name__} calls attention more than once, or has no number (layer_idx)")
        _check_options(module, options)
        heads, width = key.shape[1], value.shape[3]
        if key.shape[:3] != value.shape[:3] or key.shape[2] != query.shape[2] or query.shape[1] % heads:
            raise NotSupported(f"{type(module).__name__} attends to other keys than its tokens' own")
        window = self._window(module, mask, options.get("sliding_window"))
        self.layers[index] = AttentionLayer(heads, key.shape[3], width, window, key.dtype)
        return value.new_zeros(1, query.shape[2], query.shape[1], width)

    def _window(self, module: Any, mask: object, given: Any) -> int:
        if not isinstance(mask, Mask):
            raise NotSupported(f"{type(module).__name__} has a mask that is not one of Hugging Face's")
        if mask not in self._windows:
            own = (given, getattr(module, "sliding_window", None), getattr(module.config, "sliding_window", None))
            found = window_of(mask.function, own)
            if found is None:
                raise NotSupported(f"the mask of {type(module).__name__} is neither causal nor a causal window")
            self._windows[mask] = found
        return self._windows[mask]


def _check_options(module: Any, options: dict[str, Any]) -> None:
    if options.get("is_causal") is False or getattr(module, "is_causal", None) is False:
        raise NotSupported(f"{type(module).__name__} sees later tokens (is_causal=False)")
    for name, value in options.items():
        if name not in KNOWN and value is not None and value is not False:
            raise NotSupported(f"{type(module).__name__} passes {name} to its attention, which pages do not support")


def window_of(function: MaskFunction, candidates: Iterable[Any]) -> int | None:
    """The window of a mask, 0 for plain causal; None: another kind of mask, such as chunks or prefixes."""
    windows = sorted({size for size in candidates if isinstance(size, int) and size > 0})
    distances = sorted({*DISTANCES, 0, *(size + step for size in windows for step in (-1, 0, 1))})
    query = torch.arange(max(REACH, 2 * max(windows, default=0)))
    seen = {distance: _sees(function, query, distance) for distance in distances}
    for window in (0, *windows):
        if all(sees is (distance >= 0 and (not window or distance < window)) for distance, sees in seen.items()):
            return window
    return None


def _sees(function: MaskFunction, query: Tensor, distance: int) -> bool | None:
    """Whether queries see the key at this distance before them; None: only some do."""
    query = query[max(distance, 0) :]
    sees = torch.as_tensor(function(0, 0, query, query - distance))
    return True if bool(sees.all()) else None if bool(sees.any()) else False
