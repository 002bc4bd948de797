from dataclasses import dataclass
from typing import Any

import pytest
import torch

from outpace.kernels.rms_norm import rms_norm_torch
from outpace.kernels.rotary import rope_and_cache_torch, rope_and_cache_triton, split_qkv
from tests.kernels.buffers import GUARD, Output, random_rows
from tests.kernels.tolerances import DTYPES, assert_close, assert_equal

POSITIONS, PAGES, PAGE = 50, 9, 4


@dataclass(frozen=True)
class Heads:
    """The shape of an attention layer."""

    q: int
    kv: int
    dim: int
    rotary: int
    v_dim: int

    @property
    def width(self) -> int:
        return (self.q + self.kv) * self.dim + self.kv * self.v_dim

    @property
    def options(self) -> dict[str, int]:
        return {"num_heads": self.q, "num_kv_heads": self.kv, "head_dim": self.dim, "rotary_dim": self.rotary}


SHAPES = [
    Heads(q=4, kv=2, dim=64, rotary=64, v_dim=64),
    Heads(q=33, kv=1, dim=16, rotary=8, v_dim=16),  # partial, more heads than a program takes
    Heads(q=3, kv=3, dim=80, rotary=20, v_dim=80),  # no powers of two
    Heads(q=2, kv=1, dim=96, rotary=96, v_dim=17),
    Heads(q=1, kv=1, dim=2, rotary=2, v_dim=1),
]


