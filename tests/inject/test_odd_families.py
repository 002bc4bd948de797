"""What single families cannot have fused, or not over pages, and what is special about one of them."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from transformers import Gemma3TextConfig, Gemma3TextModel

from outpace.errors import NotSupported
from outpace.inject.paged import PagedModel
from outpace.kernels.activation import activation_kind
from outpace.kernels.gemv import fused_linear_torch
from outpace.kernels.rotary import Rope, rope_and_cache_torch
from tests.inject.checks import injected_copy, padded_prompts, pair_of, randomised, same_forward
from tests.inject.families import FAMILIES, GEMMA3, GEMMA_TABLES, VOCAB, family_model, longrope

REFUSED: list[tuple[str, dict[str, Any], str]] = [
    ("GPT2", {"add_cross_attention": True}, "cross-attention"),
    ("Bloom", {"slow_but_exact": True, "pretraining_tp": 2}, "slow_but_exact"),
    ("StableLm", {"qk_layernorm": True}, "qk_layernorm"),
    ("Cohere", {"use_qk_norm": True}, "use_qk_norm"),
    ("Falcon", {"alibi": True, "attn_implementation": "eager"}, "twice"),
]


@pytest.mark.parametrize(("family", "options", "reason"), REFUSED)
def test_what_a_layer_cannot_do_fused_is_refused(family: str, options: dict[str, Any], reason: str) -> None:
    with pytest.raises(NotSupported, match=reason):
        injected_copy(family_model(family, **options))


def test_encoder_states_are_refused() -> None:
    fused, _ = injected_copy(family_model("GPT2"))
    with pytest.raises(NotSupported, match="encoder_hidden_states"):
        fused(**padded_prompts(VOCAB), encoder_hidden_states=torch.zeros(3, 2, 48))


@pytest.mark.parametrize(
    ("family", "options", "positions", "reason"),
    [
        ("Phi3", longrope(32), 76, "longrope changes its frequencies with the length beyond 32"),
        # sixteen heads have slopes that bfloat16 rounds
        ("Falcon", {"alibi": True, "num_attention_heads": 16}, 64, "bfloat16"),
    ],
)
def test_what_pages_refuse_runs_through_hugging_faces_loop(
    family: str, options: dict[str, Any], positions: int, reason: str
) -> None:
    pair, inputs = pair_of(family_model(family, **options)), padded_prompts(VOCAB)
    same_forward(pair, inputs)
    expected, found = (item.generate(**inputs, max_new_tokens=64, do_sample=False) for item in pair[:2])
    assert torch.equal(expected, found)
    with pytest.raises(NotSupported, match=reason):
        PagedModel(pair.fused, pair.injected, positions)


def test_a_phi3_within_its_original_length_has_pages() -> None:
    PagedModel(*injected_copy(family_model("Phi3", **longrope(32))), 32)


def test_a_bidirectional_gemma_runs_as_hugging_face_masks_it_and_never_through_pages() -> None:
    config = Gemma3TextConfig(**{**FAMILIES["Gemma3"][0], **GEMMA3, "use_bidirectional_attention": True})
    same_forward(pair_of(randomised(Gemma3TextModel(config))), padded_prompts(VOCAB))
    with pytest.raises(NotSupported, match="use_bidirectional_attention"):
        PagedModel(*injected_copy(family_model("Gemma3", **GEMMA3, use_bidirectional_attention=True)), 64)


def test_frequencies_of_one_kind_of_layer_that_change_with_the_length_are_not_for_pages() -> None:
    tables = {**GEMMA_TABLES, "full_attention": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}}
    fused = injected_copy(family_model("Gemma3", **{**GEMMA3, "rope_parameters": tables}))
    PagedModel(*fused, 256)
    with pytest.raises(NotSupported, match="dynamic changes its frequencies with the length beyond 256"):
        PagedModel(*fused, 257)


@torch.no_grad()
@pytest.mark.parametrize("batch", [1, 2])
@pytest.mark.parametrize(
    ("family", "case"), [("Cohere", "untied"), ("Cohere2", "full second"), ("GPTJ", "part rotated")]
)
def test_a_call_by_hugging_face_gives_the_rotary_kernel_contiguous_rows(family: str, case: str, batch: int) -> None:
    """The kernel cannot read views of every second column, nor positions that sequences of a batch share."""
    pair = pair_of(family_model(family, case))

    def rotary(*operands: Any, **options: Any) -> Any:
        rope = Rope(*operands, **options)
        rope.check_layout(*rope.split()[1:])
        return rope_and_cache_torch(*operands, **options)

    for layer in pair.injected.layers:
        layer.kernels = replace(layer.kernels, rotary=rotary)
    ids = torch.randint(3, VOCAB, (batch, 5), generator=torch.Generator().manual_seed(1))
    first = [item(input_ids=ids[:, :4], use_cache=True) for item in pair[:2]]
    cached = zip(pair[:2], first, strict=True)
    second = [item(input_ids=ids[:, 4:], past_key_values=made.past_key_values) for item, made in cached]
    for want, found in (first, second):
        torch.testing.assert_close(found.logits, want.logits, rtol=1e-4, atol=1e-4)


@torch.no_grad()
@pytest.mark.parametrize(
    ("family", "case"), [(family, case) for family in ("GPTNeoX", "Persimmon") for case in FAMILIES[family][1]]
)
def test_few_rows_go_with_their_norm_and_activation_to_one_kernel(family: str, case: str) -> None:
    """One row takes its layer norm along; in 16 bits several rows take the kernel too, behind a norm of their own."""
    layer: Any = injected_copy(family_model(family, case))[1].layers[0]
    seen: list[tuple[int, bool, str | None]] = []

    def gemv(x: torch.Tensor, *args: Any, **options: Any) -> torch.Tensor:
        seen.append((len(x), options.get("centered", False), options["activation"]))
        return fused_linear_torch(x, *args, **options)

    act = activation_kind(layer.settings.activation)
    for dtype, rows in ((torch.float32, [(1, True, act)]), (torch.bfloat16, [(1, True, act), (3, False, act)])):
        up, norm, x = layer.up.to(dtype), layer.attn_norm.to(dtype), torch.randn(3, layer.up.in_features, dtype=dtype)
        plain, options = up._kernels, {"norm": norm, "act": layer.settings.activation, "gated": False}
        wanted = [up(x[:count], **options) for count in (1, 3)]
        up._kernels = replace(plain, gemv=gemv)
        for count, want in zip((1, 3), wanted, strict=True):
            close = 1e-5 if dtype == torch.float32 else 0.02  # the bias is rounded in another place
            torch.testing.assert_close(up(x[:count], **options), want, rtol=close, atol=close)
        up._kernels = plain
        assert seen == rows
        seen.clear()
