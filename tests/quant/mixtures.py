"""Rules for quantized experts."""

from typing import Any

import torch
import transformers as hf

from tests.inject.checks import randomised
from tests.inject.level0 import LATENT
from tests.quant.fake import rounded_asymmetric


def only(**rule: Any) -> dict[str, Any]:
    """A rule for experts and nothing else."""
    return {"weight": {"post_init_quant": {".experts.": rule}}}


RULES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "int8": (only(num_bits=8), {"how": rounded_asymmetric}),
    "int4": (only(num_bits=4, group_size=8, symmetric=True), {"bits": 4, "group": 8}),
}


def latent() -> Any:
    """A family that no policy knows."""
    torch.manual_seed(0)
    return randomised(hf.DeepseekV3ForCausalLM(hf.DeepseekV3Config(**LATENT)))
