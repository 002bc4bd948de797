"""Reads a GGUF file of the Llama family: config, tokenizer, and tensors, dequantized one at a time."""

from collections.abc import Callable, Iterator
from copy import deepcopy
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
from gguf import GGUFReader, GGUFValueType, ReaderTensor
from gguf.quants import QuantError, dequantize
from transformers import PreTrainedConfig, PreTrainedTokenizerFast

from outpace.errors import ModelError
from outpace.loading.check_config import check_sizes
from outpace.loading.gguf_config import ROPE_FREQS, architecture_of, build_config, hf_name
from outpace.loading.gguf_tokenizer import build_tokenizer
from outpace.loading.layout import check_fetched
from outpace.loading.problems import line

if TYPE_CHECKING:
    import torch

    from outpace.loading.weights import Weights

Result = TypeVar("Result")
_READER_ERRORS = (ValueError, LookupError, TypeError, ArithmeticError, OSError, MemoryError)
"""Errors of the reader, numpy and Python for damaged files."""


@dataclass(frozen=True)
class GGUFModel:
    """A checked GGUF file: its tensors are exactly the parameters of the model."""

    path: Path
    config: PreTrainedConfig
    entries: dict[str, ReaderTensor]  # by Hugging Face name
    permuted: bool
    tokenizer: PreTrainedTokenizerFast | None  # None: the file holds none

    def weights(self, dtype: "torch.dtype | None" = None) -> "Weights":
        """Its tensors by Hugging Face names, each dequantized when it is read. dtype: None is float32."""
        import torch

        from outpace.loading.gguf_blocks import GGUFWeight
        from outpace.loading.weights import Extent, Piece, Source, Weights

        wanted = dtype or torch.float32
        sources: dict[str, Source] = {}
        for name, entry in self.entries.items():
            shape = tuple(int(size) for size in reversed(entry.shape))
            make: Callable[[], torch.Tensor] = partial(self._make, name, entry, wanted)
            if entry.data.dtype == np.uint8 and entry.tensor_type.name != "BF16" and len(shape) == 2:
                stored = tuple(entry.data.shape)
                raw = Piece(Extent(self.path, int(entry.data_offset)), stored, torch.uint8)
                heads = self._rotated_heads(name) if self.permuted else 0
                where, kind = f"model: {self.path.name}: {entry.name}", entry.tensor_type.name
                sources_of = {"": Source(stored, torch.uint8, (raw,))}
                make = GGUFWeight(where, kind, (shape[0], shape[1]), sources_of, heads, make)
            sources[name] = Source(shape, wanted, (Piece(make, shape, wanted),))
        return Weights(str(self.path), sources)

    def tensors(self, dtype: "torch.dtype") -> "Iterator[tuple[str, torch.Tensor]]":
        """Yield (Hugging Face name, tensor), dequantizing one tensor at a time."""
        for name, entry in self.entries.items():
            yield name, self._make(name, entry, dtype)

    def _make(self, name: str, entry: ReaderTensor, dtype: "torch.dtype") -> "torch.Tensor":
        import torch

        values = _dequantize(entry)
        if self.permuted and (heads := self._rotated_heads(name)):
            values = _halves_from_pairs(values, heads)
        tensor = torch.from_numpy(np.require(values, requirements=["C", "W", "O"])).to(dtype)
        if not all(map(torch.isfinite, torch.aminmax(tensor))):  # one pass; NaN comes through
            where = f"model: {self.path.name}: {entry.name}"
            raise ModelError(f"{where}: holds values that are not finite in {dtype}; use float32, or another file")
        return tensor

    def _rotated_heads(self, name: str) -> int:
        """Number of heads in the rows of a tensor that rope rotates; else 0."""
        if ".q_proj." in name:
            return int(self.config.num_attention_heads)
        return int(self.config.num_key_value_heads) if ".k_proj." in name else 0


def read_gguf(path: Path) -> GGUFModel:
    """Open a GGUF file and check everything except the values of weights."""
    return _checked(path, lambda reader: _read(path, reader))


def _checked(path: Path, read: Callable[[GGUFReader], Result]) -> Result:
    """Call `read` on a file. A damaged file is a ModelError."""
    if path.is_file():
        check_fetched(path)
    reader = _open(path)
    try:
        return read(reader)
    except ModelError as error:
        raise ModelError(f"model: {path.name}: {error}") from error
    except _READER_ERRORS as error:
        raise ModelError(f"model: {path.name} is a damaged GGUF file ({line(error)}); fetch it again") from error


def read_gguf_tokenizer(path: Path) -> PreTrainedTokenizerFast | None:
    """Only the tokenizer of a GGUF file, for a process without torch; None: the file holds none."""
    return _checked(path, _tokenizer_of)


class _BoundedReader(GGUFReader):
    """A GGUFReader that raises at the end of a truncated file, where GGUFReader silently returns less."""

    def _get(self, offset: int, dtype: Any, count: int = 1, override_order: Any = None) -> np.ndarray:
        if isinstance(self.data, np.memmap):
            # slices of a plain array are cheaper: 98,000 strings take 0.9 s instead of 3.1 s
            self.data = self.data.view(np.ndarray)  # type: ignore[assignment]
        if offset + int(count) * np.dtype(dtype).itemsize > len(self.data):
            raise ValueError("it ends early")
        found: np.ndarray = super()._get(offset, dtype, count, override_order)
        return found


