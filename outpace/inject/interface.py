"""Level 0: a model without a policy keeps its own layers, with paged attention by Hugging Face's AttentionInterface."""

import inspect
import itertools
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from transformers import GenerationMixin

from outpace.cache.kv_cache import Pages, allocate
from outpace.errors import ModelError, NotSupported
from outpace.inject.attention_interface import KEYWORD, PAGED, AttentionLayer, InterfaceAttention, register, switched
from outpace.inject.experts_interface import StackedExperts, stacked_experts
from outpace.inject.make import Maker
from outpace.inject.paged import MICRO_TOKENS, Batch, BatchModel
from outpace.inject.policy import looks_ahead
from outpace.inject.probe import probe
from outpace.inject.rope import LENGTH_DEPENDENT, rope_types
from outpace.inject.staged import width
from outpace.kernels.dispatch import Kernels
from outpace.log import chosen
from outpace.parallel.group import ALONE, Group
from outpace.parallel.pipeline import ONLY, Stage
from outpace.parallel.vocabulary import ALL

if TYPE_CHECKING:
    from outpace.offload.streaming import Streaming

LENGTHS = (12, 8)  # tokens of the sequences in the check
STEPS = 3  # of these tokens, the last of each sequence, run as decodes
LIMITS: Mapping[torch.dtype, float] = {torch.float16: 2e-2, torch.bfloat16: 5e-2}
"""Largest error of the median token. Others may differ more: rounding can send a token to other experts."""
LIMIT = 1e-4
TF32_LIMIT = 1e-2


class Interface:
    """A model that runs on level 0. Its class and config are checked here, its results in `paged`."""

    def __init__(
        self, model: nn.Module, kernels: Kernels, *, experts: bool = True, ranks: Group = ALONE, stage: Stage = ONLY
    ) -> None:
        self._model = model
        self._stage = stage
        self._kernels = kernels
        self._experts = experts
        self._ranks = ranks
        if reason := next((found for check in _CHECKS if (found := check(model))), None):
            raise refused(model, reason)

    def check(self, make: Maker) -> None:
        """Nothing is made on this level."""

    def apply(self) -> None:
        """Nothing is changed on this level."""

    def has_pages(self, max_positions: int) -> bool:
        return True

    def varies(self) -> str | None:
        """Its own layers are not batch-invariant."""
        return "it runs with its own layers, since no policy knows them"

    def paged(self) -> Callable[[int], BatchModel]:
        """The paged form; called when the model is on its device. Raises if logits differ from its own forward's.

        Uses our experts if its stacks allow it and the logits stay the same.
        """
        experts = stacked_experts(self._model, self._kernels) if self._experts else None
        if experts is not None:
            try:
                return self._checked(experts)
            except NotSupported as error:
                chosen("experts", "the model's own", f"with ours: {error}")
        return self._checked(None)

    def _checked(self, experts: StackedExperts | None) -> Callable[[int], BatchModel]:
        model = self._model.eval()
        try:
            paged = InterfaceModel(model, self._kernels, experts, self._ranks, self._stage)
            error, limit = check(model, paged)
        except ModelError:
            raise  # broken weights: not a problem of this level
        except NotSupported as cause:
            raise refused(model, str(cause)) from cause
        except Exception as cause:  # the model's own code, called in an unusual way
            raise refused(model, f"{type(cause).__name__} in a forward over pages: {cause}") from cause
        if not error <= limit:
            raise refused(model, f"its logits over pages differ from its own by {error:.1e}, more than {limit:.0e}")
        chosen("injection", "level 0: its own layers, attention over pages", _reason(model, error))
        if paged.device.type == "cuda" and not paged.capturable:
            chosen("cuda graphs", "none in generate", f"{type(model).__name__} says it cannot be captured")
        return lambda max_positions: paged


