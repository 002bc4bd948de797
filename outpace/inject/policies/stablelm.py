"""StableLM and OLMo: Llama's layer with layer norms, which in OLMo have no weights."""

from dataclasses import replace

from outpace.inject.policies.llama import LLAMA

STABLELM = replace(
    LLAMA,
    layers=("StableLmDecoderLayer",),
    norm="layer",
    variant=lambda config: {"placement": "parallel", "mlp_norm": None} if config.use_parallel_residual else {},
    refuses=lambda config: "norms each head with weights of its own (qk_layernorm)" if config.qk_layernorm else None,
)

OLMO = replace(LLAMA, layers=("OlmoDecoderLayer",), norm="layer", norm_eps=1e-5)

POLICIES = (STABLELM, OLMO)
