"""Mixtures that no policy knows: DeepSpeed's MoE layers and people's own, and what the config says of them."""

import copy
import logging
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import Tensor, nn

import outpace
from outpace import ConfigError, MoERoles, NotSupported, Routing
from outpace.inject.experts import OwnMixture
from outpace.inject.policies.llama import LLAMA
from outpace.inject.prove import expert_form
from outpace.inject.split import split_model
from outpace.parallel.spans import Split
from tests.inject.checks import padded_prompts, randomised
from tests.inject.families import VOCAB, made
from tests.inject.level0 import SMALL, engine
from tests.inject.mixtures import mixture
from tests.inject.own_mixtures import EXPERTS, WIDTH, Gated, Mine, MoE, Net, Packed, Plain, inputs, net
from tests.models import tiny


def same(model: nn.Module, **options: Any) -> Any:
    """The engine of a copy, whose results are the model's."""
    made = engine(copy.deepcopy(model), **options)
    assert all(isinstance(block, OwnMixture) for block in made.module.get_submodule("blocks").children())
    with torch.no_grad():
        (want, other), (found, beside) = model(inputs()), made(inputs())
    assert (want - found).abs().max() <= 1e-5 * want.abs().max()
    return other, beside


@pytest.mark.parametrize("kind", [Plain, Gated, Packed])
@pytest.mark.parametrize("residual", [False, True])
@pytest.mark.parametrize("k", [1, 2, 3])
def test_layers_of_deepspeed(k: int, residual: bool, kind: Any, caplog: pytest.LogCaptureFixture) -> None:
    model = net(lambda: MoE(k, residual, kind))
    asked = {"moe_experts": [EXPERTS], "type": "residual" if residual else "standard"}
    with caplog.at_level(logging.INFO, "outpace"):
        own, fused = same(model, moe=asked)
    assert "experts: 2 fused mixtures of MoE (no token is dropped: capacities are for training)" in caplog.text
    for (_, counts), (loss, tokens) in zip(own, fused, strict=True):
        assert loss == 0
        assert torch.equal(tokens, counts)


MINE: dict[str, dict[str, Any]] = {
    "two of five": {},
    "one": {"top_k": 1, "renormalise": False},
    "three, not renormalised": {"top_k": 3, "renormalise": False},
    "all": {"top_k": EXPERTS},
    "sigmoid": {"score": "sigmoid", "top_k": 3, "renormalise": False},
    "sigmoid, renormalised": {"score": "sigmoid", "kind": Packed},
    "logits of each token": {"logits": 2, "kind": Plain},
    "logits of each batch": {"logits": 3, "bias": True},
    "plain": {"kind": Plain},
    "tanh": {"kind": lambda width: Plain(width, lambda x: F.gelu(x, approximate="tanh"))},
    "squares": {"kind": lambda width: Gated(width, lambda x: F.relu(x).square())},
}


@pytest.mark.parametrize("case", MINE)
def test_mixtures_of_one_s_own(case: str) -> None:
    own, fused = same(net(lambda: Mine(**MINE[case])))
    for want, found in zip(own, fused, strict=True):
        assert len(want) == len(found)
        for mine, ours in zip(want, found, strict=True):
            torch.testing.assert_close(ours, mine, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_sixteen_bits(dtype: torch.dtype) -> None:
    model = net(Mine).to(dtype)
    fused = engine(copy.deepcopy(model), dtype=dtype)
    assert sum(isinstance(block, OwnMixture) for block in fused.module.modules()) == 2
    with torch.no_grad():
        want, found = model(inputs().to(dtype))[0], fused(inputs().to(dtype))[0]
    assert (want - found).abs().max() <= 5e-2 * want.abs().max()


class Noisy(Mine):
    def forward(self, hidden: Tensor) -> Any:
        return super().forward(hidden) + torch.randn(hidden.shape)


class Masked(Mine):
    def forward(self, hidden: Tensor, mask: Tensor | None = None) -> Any:
        return super().forward(hidden)


class Normed(Mine):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)


class Chatty(Mine):
    def forward(self, hidden: Tensor) -> Any:
        return super().forward(hidden), "and more"


def hooked() -> Net:
    model = net(Mine)
    for block in model.blocks:
        block.get_submodule("experts.0").register_forward_hook(lambda *_: None)
    return model