class InterfaceModel:
    """Runs batches through the model's own forward. The model is changed only during a call."""

    def __init__(
        self,
        model: Any,
        kernels: Kernels,
        experts: StackedExperts | None = None,
        ranks: Group = ALONE,
        stage: Stage = ONLY,
    ) -> None:
        register()
        self.kernels = kernels
        self.stage, self.hidden_size, self.vocab_size = stage, model.config.hidden_size, width(_head(model))
        self._model = model
        self._experts = experts
        self._configs = _configs(model)
        with stage.handing():
            self._layers = probe(model, self._configs, model.config.num_hidden_layers)
        self._picks_rows = "logits_to_keep" in inspect.signature(model.forward).parameters
        layers = [self._layers[index] for index in range(len(self._layers))]
        self.kv_heads = [(layer.kv_heads, layer.key_dim, layer.value_dim) for layer in layers]
        self.dtype, self.device = _dtype(layers), next(model.parameters()).device
        self.reentrant = False  # a call changes the model's config
        self.capturable = bool(getattr(model, "_can_compile_fullgraph", False)) and ranks.capturable
        self.gives_hidden = model.base_model is not model
        self.ranks, self.vocabulary = ranks, ALL
        self.streaming: Streaming | None = None
        self.max_tokens = MICRO_TOKENS

    def forward(self, batch: Batch, pages: Pages, rows: Tensor | None = None, given: Tensor | None = None) -> Tensor:
        if not self.stage.is_last:
            return self.hidden(batch, pages, given)
        options = {"logits_to_keep": rows} if rows is not None and self._picks_rows else {}
        with self.stage.handing(None if given is None else given[None]):
            logits: Tensor = self._call(self._model, batch, pages, **options).logits[0]
        return logits if rows is None or self._picks_rows else logits.index_select(0, rows)

    def hidden(self, batch: Batch, pages: Pages, given: Tensor | None = None) -> Tensor:
        with self.stage.handing(None if given is None else given[None]) as handed:
            found: Tensor = self._call(self._model.base_model, batch, pages).last_hidden_state
        if not self.stage.is_last:
            assert handed.taken is not None, "the last layer has run"
            found = handed.taken
        return found[0]

    def sketch(self) -> "InterfaceModel":
        """Itself, since it is unknown which layers are alike."""
        return self

    def _call(self, module: Any, batch: Batch, pages: Pages, **options: Any) -> Any:
        options[KEYWORD] = InterfaceAttention(batch, pages, self._layers, self.kernels)
        ours = nullcontext() if self._experts is None else self._experts.running()
        with switched(self._configs, PAGED), ours:
            return module.forward(
                input_ids=batch.ids[None], position_ids=batch.positions[None], use_cache=False, **options
            )


@torch.no_grad()
def check(model: Any, paged: BatchModel) -> tuple[float, float]:
    """The error of paged logits relative to the model's own, and its limit. Two sequences in one batch, a prefill and
    some decodes, against each sequence alone."""
    generator = torch.Generator().manual_seed(0)
    drawn = [torch.randint(model.config.vocab_size, (length,), generator=generator) for length in LENGTHS]
    texts = [text.to(paged.device) for text in drawn]
    errors = []
    for text, found in zip(texts, _over_pages(paged, texts), strict=True):
        call = model.forward if paged.stage.count == 1 else model  # hooks of a stage need __call__
        own = call(input_ids=text[None], use_cache=False).logits[0].float()
        _check_own(model, own)
        error = (own - found.float()).abs().amax(1) / own.abs().max()
        errors += [error[:-STEPS], error[-STEPS:]]
    if paged.dtype in LIMITS:
        return max(float(error.median()) for error in errors), LIMITS[paged.dtype]
    rounds = paged.device.type == "cuda" and torch.get_float32_matmul_precision() != "highest"
    return max(float(error.max()) for error in errors), TF32_LIMIT if rounds else LIMIT


def _check_own(model: nn.Module, logits: Tensor) -> None:
    """Raise for a model whose own logits are useless."""
    if bool(logits.isnan().any()):
        raise ModelError(
            f"model: {type(model).__name__} gives NaN without Outpace; its weights are broken, load them again"
        )
    if not bool(logits.any()):
        raise ModelError(
            f"model: all logits of {type(model).__name__} are zero; its weights are all zero or were not loaded"
        )


def _over_pages(paged: BatchModel, texts: list[Tensor]) -> list[Tensor]:
    """Paged logits [L, V] of each text: a prefill of all texts in one batch, then decodes."""
    pages = allocate(paged.kv_heads, len(texts), paged.dtype, paged.device)
    begin = [range(len(text) - STEPS) for text in texts]
    batch = _batch(texts, begin, pages.block_size)
    prefill = over_stages(paged, batch, pages, torch.arange(len(batch.ids), device=paged.device))
    found = [[logits] for logits in prefill.split([len(part) for part in begin])]
    for step in range(-STEPS, 0):
        parts = [range(len(text) + step, len(text) + step + 1) for text in texts]
        logits = over_stages(paged, _batch(texts, parts, pages.block_size), pages)
        for rows, row in zip(found, logits.split(1), strict=True):
            rows.append(row)
    return [torch.cat(rows) for rows in found]