class Case:
    """Random inputs of one call: a fused row among guards, tables, and pages that hold the guard until written."""

    def __init__(self, heads: Heads, tokens: int, dtype: torch.dtype, device: torch.device) -> None:
        self.heads = heads
        inv_freq = 1.0 / 100 ** (torch.arange(0, heads.rotary, 2, device=device) / heads.rotary)
        angles = torch.arange(POSITIONS, device=inv_freq.device)[:, None] * inv_freq.float()  # [P, R/2]
        self.cos, self.sin = 1.2 * angles.cos(), 1.2 * angles.sin()
        self.positions = torch.randint(0, POSITIONS, (tokens,), device=device)
        self.slots = torch.randperm(PAGES * PAGE, device=device)[:tokens]
        self.slots[1::3] = -1
        self.qkv = Output.like(torch.empty(tokens, heads.width, dtype=dtype, device=device))
        self.qkv.view.copy_(torch.randn(tokens, heads.width))
        self.before = self.qkv.view.clone()
        k_base = torch.full((PAGES, PAGE, heads.kv + 1, heads.dim + 3), GUARD, dtype=dtype, device=device)
        v_base = torch.full((PAGES, heads.kv + 1, PAGE, heads.v_dim + 5), GUARD, dtype=dtype, device=device)
        self.pages = (k_base, v_base)
        self.k_pages = k_base[:, :, : heads.kv, : heads.dim]
        self.v_pages = v_base[:, 1:, :, 3 : 3 + heads.v_dim].transpose(1, 2)  # another order of the strides

    def run(self, op: Any, **options: Any) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """The op on a fresh copy of the fused row: (row after, k pages, v pages). Checks what must be untouched."""
        self.qkv.view.copy_(self.before)
        self.k_pages.fill_(GUARD)
        self.v_pages.fill_(GUARD)
        arguments = {
            "cos": self.cos,
            "sin": self.sin,
            "positions": self.positions,
            "slots": self.slots,
            "k_pages": self.k_pages,
            "v_pages": self.v_pages,
            **self.heads.options,
            **options,
        }
        q, k, v = op(self.qkv.view, **arguments)
        row = self.qkv.checked()
        assert (q.shape[1], k.shape[1], v.shape[1]) == (self.heads.q, self.heads.kv, self.heads.kv)
        assert k.data_ptr() == self.qkv.view[:, self.heads.q * self.heads.dim :].data_ptr()
        k_pages, v_pages = self.k_pages.clone(), self.v_pages.clone()
        self.k_pages.fill_(GUARD)
        self.v_pages.fill_(GUARD)
        assert all((base == GUARD).all() for base in self.pages), "written out of bounds"
        return row, k_pages, v_pages

    def expected_pages(self, row: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Pages that hold k and v of this row at the slots, and the guard elsewhere."""
        _, k, v = split_qkv(row, self.heads.q, self.heads.kv, self.heads.dim)
        k_pages, v_pages = torch.full_like(self.k_pages, GUARD), torch.full_like(self.v_pages, GUARD)
        for token, slot in enumerate(self.slots.tolist()):
            if slot >= 0:
                k_pages[slot // PAGE, slot % PAGE] = k[token]
                v_pages[slot // PAGE, slot % PAGE] = v[token]
        return k_pages, v_pages

    def rotated_fp64(self, row: torch.Tensor, interleaved: bool) -> torch.Tensor:
        """Each pair as a complex number times e^(i * angle), in fp64; the rest of the row as it was."""
        row = row.double().clone()
        turn = torch.complex(self.cos.double(), self.sin.double())[self.positions, None]  # [T, 1, R/2]
        for x in split_qkv(row, self.heads.q, self.heads.kv, self.heads.dim)[:2]:
            r = self.heads.rotary
            a, b = (x[..., 0:r:2], x[..., 1:r:2]) if interleaved else (x[..., : r // 2], x[..., r // 2 : r])
            y = torch.complex(a, b) * turn
            a.copy_(y.real)
            b.copy_(y.imag)
        return row


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("heads", SHAPES)
@pytest.mark.parametrize("tokens", [0, 1, 5])
def test_rotates_and_writes(
    tokens: int, heads: Heads, dtype: torch.dtype, interleaved: bool, device: torch.device
) -> None:
    case = Case(heads, tokens, dtype, device)
    want = case.rotated_fp64(case.before, interleaved)
    for op in (rope_and_cache_torch, rope_and_cache_triton):
        row, k_pages, v_pages = case.run(op, interleaved=interleaved)
        assert_close(row, want)
        assert_equal(row[:, (heads.q + heads.kv) * heads.dim :], case.before[:, (heads.q + heads.kv) * heads.dim :])
        want_k, want_v = case.expected_pages(row)
        assert_equal(k_pages, want_k)
        assert_equal(v_pages, want_v)


@pytest.mark.parametrize("heads", SHAPES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("gemma", [False, True])
def test_norm_before_rotation(gemma: bool, dtype: torch.dtype, heads: Heads, device: torch.device) -> None:
    case = Case(heads, 5, dtype, device)
    q_weight, k_weight = (torch.randn(heads.dim, device=device).to(dtype) for _ in range(2))
    style: dict[str, Any] = {"weight_offset": 1.0 if gemma else 0.0, "round_before_weight": not gemma}
    normed = case.before.clone()
    q, k, _ = split_qkv(normed, heads.q, heads.kv, heads.dim)
    rms_norm_torch(q, q_weight, 1e-5, out=q, **style)
    rms_norm_torch(k, k_weight, 1e-5, out=k, **style)
    want = case.rotated_fp64(normed, interleaved=False)
    weights = {"q_norm_weight": q_weight, "k_norm_weight": k_weight, "eps": 1e-5}
    for op in (rope_and_cache_torch, rope_and_cache_triton):
        row, k_pages, v_pages = case.run(op, **weights, **style)
        assert_close(row, want, roundings=2, magnitude=2 * float(normed.abs().max()))
        want_k, want_v = case.expected_pages(row)
        assert_equal(k_pages, want_k)
        assert_equal(v_pages, want_v)


@pytest.mark.parametrize("heads", SHAPES[:3])
@pytest.mark.parametrize("op", [rope_and_cache_torch, rope_and_cache_triton])
def test_the_parts_alone(op: Any, heads: Heads, device: torch.device) -> None:
    case = Case(heads, 5, torch.bfloat16, device)
    row, k_pages, v_pages = case.run(op, cos=None, sin=None, positions=None)  # only the write
    assert_equal(row, case.before)
    want_k, want_v = case.expected_pages(case.before)
    assert_equal(k_pages, want_k)
    assert_equal(v_pages, want_v)

    row, k_pages, v_pages = case.run(op, k_pages=None, v_pages=None, slots=None)  # only the rotation
    assert_close(row, case.rotated_fp64(case.before, interleaved=False))
    assert (k_pages == GUARD).all()
    assert (v_pages == GUARD).all()

    row, k_pages, _ = case.run(op, cos=None, sin=None, k_pages=None, v_pages=None)  # nothing
    assert_equal(row, case.before)

    weight = torch.randn(heads.dim, device=device).bfloat16()
    row, _, _ = case.run(op, cos=None, sin=None, k_norm_weight=weight, k_pages=None, v_pages=None)  # only k's norm
    q_width, k_end = heads.q * heads.dim, (heads.q + heads.kv) * heads.dim
    k = case.before[:, q_width:k_end].reshape(5, heads.kv, heads.dim)
    assert_close(row[:, q_width:k_end], rms_norm_torch(k, weight, 1e-6).flatten(1), roundings=2)
    assert_equal(row[:, :q_width], case.before[:, :q_width])


@pytest.mark.parametrize("op", [rope_and_cache_torch, rope_and_cache_triton])
def test_three_views(op: Any, device: torch.device) -> None:
    """GPT-NeoX keeps q, k, v of each head together: three views with a head stride of 3 D; int32 indices."""
    heads = Heads(q=3, kv=3, dim=8, rotary=4, v_dim=8)
    case = Case(heads, 5, torch.float32, device)
    apart = random_rows((5, 3, 24), torch.float32, device)
    views = (apart[..., :8], apart[..., 8:16], apart[..., 16:])
    flat = torch.cat([view.flatten(1) for view in views], dim=1)
    k_pages, v_pages = torch.full_like(case.k_pages, GUARD), torch.full_like(case.v_pages, GUARD)
    q, k, v = op(views, case.cos, case.sin, case.positions.int(), case.slots, k_pages, v_pages, **heads.options)
    row = torch.cat([q.flatten(1), k.flatten(1), v.flatten(1)], dim=1)
    assert_close(row, case.rotated_fp64(flat, interleaved=False))
    assert q.data_ptr() == views[0].data_ptr()
    want_k, want_v = case.expected_pages(row)
    assert_equal(k_pages, want_k)
    assert_equal(v_pages, want_v)


def test_other_tiles(device: torch.device) -> None:
    case = Case(SHAPES[1], 5, torch.float16, device)
    for heads in (1, 8):
        row, k_pages, _ = case.run(rope_and_cache_triton, config={"heads": heads, "num_warps": 1})
        assert_close(row, case.rotated_fp64(case.before, interleaved=False))
        assert_equal(k_pages, case.expected_pages(row)[0])


@pytest.mark.parametrize("dtype", DTYPES)
def test_tables_are_hugging_face_llama(dtype: torch.dtype, device: torch.device) -> None:
    """LlamaRotaryEmbedding.forward, then apply_rotary_pos_emb in fp32, on what one attention layer sees."""
    heads = SHAPES[0]
    case = Case(heads, 5, dtype, device)
    inv_freq = 1.0 / 100 ** (torch.arange(0, heads.rotary, 2, device=device) / heads.rotary)
    freqs = (inv_freq[None, :, None].float() @ case.positions[None, None, :].float()).transpose(1, 2)
    emb = torch.cat((freqs, freqs), dim=-1)
    cos, sin = emb.cos()[0, :, None] * 1.2, emb.sin()[0, :, None] * 1.2  # [T, 1, D]
    half = heads.rotary // 2
    assert_equal(case.cos[case.positions], cos[:, 0, :half])
    assert_equal(case.sin[case.positions], sin[:, 0, :half])
    row, _, _ = case.run(rope_and_cache_torch)
    for got, x in zip(*(split_qkv(r, heads.q, heads.kv, heads.dim)[:2] for r in (row, case.before)), strict=True):
        turned = torch.cat((-x[..., half:], x[..., :half]), dim=-1)
        assert_close(got, x.float() * cos + turned.float() * sin)
