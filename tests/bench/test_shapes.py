"""Random weights: which, and of what."""

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from outpace.bench.shapes import SHAPES, build, bytes_read_per_token, config_of
from outpace.errors import ModelError
from tests.models import VOCAB, tiny


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    tiny("qwen3").config.save_pretrained(tmp_path)
    return tmp_path


def test_weights_of_a_folder_with_a_config_alone(folder: Path) -> None:
    model = build(folder, torch.bfloat16, "cpu")
    weights = dict(model.named_parameters())
    drawn = weights["model.layers.1.mlp.up_proj.weight"]
    assert drawn.dtype == torch.bfloat16
    assert float(drawn.float().std()) == pytest.approx(0.02, rel=0.1)
    assert abs(float(drawn.float().mean())) < 0.002
    assert not torch.equal(drawn[0], drawn[1])
    assert torch.equal(weights["model.norm.weight"], torch.ones(32, dtype=torch.bfloat16))
    assert torch.isfinite(model(torch.tensor([[3, 4, 5]])).logits).all()


def test_the_same_seed_gives_the_same_weights(folder: Path) -> None:
    first, again, other = (
        build(folder, torch.float32, "cpu", seed).get_parameter("lm_head.weight") for seed in (1, 1, 2)
    )
    assert torch.equal(first, again)
    assert not torch.equal(first, other)


def test_rotary_frequencies_are_the_config_s_own(folder: Path) -> None:
    made = build(folder, torch.float32, "cpu").get_buffer("model.rotary_emb.inv_freq")
    assert torch.equal(made, tiny("qwen3").model.rotary_emb.inv_freq)


def test_the_embedding_is_read_only_where_it_is_the_head() -> None:
    tied, own = (tiny("llama", tie_word_embeddings=tied) for tied in (True, False))
    assert (
        bytes_read_per_token(tied)
        == bytes_read_per_token(own)
        == 4 * sum(weight.numel() for weight in tied.parameters())
    )
    assert sum(weight.nbytes for weight in own.parameters()) == bytes_read_per_token(own) + 4 * 32 * VOCAB


@pytest.mark.parametrize("name", SHAPES)
def test_published_shapes_have_their_published_sizes(name: str) -> None:
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config_of(name))
    billions = sum(weight.numel() for weight in model.parameters()) / 1e9
    assert billions == pytest.approx({"llama-3.1-8b": 8.03, "llama-3.2-1b": 1.236, "qwen3-0.6b": 0.596}[name], rel=0.01)


def test_what_has_no_config_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"random weights need one of llama-3.1-8b, .* or a folder with a config.json"):
        build(tmp_path, torch.float32, "cpu")
    (tmp_path / "config.json").write_text('{"model_type": "nobody"}')
    with pytest.raises(ModelError, match=r"cannot use .*config.json"):
        build(tmp_path, torch.float32, "cpu")
