"""Checks and prepares the arguments of `generate`, and restores the caller's prompt in the result."""

import functools
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers import GenerationConfig

from outpace.config import InferenceConfig
from outpace.errors import InputError, NotSupported
from outpace.loading.inspect import ModelInfo, generation_config, token_list
from outpace.types import check_vocabulary

DEFAULT_NEW_TOKENS = 20  # Hugging Face's, when neither max_new_tokens nor max_length is given
_PER_TOKEN = ("inputs", "input_ids", "inputs_embeds", "attention_mask", "token_type_ids", "position_ids")


@dataclass(frozen=True)
class Call:
    """A checked call of generate."""

    kwargs: dict[str, Any]
    setting: Callable[[str], Any]
    """A generation setting as Hugging Face resolves it."""
    mask: torch.Tensor | None = None
    """Which tokens of a decoder's prompt are not padding, as given or by the pad token; None: all."""
    prompt: torch.Tensor | None = None
    """The caller's right-padded prompt, if its padding was moved to the left."""

    def restore(self, output: Any) -> Any:
        """The output with the caller's own prompt in front of the new tokens."""
        if self.prompt is None:
            return output
        sequences = output if isinstance(output, torch.Tensor) else output.sequences
        batch, length = self.prompt.shape
        sequences[:, :length] = self.prompt.repeat_interleave(sequences.shape[0] // batch, dim=0)
        return output


def check_call(
    module: nn.Module, info: ModelInfo, config: InferenceConfig, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> Call:
    """Check a call before anything is allocated, and move right padding to the left."""
    if not info.can_generate:
        raise NotSupported(f"generate: {type(module).__name__} is not a generative model; call the engine itself")
    named = _by_name(module, args, kwargs)
    settings = _Settings(named, generation_config(module))
    if settings.get("num_beams") not in (None, 1):
        raise NotSupported("num_beams: beam search is not supported; leave num_beams at 1")
    ids = _check_ids(named, info)
    prompt = _prompt(named, ids)
    mask = _check_mask(named, prompt)
    _check_length(named, prompt, settings, info, config)
    if info.kind == "causal":
        mask = _implied_mask(ids, settings) if mask is None else mask
        named, moved = _pad_left(named, ids, mask)
        return Call(named, settings.get, mask if moved is None else named["attention_mask"], moved)
    return Call(named, settings.get)


class _Settings:
    """Generation settings as Hugging Face resolves them: keyword, then given config, then the model's own."""

    def __init__(self, named: Mapping[str, Any], own: Any) -> None:
        self._sources = [named, _fields(named.get("generation_config")), _fields(own)]

    def get(self, name: str) -> Any:
        return next((source[name] for source in self._sources if source.get(name) is not None), None)


def _fields(config: Any) -> Mapping[str, Any]:
    if not isinstance(config, GenerationConfig | None):
        raise InputError(f"generation_config: expected a GenerationConfig, got {type(config).__name__}")
    return {} if config is None else vars(config)


def _by_name(module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """All arguments by keyword, so that a positional prompt is checked like any other."""
    generate: Any = module.generate
    names = _positional(generate.__func__ if inspect.ismethod(generate) else generate) if args else ()
    if len(args) > len(names):
        raise InputError(f"generate: takes at most {len(names)} positional arguments, got {len(args)}")
    positional = dict(zip(names, args, strict=False))
    twice = sorted(positional.keys() & kwargs.keys())
    if twice:
        raise InputError(f"{twice[0]} is given twice, by position and by name; give it once")
    return {**positional, **kwargs}


@functools.cache
def _positional(generate: Callable[..., Any]) -> tuple[str, ...]:
    """The names of a function's arguments, without `self`."""
    given = inspect.signature(generate).parameters.items()
    return tuple(name for name, each in given if each.kind != each.VAR_KEYWORD and name != "self")


def _check_ids(named: Mapping[str, Any], info: ModelInfo) -> torch.Tensor | None:
    """The token ids of the prompt, if it is given as ids."""
    if named.get("inputs") is not None and named.get("input_ids") is not None:
        raise InputError("input_ids is given twice, by position (inputs) and by name; give it once")
    name = "inputs" if named.get("inputs") is not None else "input_ids"
    ids = named.get(name)
    if ids is None:
        return None
    if not isinstance(ids, torch.Tensor):
        hint = "unpack it: generate(**inputs)" if isinstance(ids, Mapping) else "make it a tensor: torch.tensor([ids])"
        raise InputError(f"input_ids: expected a tensor of token ids [batch, length], got {type(ids).__name__}; {hint}")
    if ids.is_floating_point() or ids.dtype == torch.bool:
        if info.kind == "encoder-decoder" and name == "inputs":
            return None  # features of speech or of an image
        raise InputError(f"input_ids: expected integer token ids, got {ids.dtype}")
    if ids.dim() != 2:
        raise InputError(
            f"input_ids: expected shape [batch, length], got {list(ids.shape)}; use input_ids.unsqueeze(0)?"
        )
    if ids.numel() == 0:
        raise InputError(f"input_ids: the prompt is empty (shape {list(ids.shape)}); give at least one token")
    check_vocabulary("input_ids", info.vocab_size, *(int(value) for value in torch.aminmax(ids)))
    return ids


def _prompt(named: Mapping[str, Any], ids: torch.Tensor | None) -> torch.Tensor | None:
    """The prompt as embeddings [batch, length, width] if they are given, otherwise as ids [batch, length]."""
    embeds = named.get("inputs_embeds")
    if embeds is None:
        return ids
    if not isinstance(embeds, torch.Tensor) or embeds.dim() != 3:
        shape = list(embeds.shape) if isinstance(embeds, torch.Tensor) else type(embeds).__name__
        raise InputError(f"inputs_embeds: expected a tensor [batch, length, width], got {shape}")
    return embeds


def _check_mask(named: Mapping[str, Any], prompt: torch.Tensor | None) -> torch.Tensor | None:
    mask = named.get("attention_mask")
    if mask is None or prompt is None:
        return None
    if not isinstance(mask, torch.Tensor):
        raise InputError(f"attention_mask: expected a tensor, got {type(mask).__name__}")
    batch, length = prompt.shape[:2]
    if mask.dim() != 2 or mask.shape[0] != batch or mask.shape[1] < length:
        raise InputError(f"attention_mask: expected the shape of the prompt {[batch, length]}, got {list(mask.shape)}")
    if bool(((mask != 0) & (mask != 1)).any()):
        raise InputError("attention_mask: expected 1 for tokens and 0 for padding, got other values")
    empty = (mask != 0).sum(dim=1).eq(0)
    if bool(empty.any()):
        raise InputError(f"attention_mask: row {int(empty.nonzero()[0])} masks every token of its prompt")
    return mask


def _check_length(
    named: Mapping[str, Any], given: torch.Tensor | None, settings: _Settings, info: ModelInfo, config: InferenceConfig
) -> None:
    """Raise if prompt and new tokens do not fit, however each of them was given."""
    prompt = _prompt_length(named, given, info)
    name, total = _total_length(prompt, settings, info)
    limit = config.max_out_tokens
    if prompt + config.min_out_tokens > limit:
        raise InputError(
            f"input_ids: a prompt of {prompt} tokens leaves no room for {config.min_out_tokens} new ones in "
            f"max_out_tokens={limit}; give init_inference a larger max_out_tokens, or shorten the prompt"
        )
    if total <= prompt:
        raise InputError(
            f"{name}: a prompt of {prompt} tokens leaves no room for new ones in {total}; shorten the prompt"
        )
    if total > limit:
        raise InputError(
            f"{name}: a prompt of {prompt} tokens and {total - prompt} new ones make {total}, more than "
            f"max_out_tokens={limit}; give init_inference max_out_tokens={total}, or ask for fewer"
        )
    if info.kind == "causal" and info.max_positions is not None and total > info.max_positions:
        raise InputError(
            f"{name}: a prompt of {prompt} tokens and {total - prompt} new ones make {total}, more than the "
            f"{info.max_positions} positions of the model; ask for fewer"
        )


def _total_length(prompt: int, settings: _Settings, info: ModelInfo) -> tuple[str, int]:
    """The setting that limits the sequence, and the most tokens it allows, by Hugging Face's rules."""
    for name in ("max_new_tokens", "max_length"):
        value = settings.get(name)
        if value is None:
            continue
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise InputError(f"{name}: expected an integer from 1, got {value!r}")
        return name, value + prompt if name == "max_new_tokens" else value
    total = prompt + DEFAULT_NEW_TOKENS
    return "max_new_tokens", total if info.max_positions is None else min(total, info.max_positions)


def _prompt_length(named: Mapping[str, Any], given: torch.Tensor | None, info: ModelInfo) -> int:
    """Tokens that the decoder starts from."""
    if info.kind == "encoder-decoder":
        start = named.get("decoder_input_ids")
        return start.shape[-1] if isinstance(start, torch.Tensor) else 1
    return given.shape[1] if given is not None else 1


def _implied_mask(ids: torch.Tensor | None, settings: _Settings) -> torch.Tensor | None:
    """Hugging Face's rule: without a mask, pad tokens are padding, unless the pad token is also an end token."""
    pad, ends = (token_list(name, settings.get(name)) for name in ("pad_token_id", "eos_token_id"))
    if ids is None or not pad or pad[0] in ends:
        return None
    mask = ids.ne(pad[0])
    empty_row, no_padding = (bool(fact) for fact in (~mask.any(dim=1).all(), mask.all()))
    return None if empty_row or no_padding else mask.long()


def _pad_left(
    named: dict[str, Any], ids: torch.Tensor | None, mask: torch.Tensor | None
) -> tuple[dict[str, Any], torch.Tensor | None]:
    """Move right padding to the left, because decoders continue from the last column.

    Returns the arguments, and the original ids if they were moved.
    """
    prompt = _prompt(named, ids)
    if mask is None or prompt is None or named.get("past_key_values") is not None or mask.shape != prompt.shape[:2]:
        return named, None
    trailing = mask.flip(1).ne(0).to(torch.int64).argmax(dim=1)  # [batch] masked columns at the end of each row
    if not bool(trailing.any()):
        return named, None
    columns = torch.arange(mask.shape[1], device=mask.device)
    source = (columns[None, :] - trailing[:, None]) % mask.shape[1]
    moved = dict(named, attention_mask=mask)
    for name in _PER_TOKEN:
        tensor = moved.get(name)
        if isinstance(tensor, torch.Tensor) and tensor.shape[:2] == mask.shape:
            index = source.reshape(*source.shape, *([1] * (tensor.dim() - 2))).expand_as(tensor)
            moved[name] = tensor.gather(1, index)
    return moved, ids if ids is not None and ids.shape == mask.shape else None
