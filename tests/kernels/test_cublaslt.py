"""What cublasLt is told, through ctypes, and what becomes of its answers; on a machine without it."""

import ctypes
import gc
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from outpace.kernels import cublaslt
from outpace.kernels.cublaslt import WORKSPACES, Algorithm, CublasLt, CublasLtError, Product, Unavailable, fits
from tests.kernels.fake_cublaslt import STREAM, FakeCublasLt, aligned


@pytest.fixture(autouse=True)
def _stream(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device=None: SimpleNamespace(cuda_stream=STREAM))


def made(fake: Any) -> CublasLt:
    return CublasLt(fake)


def exact(x: Tensor, weight: Tensor, bias: Tensor | None, add: Tensor | None) -> Tensor:
    result = x.float() @ weight.float().t()
    for term in (bias, add):
        result = result if term is None else result + term.float()
    return result


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("names", [(), ("bias",), ("add",), ("bias", "add")])
@pytest.mark.parametrize("in_place", [False, True])
def test_products(dtype: torch.dtype, names: tuple[str, ...], in_place: bool) -> None:
    fake, x, weight = FakeCublasLt(), aligned(18, 24, dtype=dtype), aligned(40, 24, dtype=dtype)
    bias = aligned(40, dtype=dtype) if "bias" in names else None
    add = aligned(18, 40, dtype=dtype) if "add" in names else None
    library, product = made(fake), Product.of(x, weight, bias, add)
    want = exact(x, weight, bias, add)
    out = add if add is not None and in_place else aligned(18, 40, dtype=dtype)
    for algorithm in library.proposals(product)[:1]:
        library.plan(product, algorithm)(x, weight, bias, add, out)
    assert torch.allclose(out.float(), want, rtol=1e-2, atol=1e-1)
    assert len(fake.ran) == 1


def test_biases_of_other_layers_are_told_each_time() -> None:
    library, x, weight = made(FakeCublasLt()), aligned(17, 8), aligned(8, 8)
    product = Product(17, 8, 8, torch.bfloat16, True, False)
    plan, out = library.plan(product, library.proposals(product)[0]), aligned(17, 8)
    for bias in (aligned(8), aligned(8)):
        plan(x, weight, bias, None, out)
        assert torch.allclose(out.float(), exact(x, weight, bias, None), rtol=1e-2, atol=1e-1)


def test_proposals_are_those_of_both_workspaces_once_each() -> None:
    fake = FakeCublasLt(proposed=30)
    found = made(fake).proposals(Product(17, 8, 8, torch.float16, False, False))
    sizes = [algorithm.workspace for algorithm in found]
    assert len(set(found)) == len(found) == 16
    assert max(sizes) <= max(WORKSPACES)
    assert [len(algorithm.data) for algorithm in found] == [64] * 16


def test_a_library_that_knows_no_algorithm_proposes_none() -> None:
    assert made(FakeCublasLt(proposed=0)).proposals(Product(17, 8, 8, torch.float16, False, False)) == []


def test_parts_are_rounded_only_if_torch_allows_it(monkeypatch: pytest.MonkeyPatch) -> None:
    schemes = f"attribute {cublaslt.REDUCTION_SCHEMES}"
    for allowed, want in ((True, cublaslt.ANY_REDUCTION), (False, cublaslt.PRECISE_REDUCTION)):
        told = SimpleNamespace(allow_fp16_reduced_precision_reduction=allowed)
        monkeypatch.setattr(torch.backends.cuda, "matmul", told)
        fake = FakeCublasLt()
        library = made(fake)
        library.proposals(Product(17, 8, 8, torch.float16, False, False))
        preferences = [each for each in fake.objects.values() if each["kind"] == "MatmulPreference"]
        assert {each[schemes] for each in preferences} == {want}


def test_stored_algorithms_are_checked() -> None:
    library, product = made(FakeCublasLt()), Product(17, 8, 8, torch.float16, False, False)
    known = library.proposals(product)[1]
    assert library.checked(product, known.data) == known
    assert library.checked(product, b"\xff" * 64) is None
    assert library.checked(product, known.data[:8]) is None
    big = FakeCublasLt(proposed=30)
    assert made(big).checked(product, (29).to_bytes(8, "little") + bytes(56)) is None, "needs more than there is"


def test_errors_of_the_library_are_raised() -> None:
    fake = FakeCublasLt()
    fake.refuses.add(0)
    library, product = made(fake), Product(17, 8, 8, torch.bfloat16, False, False)
    plan = library.plan(product, Algorithm(bytes(64), 0))
    with pytest.raises(CublasLtError, match="cublasLtMatmul returned 15"):
        plan(aligned(17, 8), aligned(8, 8), None, None, aligned(17, 8))


def test_descriptors_are_destroyed_with_the_library() -> None:
    fake = FakeCublasLt()
    library = made(fake)
    library.proposals(Product(17, 8, 8, torch.float16, True, True))
    assert len(fake.objects) > 1
    del library
    gc.collect()
    assert [each["kind"] for each in fake.objects.values()] == [""], "the handle stays"


def test_a_library_without_a_symbol_is_not_used() -> None:
    fake = FakeCublasLt()
    del fake.cublasLtMatmul  # type: ignore[attr-defined]
    with pytest.raises(Unavailable, match="cublasLtMatmul"):
        made(fake)
    broken = FakeCublasLt()
    broken.cublasLtCreate = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p)(lambda out: 1)  # type: ignore[attr-defined]
    with pytest.raises(Unavailable, match="cublasLtCreate returned 1"):
        made(broken)


@pytest.mark.skipif(torch.version.cuda is not None, reason="this torch has a cublasLt")
def test_a_torch_without_it() -> None:
    with pytest.raises(Unavailable, match="this torch has not loaded cublasLt"):
        CublasLt.find()


def test_operands_that_do_not_fit() -> None:
    x, weight, add = aligned(18, 32), aligned(48, 32), aligned(18, 48)
    bias = aligned(48)
    assert fits(x, weight, bias, add, add)
    assert fits(x, weight, None, None, None)
    assert not fits(aligned(18, 64)[:, :32], weight, bias, add, add), "rows that are not one after the other"
    assert not fits(x[:, 1:], weight[:, 1:].contiguous(), None, None, None)
    assert not fits(x[1:], weight, None, None, None), "an address that is not a multiple"
    assert not fits(x.float(), weight.float(), None, None, None)
    assert not fits(x, weight.half(), None, None, None)
    assert not fits(x[0], weight, None, None, None)
    assert not fits(x.requires_grad_(), weight, None, None, None)
    with torch.no_grad():
        assert fits(x, weight, None, None, None)
