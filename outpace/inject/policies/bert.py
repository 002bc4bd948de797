"""Encoders whose layer is BERT's: BERT, RoBERTa and its relatives, ELECTRA, and DistilBERT with its own names."""

from dataclasses import replace
from typing import Any

from outpace.inject.policy import Policy


def _decoder(config: Any) -> str | None:
    if getattr(config, "add_cross_attention", False):
        return "attends to another model (add_cross_attention), which the fused encoder layer does not"
    if getattr(config, "is_decoder", False):
        return "is a decoder (is_decoder), and the fused layer of this family is an encoder's"
    return None


BERT = Policy(
    layers=(
        "BertLayer", "RobertaLayer", "XLMRobertaLayer", "CamembertLayer", "Data2VecTextLayer", "ErnieLayer",
        "ElectraLayer",
    ),
    placement="post",
    norm="layer",
    causal=False,
    attn_norm="attention.output.LayerNorm",
    mlp_norm="output.LayerNorm",
    qkv=("attention.self.query", "attention.self.key", "attention.self.value"),
    out="attention.output.dense",
    up="intermediate.dense",
    gated=False,
    down="output.dense",
    readers={"rotary": lambda config, index: False},
    refuses=_decoder,
)  # fmt: skip

DISTILBERT = replace(
    BERT,
    layers=("transformers.models.distilbert.modeling_distilbert.TransformerBlock",),
    attn_norm="sa_layer_norm",
    mlp_norm="output_layer_norm",
    qkv=("attention.q_lin", "attention.k_lin", "attention.v_lin"),
    out="attention.out_lin",
    up="ffn.lin1",
    down="ffn.lin2",
)

POLICIES = (BERT, DISTILBERT)
