"""Keys and values of 8 bits: how they are written, and attention over them, against separate code in fp64."""

from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from outpace.kernels import attention_by_page, attention_torch
from outpace.kernels.attention import paged_attention
from outpace.kernels.attention_decode import DecodeTiles, paged_attention_decode
from outpace.kernels.attention_prefill import PrefillTiles, paged_attention_prefill
from outpace.kernels.attention_torch import paged_attention_torch
from outpace.kernels.kv_quant import quantize_heads
from outpace.kernels.rotary import rope_and_cache_torch, rope_and_cache_triton, split_qkv
from tests.fake_kv_quant import DTYPES, KINDS, scale_of
from tests.fake_kv_quant import stored as stored_numbers
from tests.kernels.attention_batches import Batch, Case, in_fp64, make_batch
from tests.kernels.test_attention import ALL, BOTH, DECODES, FEATURES, WAYS, Runs, default_tiles
from tests.kernels.test_attention_properties import check_invariance, cut, features
from tests.kernels.test_rotary import PAGE, PAGES, SHAPES, Heads
from tests.kernels.test_rotary import Case as RopeCase
from tests.kernels.tolerances import assert_close, assert_equal, on_gpu

JUNK = {"int8": -128.0, "fp8": float("nan")}  # in places that nobody wrote; -128 is never stored


@settings(max_examples=200, deadline=None, database=None)
@given(
    st.lists(st.floats(-3.0, 3.0, width=32), min_size=1, max_size=20),
    st.sampled_from([0.0, 1e-45, 1e-40, 1e-38, 1e-30, 1.0, 1e4, 1e38]),
    st.sampled_from([torch.float32, torch.bfloat16, torch.float16]),
    st.sampled_from(KINDS),
)
def test_a_vector_comes_back_within_its_step(numbers: list[float], size: float, dtype: torch.dtype, kind: str) -> None:
    x = (torch.tensor(numbers) * size).to(dtype)
    x = x if bool(x.isfinite().all()) else torch.zeros_like(x)
    values, scale = quantize_heads(x[None], DTYPES[kind])
    assert values.dtype == DTYPES[kind]
    assert scale.dtype == torch.float32
    assert_equal(scale[0], scale_of(x, kind))
    assert_equal(values[0].double(), stored_numbers(x, kind))
    error = (values[0].double() * scale[0].double() - x.double()).abs()
    steps = {"int8": scale[0] / 2, "fp8": torch.maximum(x.float().abs() / 16, scale[0] / 1024)}[kind].double()
    floor = 127 * 2.0**-126 if kind == "int8" else 448 * 2.0**-126  # smaller vectors are stored as zeros
    assert bool((error <= steps * (1 + 1e-5) + floor).all())


@pytest.mark.parametrize("kind", KINDS)
def test_vectors_that_are_special(kind: str) -> None:
    most = 127.0 if kind == "int8" else 448.0
    zeros, scale = quantize_heads(torch.zeros(2, 3, 8), DTYPES[kind])
    assert bool((scale == 1).all())
    assert not zeros.float().any()
    same, scale = quantize_heads(torch.full((1, 8), -0.3), DTYPES[kind])
    assert_equal(same.float(), torch.full((1, 8), -most))
    torch.testing.assert_close(same.float() * scale, torch.full((1, 8), -0.3))
    spike, scale = quantize_heads(torch.tensor([[1e30, 1.0, -1.0, 0.0]]), DTYPES[kind])
    assert spike.float().tolist() == [[most, 0.0, 0.0, 0.0]]
    assert float(scale) > 0
    halves = torch.tensor([[most, 0.5, 1.5, 2.5, -0.5, -1.5]])
    even = [most, 0.0, 2.0, 2.0, 0.0, -2.0] if kind == "int8" else halves[0].tolist()
    assert quantize_heads(halves, DTYPES[kind])[0].float()[0].tolist() == even, "ties go to the even one"


