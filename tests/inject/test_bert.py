"""Encoders: BERT, its relatives, and DistilBERT, under every head that stands on them."""

from typing import Any

import pytest
import torch
import transformers
from torch import nn

from outpace.errors import ModelError, NotSupported
from outpace.inject.paged import PagedModel
from outpace.inject.plan import make_plan
from outpace.inject.policies import by_class
from tests.inject.checks import Pair, injected_copy, pair_of, randomised, same_forward

SMALL: dict[str, Any] = {
    "hidden_size": 48, "intermediate_size": 64, "num_hidden_layers": 3, "num_attention_heads": 6, "vocab_size": 97,
    "max_position_embeddings": 64, "pad_token_id": 1,
}  # fmt: skip
ODD: dict[str, Any] = {"hidden_size": 60, "hidden_act": "gelu_new", "layer_norm_eps": 1e-5}
DISTIL: dict[str, Any] = {
    "dim": 48, "hidden_dim": 64, "n_layers": 3, "n_heads": 6, "vocab_size": 97, "max_position_embeddings": 64,
}  # fmt: skip
HEADS = ("ForMaskedLM", "ForSequenceClassification", "ForQuestionAnswering", "ForTokenClassification")
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "bert": ("Bert", {**SMALL, "hidden_act": "relu"}),
    "bert odd": ("Bert", {**SMALL, **ODD, "num_attention_heads": 4}),
    "roberta": ("Roberta", SMALL),
    "roberta odd": ("Roberta", {**SMALL, **ODD}),
    "distilbert": ("DistilBert", DISTIL),
    "distilbert odd": ("DistilBert", {**DISTIL, "dim": 60, "n_heads": 4, "activation": "relu"}),
    "electra": ("Electra", {**SMALL, "embedding_size": 32}),
    "electra odd": ("Electra", {**SMALL, **ODD, "embedding_size": 60}),
}  # fmt: skip
COUSINS = ("XLMRoberta", "Camembert", "Data2VecText", "Ernie")


def made(family: str, head: str, options: dict[str, Any], implementation: str = "sdpa") -> Any:
    labels = 2 if head == "ForQuestionAnswering" else 5
    config = getattr(transformers, f"{family}Config")(**options, num_labels=labels)
    config._attn_implementation = implementation
    return randomised(getattr(transformers, family + head)(config))


def padded(side: str = "right") -> dict[str, torch.Tensor]:
    ids = torch.randint(3, 97, (3, 11), generator=torch.Generator().manual_seed(1))
    mask = torch.ones_like(ids)
    for row in range(1, 3):
        mask[row, slice(-3 * row, None) if side == "right" else slice(0, 3 * row)] = 0
    return {"input_ids": ids.masked_fill(mask == 0, 1), "attention_mask": mask}


def same_outputs(pair: Pair, inputs: dict[str, torch.Tensor]) -> None:
    """Every tensor that a head returns agrees; logits of padding say nothing."""
    with torch.no_grad():
        expected, found = (item(**inputs) for item in (pair.model, pair.fused))
    assert list(found) == list(expected)
    real = inputs["attention_mask"].bool()
    for name, want in expected.items():
        got = found[name]
        if want.shape[:2] == real.shape:
            want, got = want[real], got[real]
        assert (want - got).abs().max() <= pair.tolerance * max(1.0, want.abs().max().item()), name


@pytest.mark.parametrize("head", HEADS)
@pytest.mark.parametrize("case", CASES)
def test_heads(case: str, head: str) -> None:
    family, options = CASES[case]
    pair = pair_of(made(family, head, options))
    same_outputs(pair, padded())
    same_forward(pair, padded())


@pytest.mark.parametrize("family", COUSINS)
@pytest.mark.parametrize("head", HEADS)
def test_cousins(family: str, head: str) -> None:
    same_forward(pair_of(made(family, head, SMALL)), padded())
    same_outputs(pair_of(made(family, head, {**SMALL, **ODD})), padded("left"))


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
@pytest.mark.parametrize("family", ["Bert", "DistilBert"])
def test_masks(family: str, implementation: str) -> None:
    pair = pair_of(made(family, "Model", DISTIL if family == "DistilBert" else SMALL, implementation))
    for side in ("left", "right"):
        same_outputs(pair, padded(side))
    full = padded()
    same_outputs(pair, {**full, "attention_mask": torch.ones_like(full["input_ids"])})


def test_segments_and_the_pooler() -> None:
    model = made("Bert", "ForPreTraining", SMALL)
    inputs = padded()
    kinds = torch.zeros_like(inputs["input_ids"])
    kinds[:, 5:] = 1
    same_outputs(pair_of(model), {**inputs, "token_type_ids": kinds})


def test_a_long_feed_forward_in_chunks_is_the_same() -> None:
    same_outputs(pair_of(made("Bert", "ForMaskedLM", {**SMALL, "chunk_size_feed_forward": 1})), padded())


@pytest.mark.parametrize(
    ("family", "options", "reason"),
    [
        ("Bert", {"is_decoder": True}, "is_decoder"),
        ("Roberta", {"is_decoder": True, "add_cross_attention": True}, "add_cross_attention"),
    ],
)
def test_decoders_are_refused(family: str, options: dict[str, Any], reason: str) -> None:
    model = made(family, "ForCausalLM" if family == "Roberta" else "LMHeadModel", {**SMALL, **options})
    before = [type(module) for module in model.modules()]
    with pytest.raises(NotSupported, match=reason):
        injected_copy(model)
    assert [type(module) for module in model.modules()] == before


def test_pairs_of_models_are_refused() -> None:
    config = transformers.BertConfig(**SMALL)
    both = transformers.EncoderDecoderConfig.from_encoder_decoder_configs(config, config)
    with pytest.raises(NotSupported, match="add_cross_attention"):
        injected_copy(transformers.EncoderDecoderModel(both))


def test_an_encoder_has_no_pages() -> None:
    fused, injected = injected_copy(made("Bert", "ForMaskedLM", SMALL))
    with pytest.raises(ModelError, match="no paged form"):
        PagedModel(fused, injected, 64)


def test_a_class_that_shares_the_name_of_distilberts_layer_is_left_alone() -> None:
    class TransformerBlock(nn.Module):
        pass

    assert not make_plan(nn.Sequential(TransformerBlock()), by_class()).layers