def tied() -> Net:
    model = net(Mine)
    model.blocks[1].get_submodule("experts.0.w1").weight = model.blocks[0].get_parameter("experts.0.w1.weight")
    return model


LEFT: dict[str, tuple[Callable[[], Net], str]] = {
    "noise": (lambda: net(Noisy), "its result is not a known weighted sum"),
    "more arguments": (lambda: net(Masked), "its forward takes more than hidden states"),
    "other weights": (lambda: net(Normed), "weights that belong neither to its router nor to its experts"),
    "other results": (lambda: net(Chatty), "it returns neither hidden states alone nor"),
    "an activation": (
        lambda: net(lambda: Mine(kind=lambda width: Plain(width, torch.sin))),
        "its experts are not a known kind of MLP",
    ),
    "a hook": (hooked, "it has a hook"),
    "ties": (tied, "its weights are also used elsewhere"),
}


@pytest.mark.parametrize("case", LEFT)
def test_what_is_not_proven_is_left_as_it_is(case: str, caplog: pytest.LogCaptureFixture) -> None:
    make, reason = LEFT[case]
    model = make()
    before = torch.get_rng_state()
    with (
        caplog.at_level(logging.INFO, "outpace"),
        pytest.raises(NotSupported, match="no policy for the layers of Net"),
    ):
        engine(model)
    assert "experts of blocks.0: left as they are (" in caplog.text
    assert reason in caplog.text
    assert torch.equal(torch.get_rng_state(), before)
    assert not any(isinstance(block, OwnMixture) for block in model.modules())


def test_a_mixture_that_is_the_model_itself_is_left(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "outpace"), pytest.raises(NotSupported, match="no policy for the layers of MoE"):
        engine(MoE())
    assert "experts of the model: left as they are (they are the model itself" in caplog.text


def test_mixtures_of_different_experts() -> None:
    torch.manual_seed(0)
    same(Net(Mine(), Mine(kind=Plain), MoE(kind=Packed), Mine(kind=lambda width: Gated(width, F.gelu))).eval())


def test_experts_that_are_not_looked_for() -> None:
    with pytest.raises(NotSupported, match="no policy for the layers of Net"):
        engine(net(Mine), moe=False)


def test_experts_of_other_ranks_are_refused() -> None:
    model = net(MoE)
    experts: Any = model.blocks[0].get_submodule("deepspeed_moe.experts.deepspeed_experts")
    del experts[2:]
    with pytest.raises(NotSupported, match=r"blocks\.0 has 2 of 5 experts; the others are on other ranks"):
        engine(model)


def test_used_token_is_refused() -> None:
    made = engine(net(MoE))
    block: Any = made.module.get_submodule("blocks.0")
    with pytest.raises(NotSupported, match="routes all their tokens"):
        block(inputs(), used_token=torch.ones(27))


def test_weights_come_from_a_checkpoint(tmp_path: Path) -> None:
    model = net(lambda: Mine(bias=True))
    save_file(model.state_dict(), tmp_path / "model.safetensors")
    with outpace.OnDevice("meta"):
        empty = net(lambda: Mine(bias=True))
    made = engine(empty, checkpoint=str(tmp_path / "model.safetensors"))
    assert sum(isinstance(block, OwnMixture) for block in made.module.modules()) == 2
    with torch.no_grad():
        want, found = model(inputs())[0], made(inputs())[0]
    assert (want - found).abs().max() <= 1e-5 * want.abs().max()


def test_a_mixture_in_a_model_over_pages(caplog: pytest.LogCaptureFixture) -> None:
    model = made("Olmo2", SMALL)
    for layer in model.model.layers:
        layer.mlp = Mine(width=SMALL["hidden_size"])
    randomised(model)
    prompts = padded_prompts(VOCAB)
    want = model.generate(**prompts, max_new_tokens=12, do_sample=False)
    with caplog.at_level(logging.INFO, "outpace"):
        found = engine(model, moe={"moe_experts": [EXPERTS, EXPERTS]}).generate(
            **prompts, max_new_tokens=12, do_sample=False
        )
    assert torch.equal(found, want)
    assert "experts: 2 fused mixtures of Mine" in caplog.text
    assert "level 0: its own layers, attention over pages" in caplog.text


