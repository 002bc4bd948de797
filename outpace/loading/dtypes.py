"""Chooses the dtype of a model when the user names none."""

import torch

from outpace.quant.fast import cpu_flags

# CPU flags for native matrix products in a dtype. Measured on an AVX512 CPU with avx512_bf16 and without avx512_fp16,
# 512 x 576 x 1536: float32 4.8 ms, bfloat16 2.2 ms, float16 23.8 ms.
_NATIVE_FLAGS = {
    torch.bfloat16: frozenset({"amx_bf16", "avx512_bf16"}),
    torch.float16: frozenset({"amx_fp16", "avx512_fp16"}),
}


def choose_dtype(own: torch.dtype | None, device: torch.device) -> tuple[torch.dtype, str]:
    """The dtype to run in, and the reason. own: the checkpoint's dtype, None for a quantized file."""
    if own is None:
        dtype = torch.float32 if device.type == "cpu" else torch.bfloat16
        return dtype, f"a quantized file has no dtype of its own; {device.type} runs {short(dtype)}"
    if device.type != "cpu" or own not in _NATIVE_FLAGS:
        return own, "the checkpoint's own"
    if native_on_cpu(own):
        return own, f"the checkpoint's own; this CPU has native {short(own)} matrix instructions"
    return torch.float32, f"the checkpoint is {short(own)}, for which this CPU has no native matrix instructions"


def default_dtype(device: torch.device) -> tuple[torch.dtype, str]:
    """The default dtype of `init_inference`, and the reason."""
    if device.type == "cuda":
        return torch.float16, "DeepSpeed's default on a GPU; give dtype= for another"
    return torch.float32, "fastest and most exact on a CPU; give dtype= for another"


def native_on_cpu(dtype: torch.dtype) -> bool:
    """Whether both the CPU and this torch build have native matrix instructions for a 16-bit dtype."""
    capability = torch.backends.cpu.get_cpu_capability()
    return capability.startswith(("AVX512", "AMX")) and bool(_NATIVE_FLAGS[dtype] & cpu_flags())


def short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
