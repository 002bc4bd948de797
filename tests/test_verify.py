"""`outpace.verify`: what passes, what is found, what is refused, and that the caller's model stays as it is."""

import copy
import dataclasses
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import BertModel, Olmo2Config, Olmo2ForCausalLM
from transformers.models.llama.modeling_llama import LlamaDecoderLayer

import outpace.verify.run as run
from outpace import InferenceEngine, InputError, ModelError, NotSupported
from outpace.inject.policies.llama import LLAMA
from outpace.loading.inspect import describe
from outpace.verify import Compared, PromptReport, Report, verify
from outpace.verify.compare import Observed, compare, token_errors
from outpace.verify.plot import plot
from outpace.verify.prompts import LENGTHS, NEW_TOKENS, TEXT, make_prompts, new_tokens
from tests.models import VOCAB, byte_tokenizer, tiny

LAYERS = ["embedding", "model.layers.0", "model.layers.1"]


def broken(**changes: Any) -> dict[type[nn.Module], Any]:
    return {LlamaDecoderLayer: dataclasses.replace(LLAMA, **changes)}


def scale_of_layer_1(config: Any, index: int) -> float:
    return 1.0 if index == 1 else 8**-0.5


def first_layers(report: Report) -> set[str | None]:
    """Where each set of prompts diverges first; one token attends to itself alone, whatever the scores."""
    found = [prompts.first_divergence for prompts in report.prompts if prompts.name != "short"]
    return {None if place is None else place.name for place in found}


# what passes


@pytest.mark.parametrize("dtype", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("family", ["llama", "gemma3", "gpt2", "mixtral"])
def test_a_model_that_is_injected_well_passes(family: str, dtype: str) -> None:
    report = verify(tiny(family), device="cpu", dtype=dtype)
    assert report.passed, report
    assert (report.fused_layers, report.tokens_count) == (2, dtype == "fp32")
    assert [prompts.new_tokens for prompts in report.prompts] == [32, 32, 32]


def test_what_a_report_holds() -> None:
    report = verify(tiny("llama"), device="cpu")
    assert (report.model, report.dtype, report.device) == ("LlamaForCausalLM", "float32", "cpu")
    assert report.rule == "worst relative error against plain Hugging Face up to 0.0001"
    assert [prompts.name for prompts in report.prompts] == ["batch", "long", "short"]
    for prompts in report.prompts:
        assert [place.name for place in prompts.layers] == LAYERS
        assert prompts.logits is not None
        assert 0 <= prompts.logits.error < 1e-5
        assert {place.allowed for place in prompts.places} == {1e-4}
        assert (prompts.first_divergence, prompts.first_difference) == (None, None)


def test_an_encoder_has_no_tokens_and_perhaps_no_logits() -> None:
    report = verify(tiny("bert"), device="cpu")
    assert report.passed
    assert {prompts.new_tokens for prompts in report.prompts} == {0}
    bare = verify(BertModel(tiny("bert").config), device="cpu")
    assert bare.passed
    assert {prompts.logits for prompts in bare.prompts} == {None}


def test_a_model_without_a_policy_is_verified_over_pages() -> None:
    small: dict[str, Any] = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "vocab_size": VOCAB}
    report = verify(Olmo2ForCausalLM(Olmo2Config(**small, num_attention_heads=4, pad_token_id=1)), device="cpu")
    assert report.passed
    assert report.fused_layers == 0
    assert report.prompts[0].layers[1].name == "hidden state 1"


def test_a_folder_with_its_tokenizer(chain_folder: Path) -> None:
    report = verify(chain_folder, device="cpu", dtype="fp32")
    assert report.passed
    assert report.model == "chain"
    assert report.prompts[1].lengths == (300,)


# what is found


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize(
    ("policy", "layer"),
    [
        (broken(qkv=("self_attn.q_proj", "self_attn.v_proj", "self_attn.k_proj")), "model.layers.0"),
        (broken(up=("mlp.up_proj", "mlp.gate_proj")), "model.layers.0"),
        (broken(readers={"scale": scale_of_layer_1}), "model.layers.1"),
    ],
    ids=["k and v exchanged", "gate and up exchanged", "scale of layer 1"],
)
def test_a_wrong_policy_fails_at_the_right_layer(policy: Any, layer: str, dtype: str) -> None:
    report = verify(tiny("llama"), injection_policy=policy, device="cpu", dtype=dtype)
    assert not report.passed
    assert first_layers(report) == {layer}