def _open(path: Path) -> GGUFReader:
    if not path.is_file():
        problem = "is a folder, not a GGUF file" if path.is_dir() else "does not exist"
        raise ModelError(f"model: {path} {problem}; name the .gguf file itself")
    try:
        with path.open("rb") as file:
            magic = file.read(4)
        if magic != b"GGUF":
            raise ModelError(
                f"model: {path.name} is not a GGUF file (it is empty or begins with other bytes); check the name"
            )
        with np.errstate(over="raise"):
            reader = _BoundedReader(path)
    except _READER_ERRORS as error:
        if isinstance(error, ModelError):
            raise
        raise ModelError(f"model: {path.name} is a damaged GGUF file ({line(error)}); fetch it again") from error
    if reader.byte_order != "I":
        raise ModelError(f"model: {path.name} has the byte order of other machines; convert it for this one")
    return reader


def _read(path: Path, reader: GGUFReader) -> GGUFModel:
    metadata, config, by_name = _described(reader)
    entries = _match(config, by_name)
    _check_types(entries)
    permuted = architecture_of(metadata)[1].permuted
    return GGUFModel(path, config, entries, permuted, _build_tokenizer(metadata, config))


def _tokenizer_of(reader: GGUFReader) -> PreTrainedTokenizerFast | None:
    metadata, config, _ = _described(reader)
    return _build_tokenizer(metadata, config)


def _described(reader: GGUFReader) -> tuple[dict[str, Any], PreTrainedConfig, dict[str, ReaderTensor]]:
    """The metadata, the config of the model, and its tensors by GGUF names."""
    metadata = {key: _contents(field) for key, field in reader.fields.items()}
    _refuse_parts(metadata)
    architecture_of(metadata)  # raises for unknown architectures
    by_name = {tensor.name: tensor for tensor in reader.tensors}
    divisors = by_name.pop(ROPE_FREQS, None)
    embedding = by_name.get("token_embd.weight")
    if embedding is None:
        raise ModelError("token_embd.weight: missing from the file, so this is not a whole model")
    config = build_config(metadata, frozenset(by_name), None if divisors is None else _dequantize(divisors))
    config.vocab_size = int(embedding.shape[-1])
    return metadata, config, by_name


def _build_tokenizer(metadata: dict[str, Any], config: PreTrainedConfig) -> PreTrainedTokenizerFast | None:
    if "tokenizer.ggml.model" not in metadata:
        return None
    return build_tokenizer(metadata, config.max_position_embeddings, config.vocab_size)


def _contents(field: Any) -> Any:
    """A field's value; the reader gives None for an array without elements."""
    value = field.contents()
    return [] if value is None and field.types[:1] == [GGUFValueType.ARRAY] else value


def _refuse_parts(metadata: dict[str, Any]) -> None:
    if (kind := metadata.get("general.type", "model")) != "model":
        raise ModelError(f"general.type: this file holds {kind!r}, not a model; name the file of the model")
    if (parts := metadata.get("split.count", 0)) > 1:
        raise ModelError(f"split.count: the model is split over {parts} files; join them with llama-gguf-split --merge")


def _match(config: PreTrainedConfig, by_name: dict[str, ReaderTensor]) -> dict[str, ReaderTensor]:
    """Give each parameter of the model its tensor; missing or extra tensors are an error."""
    import torch

    from outpace.loading.skeleton import skeleton

    shapes = (tuple(int(size) for size in tensor.shape) for tensor in by_name.values())
    check_sizes(config.to_dict(), shapes, "its metadata")
    wanted = {
        name: tuple(value.shape) for name, value in skeleton(deepcopy(config), torch.float32).state_dict().items()
    }
    if config.tie_word_embeddings:
        wanted.pop("lm_head.weight")
    entries = {hf_name(name) or name: tensor for name, tensor in by_name.items()}
    if unknown := sorted(tensor.name for name, tensor in entries.items() if name not in wanted):
        raise ModelError(f"tensors that a {config.model_type} model does not have: {_some(unknown)}")
    if missing := sorted(wanted.keys() - entries.keys()):
        raise ModelError(f"parameters of the model that the file lacks: {_some(missing)}")
    for name, tensor in entries.items():
        shape = tuple(int(size) for size in reversed(tensor.shape))
        if shape != wanted[name]:
            raise ModelError(f"{tensor.name}: has shape {shape}, but the metadata of the file ask for {wanted[name]}")
    return {name: entries[name] for name in wanted}


def _check_types(entries: dict[str, ReaderTensor]) -> None:
    """Dequantize one row of each quantization type in the file, so that unsupported types fail early."""
    for entry in {entry.tensor_type: entry for entry in entries.values()}.values():
        _dequantize(entry._replace(data=entry.data[:1]))


def _dequantize(tensor: ReaderTensor) -> np.ndarray:
    try:
        values: np.ndarray = dequantize(tensor.data, tensor.tensor_type)
    except (NotImplementedError, QuantError, *_READER_ERRORS) as error:
        kind = tensor.tensor_type.name
        raise ModelError(f"{tensor.name}: cannot dequantize type {kind} ({line(error)}); use another type") from error
    return values


def _halves_from_pairs(values: np.ndarray, heads: int) -> np.ndarray:
    """Undo llama.cpp's row order within a head: (x0, y0, x1, y1, ..) to (x0, x1, .., y0, y1, ..)."""
    rows = values.shape[0]
    paired = values.reshape(heads, rows // heads // 2, 2, *values.shape[1:])  # head, pair, x or y, input
    return paired.swapaxes(1, 2).reshape(values.shape)


def _some(names: list[str]) -> str:
    return ", ".join(names[:8]) + (f" and {len(names) - 8} more" if len(names) > 8 else "")
