"""Decides which calls of `generate` run over pages and which need Hugging Face's own loop, with the reason."""

import functools
import threading
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from torch import Tensor, nn
from transformers import GenerationConfig

from outpace.errors import NotSupported
from outpace.inject.injection import Paged
from outpace.inject.modules import FusedLayer
from outpace.inject.plan import foreign_hooks
from outpace.loading.inspect import generation_config, token_list
from outpace.log import chosen
from outpace.runner.decode import PagedDecoder
from outpace.runner.sequences import Measure

Setting = Callable[[str], Any]
"""A generation setting as Hugging Face resolves it: keyword, then the given config, then the model's."""

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
"""Arguments that only Hugging Face's loop supports, and the test for whether they are in use."""


_PLAIN_ARGUMENTS = frozenset(
    {"inputs", "input_ids", "attention_mask", "max_new_tokens", "max_length", "do_sample", "eos_token_id"}
    | {"pad_token_id", "use_cache", "generation_config"}
)
"""Arguments that the greedy loop handles itself."""
_PLAIN_SETTINGS = frozenset(
    {"max_new_tokens", "max_length", "do_sample", "eos_token_id", "pad_token_id", "bos_token_id", "use_cache"}
    | {"temperature", "top_k", "top_p", "min_p", "typical_p", "epsilon_cutoff", "eta_cutoff", "top_h"}
    | {"transformers_version", "_from_model_config", "_commit_hash", "_original_object_hash", "trust_remote_code"}
)
"""Settings that the greedy loop handles, or that only affect sampling."""


class FastGenerate:
    """The paged loop of one injected model. Its pages are allocated by the first call that can use them."""

    def __init__(
        self,
        model: nn.Module,
        paged: Paged,
        *,
        max_tokens: int,
        graphs: bool,
        measure: Measure,
        kv_cache_dtype: str = "auto",
    ) -> None:
        options: dict[str, Any] = {"graphs": graphs, "kv_cache_dtype": kv_cache_dtype}
        self._make = lambda: PagedDecoder(paged(max_tokens), max_tokens, measure, **options)
        self._more = "" if kv_cache_dtype == "auto" else "; it does not quantize the KV cache (kv_cache_dtype)"
        self._decoder: PagedDecoder | None = None
        self._making = threading.Lock()
        self._refused = False
        self._logged: set[str] = set()
        self._own = lambda: generation_config(model)
        self._watched = _around_fused_layers(model)
        self._windows = _may_have_windows(model)
        self._neutral = vars(GenerationConfig())

    def greedy(self, arguments: Mapping[str, Any], mask: Tensor | None, setting: Setting) -> Tensor | None:
        """Run a plain greedy call directly, since Hugging Face's preparation takes longer than a token."""
        ids = arguments.get("input_ids", arguments.get("inputs"))
        if not isinstance(ids, Tensor) or (mask is not None and mask.shape != ids.shape) or self._hooked():
            return None
        if not self._is_plain(arguments, setting) or self._counts_holes(mask) or (decoder := self._made()) is None:
            return None
        new, length = setting("max_new_tokens"), setting("max_length")
        end = arguments["eos_token_id"] if "eos_token_id" in arguments else setting("eos_token_id")
        ends, pads = token_list("eos_token_id", end), token_list("pad_token_id", setting("pad_token_id"))
        limit = ids.shape[1] + new if new is not None else length
        return decoder.greedy(ids, mask, limit, ends, next(iter((*pads, *ends)), None))

    def _reasons(self, arguments: Mapping[str, Any], mask: Tensor | None, setting: Setting) -> Iterator[str]:
        for name, in_use in _HUGGING_FACE_ONLY.items():
            if in_use(arguments.get(name) if name in arguments else setting(name)):
                yield f"{name} is not supported by the paged loop"
        ids = arguments.get("input_ids", arguments.get("inputs"))
        if isinstance(ids, Tensor) and mask is not None and mask.shape != ids.shape:
            yield "attention_mask and prompt differ in shape"
        elif self._counts_holes(mask):
            yield "attention_mask has holes, which Hugging Face counts in a sliding window and the paged loop does not"
        if self._hooked():
            yield "a module has a hook, which the paged loop would not call"

    def _hooked(self) -> bool:
        return any(foreign_hooks(module) for module in self._watched)

    def _counts_holes(self, mask: Tensor | None) -> bool:
        """Whether a mask has holes in a model with sliding windows, which Hugging Face counts in columns."""
        return self._windows and mask is not None and bool(((mask[:, :-1] != 0) & (mask[:, 1:] == 0)).any())

    def _is_plain(self, arguments: Mapping[str, Any], setting: Setting) -> bool:
        """Whether the greedy loop supports all arguments and all settings of the generation configs."""
        if not arguments.keys() <= _PLAIN_ARGUMENTS or setting("do_sample"):
            return False
        if setting("max_new_tokens") is None and setting("max_length") is None:
            return False
        configs = (arguments.get("generation_config"), self._own())
        return all(
            not value or value == self._neutral.get(name) or name in _PLAIN_SETTINGS
            for config in configs
            if config is not None
            for name, value in vars(config).items()
        )

    def _made(self) -> PagedDecoder | None:
        """The loop; None: this model cannot run over pages (logged once)."""
        with self._making:
            if self._decoder is None and not self._refused:
                try:
                    self._decoder = self._make()
                except NotSupported as error:
                    self._refused = True
                    chosen("generate", "Hugging Face's loop", f"{error}{self._more}")
            return self._decoder

    def loop(self, arguments: Mapping[str, Any], mask: Tensor | None, setting: Setting) -> Callable[..., Any] | None:
        """The function to pass as `custom_generate`; None: Hugging Face's loop must run (the reason is logged)."""
        reason = next(self._reasons(arguments, mask, setting), None)
        if reason is not None:
            if reason not in self._logged:
                chosen("generate", "Hugging Face's loop", reason + self._more)
                self._logged.add(reason)
            return None
        decoder = self._made()
        return None if decoder is None else functools.partial(decoder, streamer=arguments.get("streamer"))


def _around_fused_layers(model: nn.Module) -> list[nn.Module]:
    """Fused layers and their parents: modules that the paged loop does not call as the model does."""
    fused = [path for path, module in model.named_modules() if isinstance(module, FusedLayer)]
    inside = tuple(f"{path}." for path in fused)
    return [module for path, module in model.named_modules() if fused and path and not path.startswith(inside)]


def _may_have_windows(model: nn.Module) -> bool:
    """Whether a layer may have a sliding window: unknown without fused layers, so True."""
    layers = [module for module in model.modules() if isinstance(module, FusedLayer)]
    return not layers or any(layer.settings.window for layer in layers)
