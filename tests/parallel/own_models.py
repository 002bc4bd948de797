"""Tiny models that no policy knows: with a plan of Hugging Face, with names for a policy, and with own experts."""

from collections.abc import Mapping
from typing import Any

import torch
import transformers as hf
from torch import Tensor, nn

from tests.inject.own_mixtures import WIDTH, Mine, MoE
from tests.models import tiny

_SIZES: Mapping[str, Any] = {
    "vocab_size": 97, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 64, "pad_token_id": 1, "bos_token_id": 2,
    "eos_token_id": None,
}  # fmt: skip
_EXPERTS: Mapping[str, Any] = {
    "num_experts": 4, "num_local_experts": 4, "n_routed_experts": 4, "num_experts_per_tok": 2,
    "moe_intermediate_size": 24, "n_shared_experts": 1, "first_k_dense_replace": 1, "n_group": 2, "topk_group": 1,
}  # fmt: skip
_MLA: Mapping[str, Any] = {
    "num_key_value_heads": 4, "q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 4, "qk_nope_head_dim": 8,
    "v_head_dim": 8, "head_dim": 4,
}  # fmt: skip
_ENCODER: Mapping[str, Any] = {
    key: value for key, value in _SIZES.items() if key not in ("num_key_value_heads", "head_dim")
}

_MADE: Mapping[str, tuple[str, str, Mapping[str, Any]]] = {
    "glm4": ("Glm4ForCausalLM", "Glm4Config", _SIZES),
    "exaone4": ("Exaone4ForCausalLM", "Exaone4Config", {**_SIZES, "tie_word_embeddings": True}),
    "ernie": ("Ernie4_5ForCausalLM", "Ernie4_5Config", {**_SIZES, "use_bias": True}),
    "seed": ("SeedOssForCausalLM", "SeedOssConfig", _SIZES),
    "unknown style": ("HeliumForCausalLM", "HeliumConfig", _SIZES),
    "deepseek": ("DeepseekV3ForCausalLM", "DeepseekV3Config", {**_SIZES, **_EXPERTS, **_MLA}),
    "solar": ("SolarOpenForCausalLM", "SolarOpenConfig", {**_SIZES, **_EXPERTS}),
    "minimax": ("MiniMaxM2ForCausalLM", "MiniMaxM2Config", {**_SIZES, **_EXPERTS}),
    "mimo": ("MiMoV2FlashForCausalLM", "MiMoV2FlashConfig", {**_SIZES, **_EXPERTS}),
    "nemotron": ("NemotronForCausalLM", "NemotronConfig", _SIZES),
    "doge": ("DogeForCausalLM", "DogeConfig", _SIZES),
    "eurobert": ("EuroBertForMaskedLM", "EuroBertConfig", _SIZES),
    "electra": ("ElectraForMaskedLM", "ElectraConfig", {**_ENCODER, "embedding_size": 32}),
    "bart": (
        "BartForConditionalGeneration", "BartConfig",
        {"vocab_size": 97, "d_model": 32, "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 4,
         "decoder_attention_heads": 4, "encoder_ffn_dim": 48, "decoder_ffn_dim": 48, "max_position_embeddings": 64,
         "pad_token_id": 1, "bos_token_id": 2, "eos_token_id": None, "forced_eos_token_id": None,
         "decoder_start_token_id": 2},
    ),
}  # fmt: skip


class Stack(nn.Module):
    """Somebody's own model: linears and mixtures."""

    def __init__(self, mixture: nn.Module) -> None:
        super().__init__()
        self.first, self.mixture, self.last = nn.Linear(WIDTH, WIDTH), mixture, nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        """[..., WIDTH] -> [..., WIDTH]."""
        found = self.mixture(self.first(x))
        result: Tensor = self.last(found[0] if isinstance(found, tuple) else found)
        return result


_STACKS = {"my experts": lambda: Mine(bias=True), "deepspeed's experts": lambda: MoE(k=2, use_residual=True)}


def make(name: str) -> Any:
    """The model, in eval mode, with the same weights at every call."""
    if name in ("t5", "gpt2", "bert", "llama", "gemma3"):
        return tiny(name)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        if name in _STACKS:
            return Stack(_STACKS[name]()).eval()
        kind, config, options = _MADE[name]
        model = getattr(hf, kind)(getattr(hf, config)(**options))
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(0.3 * torch.randn(parameter.shape))
    if name == "unknown style":
        model._tp_plan = {**model.tp_plan, "model.layers.*.mlp.up_proj": "by_the_moon"}
    return model.eval()
