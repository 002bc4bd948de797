"""A folder becomes fused weights without Hugging Face's loader: bit for bit what fusing a live model would give."""

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as hf
from torch import Tensor

import outpace
from outpace.config import LLMConfig
from outpace.inject.modules import Embedding, FusedLayer, Linear
from outpace.inject.plan import PlannedLayer, make_plan
from outpace.inject.policies import by_class
from outpace.inject.policy import LayerSettings
from outpace.load_paged import load_paged
from tests.loading.checkpoints import MODELS, saved


def fused_by_hand(item: PlannedLayer, settings: LayerSettings) -> dict[str, Tensor]:
    """The linears of a layer, put together by copies."""
    policy = item.policy
    orders = {"rows": None, "heads": heads, "groups": groups, "quarters": quarters}
    roles = {"qkv": policy.qkv, "out": policy.out, "up": policy.up, "down": policy.down}
    found = {}
    for role, paths in roles.items():
        if paths is None:
            continue
        modules: list[Any] = [
            item.layer.get_submodule(path) for path in ((paths,) if isinstance(paths, str) else paths)
        ]
        weight = torch.cat([module.weight.t() if policy.transposed else module.weight for module in modules])
        biases = [getattr(module, "bias", None) for module in modules]
        order = orders[policy.qkv_layout] if role == "qkv" else None
        rows = torch.arange(len(weight)) if order is None else order(settings)
        found[f"{role}.weight"] = weight[rows]
        if any(bias is not None for bias in biases):
            sizes = [module.weight.shape[1 if policy.transposed else 0] for module in modules]
            parts = [torch.zeros(size) if bias is None else bias for bias, size in zip(biases, sizes, strict=True)]
            found[f"{role}.bias"] = torch.cat(parts)[rows]
    return found | experts_by_hand(item)


def experts_by_hand(item: PlannedLayer) -> dict[str, Tensor]:
    """The router, the experts and the shared MLP of a layer in our layout."""
    roles, part = item.policy.moe, item.layer.get_submodule
    if roles is None:
        return {}
    router, experts = part(roles.router), part(roles.experts)
    found: dict[str, Tensor] = {"mixture.router.weight": router.get_parameter("weight")}
    if roles.correction is not None:
        found["mixture.router.correction"] = item.layer.get_buffer(roles.correction)
    for ours, own, pairs in (("gate_up", roles.up, roles.paired), ("down", roles.down, False)):
        assert isinstance(own, str)
        stack: Tensor
        for suffix in ("", "_bias") if f"{own}_bias" in dict(experts.named_parameters()) else ("",):
            stack = experts.get_parameter(own + suffix)
            stack = stack.transpose(1, 2) if roles.transposed and not suffix else stack
            found[f"mixture.experts.{ours}{suffix}"] = (
                torch.cat([stack[:, ::2], stack[:, 1::2]], dim=1) if pairs else stack
            )
    if roles.shared is not None:
        shared = part(roles.shared)
        ups = (roles.shared_up,) if isinstance(roles.shared_up, str) else roles.shared_up
        found["mixture.dense.up.weight"] = torch.cat([shared.get_parameter(f"{name}.weight") for name in ups])
        found["mixture.dense.down.weight"] = shared.get_parameter(f"{roles.shared_down}.weight")
    if roles.shared_gate is not None:
        found["mixture.shared_gate.weight"] = item.layer.get_parameter(f"{roles.shared_gate}.weight")
    return found


def heads(settings: LayerSettings) -> Tensor:
    rows = torch.arange(3 * settings.num_heads * settings.head_dim).view(settings.num_heads, 3, -1)
    return torch.cat([rows[:, part].reshape(-1) for part in range(3)])


def groups(settings: LayerSettings) -> Tensor:
    size = settings.num_heads // settings.num_kv_heads
    rows = torch.arange((settings.num_heads + 2 * settings.num_kv_heads) * settings.head_dim)
    rows = rows.view(settings.num_kv_heads, size + 2, -1)
    return torch.cat([part.reshape(-1) for part in (rows[:, :-2], rows[:, -2], rows[:, -1])])


def quarters(settings: LayerSettings) -> Tensor:
    rows = torch.arange(3 * settings.num_heads * settings.head_dim).view(4, 3, -1)
    return torch.cat([rows[:, part].reshape(-1) for part in (0, 2, 1)])


@pytest.fixture(autouse=True)
def no_loader_of_hugging_face(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: Any, **kwargs: Any) -> None:
        raise AssertionError("from_pretrained was called")

    monkeypatch.setattr(hf.PreTrainedModel, "from_pretrained", refuse)


@pytest.mark.parametrize("family", MODELS)
def test_fused_weights_are_those_of_a_live_model(family: str, tmp_path: Path) -> None:
    model = saved(family, tmp_path)
    plan = make_plan(model, by_class())
    parts = load_paged(tmp_path, LLMConfig(dtype="fp32", device="cpu", max_out_tokens=64), tokenizer=False)
    for item in plan.layers:
        layer = parts.module.get_submodule(item.path)
        assert isinstance(layer, FusedLayer)
        for name, expected in fused_by_hand(item, item.settings).items():
            assert torch.equal(layer.get_parameter(name), expected), f"{item.path}.{name}"
    roles = plan.layers[0].policy.model
    assert roles is not None
    for path, kind in ((roles.embed, Embedding), (roles.head, Linear)):
        made, own = parts.module.get_submodule(path), model.get_submodule(path)
        assert isinstance(made, kind)
        assert torch.equal(made.get_parameter("weight"), own.get_parameter("weight"))
    tied = model.get_parameter(f"{roles.embed}.weight") is model.get_parameter(f"{roles.head}.weight")
    pair = [parts.module.get_parameter(f"{path}.weight") for path in (roles.embed, roles.head)]
    assert (pair[0].data_ptr() == pair[1].data_ptr()) == tied
    ids = torch.randint(3, 90, (2, 9), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        torch.testing.assert_close(parts.module(ids).logits, model(ids).logits, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("family", ["llama", "gpt2", "bloom", "falcon-40b", "mixtral"])
def test_another_dtype_is_converted_once(family: str, tmp_path: Path) -> None:
    model = saved(family, tmp_path)
    plan = make_plan(model, by_class())
    parts = load_paged(tmp_path, LLMConfig(dtype="bf16", device="cpu", max_out_tokens=64), tokenizer=False)
    for item in plan.layers:
        for name, expected in fused_by_hand(item, item.settings).items():
            found = parts.module.get_parameter(f"{item.path}.{name}")
            assert torch.equal(found, expected.bfloat16()), f"{item.path}.{name}"


def test_an_empty_module_is_filled_from_a_folder(tmp_path: Path) -> None:
    model: Any = saved("llama", tmp_path)
    with outpace.OnDevice(dtype=torch.float16, device="meta"):
        empty = hf.LlamaForCausalLM(model.config)
    assert {parameter.device.type for parameter in empty.parameters()} == {"meta"}
    options: dict[str, Any] = {"dtype": "fp32", "device": "cpu", "checkpoint": tmp_path}
    for inject in (False, True):
        engine = outpace.init_inference(empty, replace_with_kernel_inject=inject, **options)
        ids = torch.tensor([[5, 6, 7]])
        assert torch.equal(engine.generate(ids, max_new_tokens=9), model.generate(ids, max_new_tokens=9))