class Written:
    """Quantized pages among guards for a rotary case, and what must be in them."""

    def __init__(self, case: RopeCase, kind: str) -> None:
        heads, device = case.heads, case.qkv.view.device
        junk: dict[str, Any] = {"dtype": torch.float32, "device": device}
        self.kind = kind
        self.k = torch.full((PAGES, PAGE, heads.kv, heads.dim), JUNK[kind], **junk).to(DTYPES[kind])
        self.v = torch.full((PAGES, PAGE, heads.kv, heads.v_dim), JUNK[kind], **junk).to(DTYPES[kind])
        self.scales = torch.full((PAGES, 2, heads.kv, PAGE), float("nan"), **junk)

    def check(self, case: RopeCase, row: Tensor) -> None:
        """Every slot holds its token, as separate code quantizes what is in the row; nothing else was written."""
        heads = case.heads
        _, k, v = (part.cpu() for part in split_qkv(row, heads.q, heads.kv, heads.dim))
        wanted = Written(case, self.kind)
        pages = [wanted.k.cpu().double(), wanted.v.cpu().double()]
        scales = wanted.scales.cpu()
        for token, slot in enumerate(case.slots.tolist()):
            for i, x in enumerate((k, v) if slot >= 0 else ()):
                pages[i][slot // PAGE, slot % PAGE] = stored_numbers(x[token], self.kind)
                scales[slot // PAGE, i, :, slot % PAGE] = scale_of(x[token], self.kind)
        for found, want in zip((self.k, self.v, self.scales), (*pages, scales.double()), strict=True):
            torch.testing.assert_close(found.cpu().double(), want, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("heads", [*SHAPES, Heads(q=2, kv=2, dim=256, rotary=64, v_dim=192)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_keys_and_values_are_quantized_as_they_are_written(
    dtype: torch.dtype, heads: Heads, kind: str, device: torch.device
) -> None:
    case = RopeCase(heads, 5, dtype, device)
    case.before[2] = 0.0
    case.before[3] *= 1e-39  # denormal
    weight = torch.randn(heads.dim, device=device).to(dtype)
    options: list[dict[str, Any]] = [{}, {"cos": None, "sin": None}, {"q_norm_weight": weight, "k_norm_weight": weight}]
    for op in (rope_and_cache_torch, rope_and_cache_triton):
        for some in options:
            pages = Written(case, kind)
            row, *_ = case.run(op, k_pages=pages.k, v_pages=pages.v, scales=pages.scales, **some)
            pages.check(case, row)


def quantized(batch: Batch, kind: str, *, outliers: bool = False) -> tuple[Batch, Tensor]:
    """The batch over quantized pages, with junk where it had NaN, and the attention in fp64 over their meaning."""
    q, *both, table, lens, cu_q, max_q = batch.args
    values, scales, real = [], [], []
    for pages in both:
        x, used = pages.cpu().float().nan_to_num(), ~pages.cpu().isnan()
        if outliers:
            x[..., 0] *= 100.0
            x.view(-1, *x.shape[2:])[::97] *= 50.0
        numbers, scale = stored_numbers(x, kind), scale_of(x, kind)
        values.append(torch.where(used, numbers, JUNK[kind]).float().to(q.device).to(DTYPES[kind]))
        scales.append(torch.where(used[..., 0], scale, float("nan")).transpose(1, 2))
        real.append(torch.where(used, numbers * scale[..., None].double(), float("nan")).to(q.device))
    both_scales = torch.stack(scales, 1).contiguous().to(q.device)
    made = Batch(batch.case, (q, *values, table, lens, cu_q, max_q), {**batch.options, "scales": both_scales})
    return made, in_fp64(Batch(batch.case, (q, *real, table, lens, cu_q, max_q), batch.options))


def run(function: Any, batch: Batch, **options: Any) -> Tensor:
    found: Tensor = function(*batch.args, **batch.options, **options)
    return found


def check(found: Tensor, want: Tensor) -> None:
    """As for pages of fp32."""
    assert_close(found, want, roundings=2, magnitude=0.5)


@BOTH
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("changes", FEATURES.values(), ids=FEATURES)
def test_attention(way: str, changes: dict[str, Any], kind: str, device: torch.device) -> None:
    seqs, padding, runs = WAYS[way]
    batch, want = quantized(make_batch(Case(seqs, padding, heads=(2, 1), **changes), device), kind)
    for function, options in runs:
        check(run(function, batch, **options), want)


@BOTH
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("heads", "dims", "page"),
    [((3, 3), (64, 64), 16), ((7, 1), (80, 80), 32), ((9, 3), (72, 48), 48), ((4, 2), (256, 256), 64)],
)
def test_shapes(
    heads: tuple[int, int], dims: tuple[int, int], page: int, kind: str, way: str, device: torch.device
) -> None:
    seqs, padding, runs = WAYS[way]
    batch, want = quantized(make_batch(Case(seqs, padding, heads, dims, page), device), kind)
    for function, options in default_tiles(runs):
        check(run(function, batch, **options), want)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("threads", [1, 2])
def test_every_path_of_the_reference(threads: int, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Decodes one after another and by pages, one token alone, fresh prompts, pages that are not contiguous."""
    monkeypatch.setattr(attention_torch, "FEW_DECODES", 0)
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    monkeypatch.setattr(attention_by_page, "SLICE_BYTES", 20_000)
    for case in (
        Case((*DECODES, (7, 30), (1, 128)), padding=1, **ALL),
        Case((*DECODES, (7, 30), (1, 128)), padding=1),
        Case(((1, 81),)),
        Case(((1, 81),), window=20),
        Case(((9, 9), (30, 30))),
    ):
        batch, want = quantized(make_batch(case, torch.device("cpu")), kind)
        check(paged_attention_torch(*batch.args, **batch.options), want)
        q, k_pages, v_pages, *rest = batch.args
        apart = [torch.stack([pages.float()] * 2, 1).to(pages.dtype)[:, 0] for pages in (k_pages, v_pages)]
        check(run(paged_attention_torch, Batch(case, (q, *apart, *rest), batch.options)), want)


LONG = 32768


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("outliers", [False, True], ids=["random", "outliers"])
def test_32k_keys(outliers: bool, kind: str, device: torch.device) -> None:
    """Probabilities and results are rounded to bf16, unless q is fp32; sums are fp32. Outliers make scores of 10,000,
    whose roundings show too."""
    torch.manual_seed(0)  # the bound does not hold for outliers of every seed
    half = make_batch(Case(((1, LONG),), heads=(2, 1), dims=(32, 32), page=64, dtype=torch.bfloat16), device)
    runs: Runs = [
        (paged_attention_torch, {}),
        (paged_attention_decode, {"num_splits": 1, "tiles": DecodeTiles(256)}),
        (paged_attention_decode, {"num_splits": 7, "tiles": DecodeTiles(256)}),
        (paged_attention_prefill, {"tiles": PrefillTiles(16, 256)}),
    ]
    batch, want = quantized(half, kind, outliers=outliers)
    most = sizes(batch)  # the sum of p * |v|: what each rounding of p is relative to
    for function, options in runs:
        found = run(function, batch, **options).double()
        assert bool(((found - want).abs() <= 2.0**-7 * most + 1e-6).all()), (function.__name__, options)
    q, *rest = batch.args
    found = paged_attention_torch(q.float(), *rest, **batch.options).double()
    assert bool(((found - want).abs() <= (4e-3 if outliers else 1e-4) * most + 1e-6).all())


def sizes(batch: Batch) -> Tensor:
    """The attention of a batch over the magnitudes of its values, in fp64."""
    q, k, v, *rest = batch.args
    scales = batch.options["scales"].double().transpose(2, 3)[..., None]  # [N, 2, bs, Hkv, 1]
    options = {name: value for name, value in batch.options.items() if name != "scales"}
    return in_fp64(Batch(batch.case, (q, k.double() * scales[:, 0], (v.double() * scales[:, 1]).abs(), *rest), options))


@pytest.mark.parametrize("kind", KINDS)
def test_small_values_survive_16_bits(kind: str, device: torch.device) -> None:
    """A probability times a small scale is less than fp16 can hold."""
    batch = make_batch(Case(((1, 300), (5, 200)), dtype=torch.float16), device)
    batch.args[2].mul_(1e-3)
    batch, want = quantized(batch, kind)
    for mixed in (False, True):
        out = torch.empty_like(batch.empty_output())
        if mixed:
            run(paged_attention_decode, batch, out=out, mixed=True)
        run(paged_attention_prefill, batch, out=out, mixed=mixed)
        assert bool(((out.double() - want).abs() <= 2.0**-8 * sizes(batch) + 2.0**-24).all())


@pytest.mark.usefixtures("left_to_right")
@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=10, deadline=None, database=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_deterministic_attention_is_the_same_however_a_prompt_is_cut(kind: str, data: st.DataObject) -> None:
    lengths = data.draw(st.lists(st.integers(1, 90), min_size=1, max_size=2))
    case = Case(
        tuple((n, n) for n in lengths), heads=data.draw(st.sampled_from([(3, 1), (4, 2)])), **data.draw(features(90))
    )
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    whole, _ = quantized(make_batch(case, device), kind)
    parts, padding = data.draw(cut(lengths)), data.draw(st.integers(0, 3))
    check_invariance(paged_attention_prefill, whole, parts, padding)
    check_invariance(paged_attention_torch, whole, parts, padding)


def test_what_does_not_fit_is_refused(device: torch.device) -> None:
    batch, _ = quantized(make_batch(Case(((1, 20),)), device), "int8")
    q, k_pages, v_pages, *rest = batch.args
    scales = batch.options.pop("scales")
    wrong: list[tuple[Any, ...]] = [
        (k_pages, v_pages, None),
        (k_pages, v_pages.float(), scales),
        (k_pages.float(), v_pages.float(), scales),
        (k_pages, v_pages, scales.double()),
        (k_pages, v_pages, scales[:, :1]),
        (k_pages, v_pages, scales[..., :8]),
        (k_pages, v_pages, scales.transpose(2, 3).contiguous().transpose(2, 3)),
    ]
    for k, v, some in wrong:
        with pytest.raises(ValueError):
            paged_attention(q, k, v, *rest, **batch.options, scales=some)


@on_gpu
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dim", [64, 128, 256])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_real_shapes(dtype: torch.dtype, dim: int, kind: str, device: torch.device) -> None:
    case = Case(((1, 9000), (70, 500), (1, 3), (33, 33)), 3, (8, 2), (dim, dim), 64, dtype, sinks=True)
    batch, want = quantized(make_batch(case, device), kind)
    ways: list[dict[str, Any]] = [{"mixed": True}, {}, {"invariant": True}]
    for options in ways:
        found = run(paged_attention, batch, **options).double()
        assert bool(((found - want).abs() <= 2.0**-7 * sizes(batch) + 1e-6).all()), options
