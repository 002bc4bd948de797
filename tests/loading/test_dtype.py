"""The dtype of a model, converted in place."""

import pytest
import torch
from torch import nn

from outpace.loading.dtypes import default_dtype
from outpace.loading.fill import to_dtype
from tests.models import tiny


def test_the_default_is_fp16_on_a_gpu_and_fp32_on_a_cpu() -> None:
    assert default_dtype(torch.device("cuda"))[0] == torch.float16
    assert default_dtype(torch.device("cpu"))[0] == torch.float32
    assert all("dtype=" in default_dtype(torch.device(name))[1] for name in ("cuda", "cpu"))


def test_parameters_are_the_same_objects_with_new_values() -> None:
    model = nn.Linear(3, 3)
    weight, values = model.weight, model.weight.detach().clone()
    to_dtype(model, torch.bfloat16)
    assert model.weight is weight
    assert weight.dtype == torch.bfloat16
    assert torch.equal(weight, values.to(torch.bfloat16))


def test_integers_are_left_alone() -> None:
    model = nn.BatchNorm1d(2)
    to_dtype(model, torch.float16)
    assert model.num_batches_tracked is not None
    assert model.num_batches_tracked.dtype == torch.int64
    assert model.running_mean is not None
    assert model.running_mean.dtype == torch.float16


def test_kept_parameters_and_buffers_stay_or_become_float32() -> None:
    model = tiny("llama").half()
    model._keep_in_fp32_modules_strict = {"norm", "extra"}
    model.model.extra = nn.BatchNorm1d(2)
    to_dtype(model, torch.bfloat16)
    assert model.model.norm.weight.dtype == torch.float32
    assert model.model.extra.running_mean.dtype == torch.float32
    assert model.lm_head.weight.dtype == torch.bfloat16


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_the_models_config_is_told(dtype: torch.dtype) -> None:
    model = tiny("llama")
    to_dtype(model, dtype)
    assert model.config.dtype == dtype
    assert model.dtype == dtype


def test_rotary_frequencies_come_back_to_float32() -> None:
    model = tiny("llama").to(torch.bfloat16)
    assert model.model.rotary_emb.inv_freq.dtype == torch.bfloat16
    to_dtype(model, torch.float32)
    assert model.model.rotary_emb.inv_freq.dtype == torch.float32
