"""Help for tests of checkpoints: tiny models of the families, and tensors read back from `Weights`."""

import os
import warnings
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as hf
from torch import Tensor, nn

from outpace.errors import ModelError
from outpace.loading import read_source
from outpace.loading.open import open_weights
from outpace.loading.weights import Source, Weights
from tests.models import tiny

FAMILIES = ("llama", "gpt2", "opt", "bloom", "gpt_neox", "falcon", "bert", "t5")


def state(family: str) -> dict[str, Tensor]:
    """The tensors of a tiny model, each with memory of its own."""
    return {name: value.detach().clone() for name, value in tiny(family).state_dict().items()}


def read(source: Source) -> Tensor:
    """A tensor put together from its pieces, which write each element once and have the dtype they claim."""
    written = torch.zeros(source.shape, dtype=torch.int32)
    for piece in source.pieces:
        assert piece.dtype == source.dtype
        written[piece.into] += 1
    assert bool((written == 1).all())
    return read_source.read(source)


def same_bits(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors are the same; NaN equals itself."""
    if (one.shape, one.dtype) != (other.shape, other.dtype):
        return False
    return torch.equal(one.reshape(-1).view(torch.uint8), other.reshape(-1).view(torch.uint8))


def check_equal(weights: Weights, expected: Mapping[str, Tensor]) -> None:
    """The same names, and the same bits in each tensor."""
    assert weights.sources.keys() == expected.keys()
    for name, source in weights.sources.items():
        assert same_bits(read(source), expected[name]), name


def refused(source: object, **options: object) -> str:
    """What the error says about a checkpoint that cannot be opened."""
    with pytest.raises(ModelError) as caught:
        open_weights(source, **options)  # type: ignore[arg-type]
    return str(caught.value)


class Harm:
    """Runs code when it is unpickled as pickle does it: makes a folder, which a test looks for."""

    def __init__(self, place: Path) -> None:
        self.place = place

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[str]]:
        return os.mkdir, (str(self.place),)


def shapes_of(tensors: Mapping[str, Tensor]) -> dict[str, tuple[int, ...]]:
    """As `open_weights` takes them."""
    return {name: tuple(value.shape) for name, value in tensors.items()}


def split(tensors: Mapping[str, Tensor], degree: int, version: float = 2.0) -> list[dict[str, Tensor]]:
    """What each rank would save: matrices split in one of their dimensions, fused query, key, value as in Megatron."""
    ranks: list[dict[str, Tensor]] = [{} for _ in range(degree)]
    for number, (name, value) in enumerate(tensors.items()):
        for rank, part in zip(ranks, _parts(name, value, degree, version, number), strict=True):
            rank[name] = part.clone()
    return ranks


def _parts(name: str, value: Tensor, degree: int, version: float, number: int) -> list[Tensor]:
    if "query_key_value" in name:
        if version != 0:
            return list(value.chunk(degree))
        query, key, value = (part.chunk(degree) for part in value.chunk(3))  # type: ignore[assignment]
        return [torch.cat(parts) for parts in zip(query, key, value, strict=True)]
    dim = number % 2
    if value.dim() < 2 or value.shape[dim] % degree:
        return [value] * degree
    return list(value.chunk(degree, dim))


SMALL: dict[str, Any] = {
    "vocab_size": 96, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 64, "eos_token_id": None, "pad_token_id": 1,
}  # fmt: skip
GPT: dict[str, Any] = {"vocab_size": 96, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64, "n_ctx": 64}
FALCON: dict[str, Any] = {"vocab_size": 96, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
SPARSE: dict[str, Any] = {"num_experts_per_tok": 2, "moe_intermediate_size": 16}
GROUPED: dict[str, Any] = {"n_routed_experts": 12, "n_shared_experts": 1, "head_dim": 8}
MODELS: dict[str, Any] = {
    **{family: partial(tiny, family) for family in ("llama", "qwen3", "gemma3", "gpt2", "opt", "bloom", "gpt_neox")},
    "mixtral": partial(tiny, "mixtral"),
    "gptj": lambda: hf.GPTJForCausalLM(hf.GPTJConfig(**GPT, rotary_dim=4)),
    "codegen": lambda: hf.CodeGenForCausalLM(hf.CodeGenConfig(**GPT, rotary_dim=4)),
    "gpt_bigcode": lambda: big_code(),
    "gpt_neo": lambda: hf.GPTNeoForCausalLM(
        hf.GPTNeoConfig(
            vocab_size=96, hidden_size=32, num_layers=2, num_heads=4, attention_types=[[["global", "local"], 1]]
        )
    ),
    "falcon": lambda: hf.FalconForCausalLM(hf.FalconConfig(**FALCON, multi_query=True)),
    "falcon-40b": lambda: hf.FalconForCausalLM(
        hf.FalconConfig(**FALCON, new_decoder_architecture=True, num_kv_heads=2)
    ),
    "falcon-rw": lambda: hf.FalconForCausalLM(
        hf.FalconConfig(**FALCON, multi_query=False, alibi=True, bias=True, parallel_attn=False)
    ),
    "mpt": lambda: hf.MptForCausalLM(hf.MptConfig(vocab_size=96, d_model=32, n_layers=2, n_heads=4, max_seq_len=64)),
    "phi": lambda: hf.PhiForCausalLM(hf.PhiConfig(**SMALL)),
    "phi3": lambda: hf.Phi3ForCausalLM(hf.Phi3Config(**SMALL)),
    "gemma2": lambda: hf.Gemma2ForCausalLM(hf.Gemma2Config(**SMALL, head_dim=8)),
    "stablelm": lambda: hf.StableLmForCausalLM(hf.StableLmConfig(**SMALL)),
    "starcoder2": lambda: hf.Starcoder2ForCausalLM(hf.Starcoder2Config(**SMALL)),
    "granite": lambda: hf.GraniteForCausalLM(hf.GraniteConfig(**SMALL)),
    "cohere": lambda: hf.CohereForCausalLM(hf.CohereConfig(**SMALL)),
    "persimmon": lambda: hf.PersimmonForCausalLM(hf.PersimmonConfig(**{**SMALL, "num_key_value_heads": None})),
    "gpt_oss": lambda: hf.GptOssForCausalLM(hf.GptOssConfig(**SMALL, num_local_experts=4, head_dim=8)),
    "qwen2_moe": lambda: hf.Qwen2MoeForCausalLM(
        hf.Qwen2MoeConfig(**SMALL, **SPARSE, num_experts=12, shared_expert_intermediate_size=24, mlp_only_layers=[0])
    ),
    "qwen3_moe": lambda: hf.Qwen3MoeForCausalLM(hf.Qwen3MoeConfig(**SMALL, **SPARSE, num_experts=4)),
    "olmoe": lambda: hf.OlmoeForCausalLM(hf.OlmoeConfig(**SMALL, num_experts=12, num_experts_per_tok=2)),
    "phimoe": lambda: hf.PhimoeForCausalLM(hf.PhimoeConfig(**SMALL, num_local_experts=12)),
    "granitemoe": lambda: hf.GraniteMoeForCausalLM(hf.GraniteMoeConfig(**SMALL, num_local_experts=4)),
    "granitemoeshared": lambda: hf.GraniteMoeSharedForCausalLM(
        hf.GraniteMoeSharedConfig(**SMALL, num_local_experts=4, shared_intermediate_size=24)
    ),
    "dots1": lambda: hf.Dots1ForCausalLM(
        hf.Dots1Config(**SMALL, **SPARSE, **GROUPED, first_k_dense_replace=1)
    ),
    "glm4_moe": lambda: hf.Glm4MoeForCausalLM(
        hf.Glm4MoeConfig(**SMALL, **SPARSE, **GROUPED)
    ),
}  # fmt: skip


def big_code() -> nn.Module:
    with warnings.catch_warnings():  # its file uses torch.jit
        warnings.simplefilter("ignore")
        return hf.GPTBigCodeForCausalLM(hf.GPTBigCodeConfig(**GPT))


def saved(family: str, folder: Path) -> nn.Module:
    torch.manual_seed(0)
    model = MODELS[family]().eval()
    with torch.no_grad():
        for tensor in (*model.parameters(), *(each for name, each in model.named_buffers() if "correction" in name)):
            tensor.add_(torch.randn(tensor.shape) * 0.1)
    model.save_pretrained(folder)
    return model


Tensors = dict[str, Tensor]


def save_deepspeed(folder: Path, ranks: list[Tensors], tag: str = "global_step7", **more: Any) -> Path:
    (folder / tag).mkdir()
    (folder / "latest").write_text(tag)
    for rank, tensors in enumerate(ranks):
        saved = {"module": tensors, "mp_world_size": len(ranks), "optimizer": None, "param_shapes": [], **more}
        torch.save(saved, folder / tag / f"mp_rank_{rank:02d}_model_states.pt")
    (folder / tag / "zero_pp_rank_0_mp_rank_00_optim_states.pt").touch()  # of ZeRO-1: says nothing about the weights
    return folder
