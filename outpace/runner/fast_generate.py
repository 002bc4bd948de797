"""Which calls of `generate` run over pages, and which must go to Hugging Face's own loop, with the reason."""

import functools
from collections.abc import Callable, Mapping
from typing import Any

from torch import nn

from outpace.inject.apply import Injected
from outpace.inject.paged import PagedModel
from outpace.log import chosen
from outpace.runner.decode import Measure, PagedDecoder

Setting = Callable[[str], Any]
"""A generation setting as Hugging Face resolves it: keyword, then given config, then the model's own."""

_HUGGING_FACE_ONLY: Mapping[str, Callable[[Any], bool]] = {
    "assistant_model": lambda value: value is not None,
    "custom_generate": lambda value: value is not None,
    "past_key_values": lambda value: value is not None,
    "inputs_embeds": lambda value: value is not None,
    "position_ids": lambda value: value is not None,
    "token_type_ids": lambda value: value is not None,
    "stop_strings": lambda value: value is not None,
    "return_dict_in_generate": bool,
    "use_cache": lambda value: value is False,
    "cache_implementation": lambda value: value is not None,
    "prompt_lookup_num_tokens": lambda value: value is not None,
    "penalty_alpha": lambda value: bool(value),
    "dola_layers": lambda value: value is not None,
    "guidance_scale": lambda value: value is not None and value != 1,
    "negative_prompt_ids": lambda value: value is not None,
    "synced_gpus": bool,
}
"""Arguments that only Hugging Face's loop understands, and when they are in use."""


class FastGenerate:
    """The paged loop of one injected model; its pages come with the first call that can use them."""

    def __init__(
        self, model: nn.Module, injected: Injected, *, max_tokens: int, graphs: bool, measure: Measure
    ) -> None:
        self._make = lambda: PagedDecoder(PagedModel(model, injected, max_tokens), max_tokens, measure, graphs=graphs)
        self._decoder: PagedDecoder | None = None
        self._told: set[str] = set()

    def loop(self, arguments: Mapping[str, Any], setting: Setting) -> Callable[..., Any] | None:
        """What to pass as `custom_generate`; None: Hugging Face's loop must run, and the log says why."""
        for name, in_use in _HUGGING_FACE_ONLY.items():
            if in_use(arguments.get(name) if name in arguments else setting(name)):
                if name not in self._told:
                    chosen("generate", "Hugging Face's loop", f"{name} is not known to the paged one")
                    self._told.add(name)
                return None
        if self._decoder is None:
            self._decoder = self._make()
        return functools.partial(self._decoder, streamer=arguments.get("streamer"))