def test_a_weight_that_is_changed_by_injection_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    class Careless(InferenceEngine):
        def __init__(self, *args: Any) -> None:
            super().__init__(*args)
            self.module.get_parameter("model.layers.1.down.weight").data[3] *= 1.01

    monkeypatch.setattr(run, "InferenceEngine", Careless)
    report = verify(tiny("llama"), device="cpu")
    assert not report.passed
    for prompts in report.prompts:
        assert [place.passed for place in prompts.layers] == [True, True, False]
        assert prompts.first_divergence is not None
        assert prompts.first_divergence.name == "model.layers.1"
        assert 1e-4 < prompts.first_divergence.error < 1e-1


def test_other_tokens_with_equal_hidden_states_are_found() -> None:
    assert LLAMA.model is not None
    roles = dataclasses.replace(LLAMA.model, logit_scale=lambda config: -1.0)  # which only the paged loop reads
    report = verify(tiny("llama"), injection_policy=broken(model=roles), device="cpu")
    assert not report.passed
    assert {prompts.first_divergence for prompts in report.prompts} == {None}
    assert [prompts.first_difference for prompts in report.prompts] == [(0, 0), (0, 0), (0, 0)]
    in_16_bits = verify(tiny("llama"), injection_policy=broken(model=roles), device="cpu", dtype="bf16")
    assert in_16_bits.passed, "there the tokens are told and do not count"
    assert in_16_bits.prompts[0].first_difference == (0, 0)


def test_what_is_not_finite_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    class Overflowing(InferenceEngine):
        def __init__(self, *args: Any) -> None:
            super().__init__(*args)
            self.module.get_parameter("model.layers.0.down.weight").data[0] = math.inf

    monkeypatch.setattr(run, "InferenceEngine", Overflowing)
    report = verify(tiny("llama"), device="cpu", dtype="fp16")
    assert not report.passed
    assert first_layers(report) == {"model.layers.0"}
    assert report.as_dict()["prompts"][0]["layers"][1]["error"] is None


# 16 bits


def test_in_16_bits_the_measure_is_a_float32_copy() -> None:
    report = verify(tiny("llama"), device="cpu", dtype="bf16")
    assert report.rule.startswith("mean error against a float32 copy up to 1.5 times")
    assert report.rule.endswith("plain Hugging Face in bfloat16")
    for prompts in report.prompts:
        assert prompts.layers[0].error == prompts.layers[0].allowed == 0
        assert all(1e-4 < place.error < place.allowed for place in prompts.places[1:])


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_each_step_is_told_as_it_begins(dtype: str) -> None:
    told: list[str] = []
    verify(tiny("llama"), device="cpu", dtype=dtype, progress=told.append)
    runs = {
        name: [f"{name}, prompts {place} of 3" for place in (1, 2, 3)] for name in ("plain", "float32 copy", "injected")
    }
    copied = [] if dtype == "fp32" else runs["float32 copy"]
    assert told == ["loading the model", *runs["plain"], *copied, "injecting fused layers", *runs["injected"]]


def test_without_memory_for_a_copy_the_measure_is_plain_hugging_face(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run, "_has_room", lambda model: False)
    report = verify(tiny("llama"), device="cpu", dtype="bf16")
    assert report.passed
    assert report.rule == "mean relative error against plain Hugging Face up to 0.1"
    assert {place.allowed for prompts in report.prompts for place in prompts.places} == {0.1}


