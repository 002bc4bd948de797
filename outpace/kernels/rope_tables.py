"""The cosine and sine tables of rotary positions."""

import torch


def rope_tables(
    inv_freq: torch.Tensor, attention_scaling: float, max_positions: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """(cos, sin) * attention_scaling, fp32: inv_freq [R/2] → two of [P, R/2], as Hugging Face's rotary modules."""
    positions = torch.arange(max_positions, device=inv_freq.device, dtype=torch.float32)
    angles = positions[:, None] * inv_freq.float()  # [P, R/2]
    return angles.cos() * attention_scaling, angles.sin() * attention_scaling