def over_stages(paged: BatchModel, batch: Batch, pages: Pages, rows: Tensor | None = None) -> Tensor:
    """The logits of a batch through all stages, returned on each stage."""
    stage, given = paged.stage, None
    if not stage.is_first:
        given = torch.empty(len(batch.ids), paged.hidden_size, dtype=paged.dtype, device=paged.device)
        stage.link.receive(given)
    found = paged.forward(batch, pages, rows, given)
    if stage.is_last:
        return found if stage.count == 1 else stage.from_last(found.contiguous())
    stage.link.send(found)
    count = len(found) if rows is None else len(rows)
    return stage.from_last(found.new_empty(count, paged.vocab_size))


def _batch(texts: list[Tensor], parts: list[range], block_size: int) -> Batch:
    """A batch of these parts of the texts. Each text has a page of its own."""
    ints: dict[str, Any] = {"dtype": torch.int32, "device": texts[0].device}
    places = [torch.tensor(part, device=texts[0].device) for part in parts]
    return Batch(
        ids=torch.cat([text[place] for text, place in zip(texts, places, strict=True)]),
        positions=torch.cat(places),
        slots=torch.cat([page * block_size + place for page, place in enumerate(places)]),
        block_table=torch.arange(len(texts), **ints)[:, None],
        seq_lens=torch.tensor([part.stop for part in parts], **ints),
        cu_q=torch.tensor([0, *itertools.accumulate(len(part) for part in parts)], **ints),
        max_q=max(len(part) for part in parts),
        max_len=block_size,
    )


def _head(model: Any) -> nn.Module:
    head = model.get_output_embeddings()
    if not isinstance(head, nn.Module):
        raise NotSupported("it does not name its head (get_output_embeddings)")
    return head


def refused(model: nn.Module, reason: str) -> NotSupported:
    """The error for a model that neither level can run."""
    return NotSupported(
        f"replace_with_kernel_inject: no policy for the layers of {type(model).__name__}, and it cannot run with its "
        f"own: {reason}. Write a policy (docs/adding-a-model.md), or use init_inference without kernel injection"
    )


def _class(model: Any) -> str | None:
    config = getattr(model, "config", None)
    if not isinstance(model, GenerationMixin) or config is None:
        return "it is not a generative model of Hugging Face"
    if getattr(config, "is_encoder_decoder", False):
        return "it is an encoder with a decoder"
    if not getattr(model, "_supports_attention_backend", False):
        return "its class does not let its attention be replaced (_supports_attention_backend)"
    return None if config.get_text_config() is config else "it reads more than text"


def _call(model: Any) -> str | None:
    given = inspect.signature(model.forward).parameters
    if "position_ids" not in given or all(each.kind != each.VAR_KEYWORD for each in given.values()):
        return "its forward takes no position_ids, or no arguments for its attention"
    if type(model).prepare_inputs_for_generation is not GenerationMixin.prepare_inputs_for_generation:
        return "it prepares the inputs of each step itself (prepare_inputs_for_generation)"
    return None


def _config(model: Any) -> str | None:
    config = model.config
    others = set(getattr(config, "layer_types", None) or ()) - {"full_attention", "sliding_attention"}
    if others:
        return f"it has layers of type {', '.join(sorted(others))}"
    if getattr(config, "attention_chunk_size", None):
        return "its attention is cut in chunks (attention_chunk_size)"
    changing = sorted(rope_types(config) & set(LENGTH_DEPENDENT))
    return f"its rope type {changing[0]} changes its frequencies with the length" if changing else None


def _ahead(model: Any) -> str | None:
    reason = looks_ahead(model.config)
    return None if reason is None else f"it {reason}"


_CHECKS: tuple[Callable[[Any], str | None], ...] = (_class, _call, _config, _ahead)


def _configs(model: nn.Module) -> list[Any]:
    """All configs that modules read; most models have one."""
    found = [getattr(module, "config", None) for module in model.modules()]
    return list({id(config): config for config in found if hasattr(config, "_attn_implementation")}.values())


def _dtype(layers: list[AttentionLayer]) -> torch.dtype:
    if len(kinds := {layer.dtype for layer in layers}) > 1:
        raise NotSupported("its layers have keys of different dtypes")
    return kinds.pop()


def _reason(model: nn.Module, error: float) -> str:
    return f"no policy knows the layers of {type(model).__name__}; logits differ by {error:.1e}"