@pytest.mark.parametrize(
    ("free", "room"),
    [(9000 << 10, True), (4000 << 10, False), (None, True)],
    ids=["enough", "too little", "unknown"],
)
def test_memory_is_asked_of_the_system(free: int | None, room: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("outpace.loading.memory.free_memory", lambda: free)
    assert run._has_room(nn.Linear(1024, 1024)) is room  # 4 MiB


# how it is measured


def test_the_error_is_of_each_token() -> None:
    want = torch.tensor([[3.0, 4.0], [300.0, 400.0], [0.0, 0.0]])
    got = want + torch.tensor([[0.0, 0.5], [5.0, 0.0], [0.0, 0.0]])
    assert torch.allclose(token_errors(want, got), torch.tensor([0.1, 0.01, 0.0]))


@pytest.mark.parametrize(
    ("got", "where"),
    [
        ([[7, 7, 1, 2, 3], [7, 7, 4, 5, 6]], None),
        ([[7, 7, 1, 2, 9], [7, 7, 4, 9, 6]], (1, 1)),
        ([[7, 7, 1, 2], [7, 7, 4, 5]], (0, 2)),
    ],
)
def test_where_tokens_first_differ(got: list[list[int]], where: tuple[int, int] | None) -> None:
    want = torch.tensor([[7, 7, 1, 2, 3], [7, 7, 4, 5, 6]])
    state = [torch.ones(4, 3)]
    inputs = {"input_ids": want[:, :2], "attention_mask": torch.ones(2, 2, dtype=torch.int64)}
    plain, fused = Observed(state, None, want), Observed(state, None, torch.tensor(got))
    (report,) = compare({"two": inputs}, [plain], None, [fused], [], torch.float32)
    assert (report.first_difference, report.new_tokens, report.lengths) == (where, 3, (2, 2))


def test_models_that_give_another_number_of_states_cannot_be_compared() -> None:
    one, two = (Observed([torch.ones(1, 3)] * count, None) for count in (1, 2))
    with pytest.raises(ModelError, match="2 outputs of the plain model, 1 injected"):
        compare({}, [two], None, [one], [], torch.float32)


def test_prompts_are_drawn_with_the_seed_or_taken_from_text() -> None:
    model = tiny("llama", max_position_embeddings=512)
    info = describe(model)
    first, again, other = (make_prompts(model, info, None, seed)["long"]["input_ids"] for seed in (0, 0, 1))
    assert torch.equal(first, again)
    assert not torch.equal(first, other)
    tokenizer = byte_tokenizer()
    wide = tiny("llama", vocab_size=300, max_position_embeddings=512)
    made = make_prompts(wide, describe(wide), tokenizer, 0)
    assert tokenizer.decode(made["long"]["input_ids"][0]) == TEXT[:300]
    assert [made[name]["attention_mask"].sum(1).tolist() for name in made] == [
        list(lengths) for lengths in LENGTHS.values()
    ]
    narrow = make_prompts(model, info, tokenizer, 0)  # its tokens are not in the model's vocabulary
    assert int(narrow["long"]["input_ids"].max()) < VOCAB


@pytest.mark.parametrize(("positions", "long", "new"), [(64, 32, 32), (10, 5, 5), (1, 1, 1)])
def test_prompts_fit_the_positions_of_the_model(positions: int, long: int, new: int) -> None:
    model = tiny("llama", max_position_embeddings=positions)
    info = describe(model)
    made = make_prompts(model, info, None, 0)
    assert made["long"]["input_ids"].shape == (1, long)
    assert made["batch"]["input_ids"].shape[1] <= long
    assert new_tokens(info) == new <= NEW_TOKENS


# the caller's model


def test_the_callers_model_stays_as_it_is() -> None:
    model = tiny("llama").train()
    before = copy.deepcopy(model.state_dict())
    verify(model, device="cpu", dtype="bf16")
    assert model.training
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert {type(layer) for layer in model.model.layers} == {LlamaDecoderLayer}
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}


def test_a_live_model_runs_in_its_own_dtype() -> None:
    assert verify(tiny("llama").to(torch.bfloat16), device="cpu").dtype == "bfloat16"


# what is refused


@pytest.mark.parametrize(
    ("model", "error", "said"),
    [
        (lambda: tiny("t5"), NotSupported, "T5ForConditionalGeneration is an encoder-decoder model"),
        (lambda: nn.Linear(2, 2), ModelError, "model: expected a Hugging Face model, got Linear"),
        (lambda: 3, ModelError, "model: expected a name, a path or a Hugging Face model, got int"),
        (lambda: "./nothing", ModelError, "no such file or folder"),
    ],
)
def test_what_cannot_be_verified(model: Any, error: type[Exception], said: str) -> None:
    with pytest.raises(error, match=said):
        verify(model(), device="cpu")


def test_an_engine_has_no_plain_model_any_more(llama: InferenceEngine) -> None:
    with pytest.raises(InputError, match="model: got an engine, which has changed its model"):
        verify(llama, device="cpu")


def test_what_is_refused_is_refused_before_anything_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run, "_observed", lambda *args: pytest.fail("it ran"))
    with pytest.raises(NotSupported):
        verify(tiny("t5"), device="cpu")


def test_a_model_that_records_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny("llama")
    monkeypatch.setattr(type(model.model), "_can_record_outputs", {}, raising=False)
    with pytest.raises(ModelError, match="no hidden states with output_hidden_states=True"):
        verify(model, device="cpu")


# the picture


def test_a_plot_of_a_report_with_every_kind_of_error(tmp_path: Path) -> None:
    places = tuple(Compared(f"layer {place}", error, 1e-4) for place, error in enumerate((0.0, 1e-6, 1e-2, math.inf)))
    report = Report("m", "float32", "cpu", 3, "rule", True, (PromptReport("batch", (3,), places, None, 0, None),))
    plot(report, tmp_path / "error.png")
    assert (tmp_path / "error.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("value", "says"), [(0.0, "gives only zeros; its weights"), (float("nan"), "gives NaN in float")]
)
def test_item_25_a_model_that_computes_nothing_is_named(value: float, says: str) -> None:
    model = tiny("llama")
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(value)
    with pytest.raises(ModelError, match=f"verify: .*plain LlamaForCausalLM {says}"):
        verify(model, device="cpu")