LISTED = replace(
    LLAMA,
    moe=MoERoles(
        block="mlp", router="mlp.router", experts="mlp.experts", up=("w1", "w3"), down="w2",
        routing=lambda config: Routing(top_k=2, renormalise=True),
    ),
)  # fmt: skip


def listed() -> Any:
    """A Llama with lists of experts in all layers but the first."""
    model = tiny("llama", num_hidden_layers=3)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        for layer in model.model.layers[1:]:
            layer.mlp = Mine(width=32)
    return model


def test_a_policy_names_lists_of_experts() -> None:
    model, prompts = listed(), padded_prompts(VOCAB)
    want = model.generate(**prompts, max_new_tokens=12, do_sample=False)
    made = outpace.init_inference(
        listed(), injection_policy={type(model.model.layers[0]): LISTED}, device="cpu", moe={"moe_experts": [EXPERTS]}
    )
    assert torch.equal(made.generate(**prompts, max_new_tokens=12, do_sample=False), want)
    layer: Any = made.module.get_submodule("model.layers.1")
    own = model.model.layers[1].mlp.experts
    assert torch.equal(layer.mixture.experts.down, torch.stack([each.w2.weight for each in own]))
    assert torch.equal(
        layer.mixture.experts.gate_up, torch.stack([torch.cat([each.w1.weight, each.w3.weight]) for each in own])
    )


def test_ranks_split_lists_of_experts() -> None:
    splits = split_model(listed(), 2, {"LlamaDecoderLayer": LISTED})
    at = "model.layers.1.mlp"
    assert splits[f"{at}.router.weight"] is None
    halves = (((0, 20),), ((20, 40),))
    assert splits[f"{at}.experts.3.w1.weight"] == splits[f"{at}.experts.3.w3.weight"] == Split(0, halves)
    assert splits[f"{at}.experts.3.w2.weight"] == Split(1, halves)


ASKED: dict[str, tuple[Callable[[], nn.Module], dict[str, Any], str]] = {
    "another number": (
        lambda: net(MoE), {"moe_experts": [8]},
        r"moe\.moe_experts: \[8\] was given, and Net has \[5, 5\] experts in its expert layers",
    ),
    "another number of layers": (lambda: net(MoE), {"moe_experts": [5, 5, 5]}, r"\[5, 5, 5\] was given, .* \[5, 5\]"),
    "none": (
        lambda: tiny("llama"), {"moe_experts": [4]},
        r"moe\.moe_experts: \[4\] was given, and LlamaForCausalLM has no expert layers",
    ),
    "fused layers": (
        lambda: mixture("mixtral"), {"moe_experts": [5]}, r"\[5\] was given, and MixtralForCausalLM has \[4, 4, 4\]",
    ),
    "residual that is not": (
        lambda: net(MoE), {"type": "residual"}, r"moe\.type: 'residual' was given, and Net has standard experts",
    ),
    "standard that is not": (
        lambda: net(lambda: MoE(use_residual=True)), {"type": "standard"},
        r"moe\.type: 'standard' was given, and Net has residual experts",
    ),
    "a type of nothing": (
        lambda: tiny("llama"), {"type": "residual"}, r"'residual' was given, and LlamaForCausalLM has no expert layers",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", ASKED)
def test_what_the_config_says_must_be_what_there_is(case: str) -> None:
    make, moe, message = ASKED[case]
    model = make()
    with pytest.raises(ConfigError, match=message):
        engine(model, moe=moe)
    assert not any(isinstance(module, OwnMixture) for module in model.modules())


@pytest.mark.parametrize("case", ["mixtral", "qwen2 mixed, windows", "dots1"])
def test_numbers_of_fused_layers(case: str) -> None:
    counts = {"mixtral": [4], "qwen2 mixed, windows": [5, 5], "dots1": [6, 6]}[case]
    engine(mixture(case), moe={"moe_experts": counts, "type": "standard"})


def test_the_default_type_may_be_written_out() -> None:
    engine(tiny("llama"), moe={"type": "standard"})


def test_forms_of_experts() -> None:
    assert expert_form(nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4)), 4) is not None
    assert expert_form(nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 5)), 4) is None
    assert expert_form(nn.Linear(4, 4), 4) is None
