"""cublasLt's algorithms on a GPU: each against the exact result, in graphs too, and the whole search."""

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from outpace import LLM, SamplingParams
from outpace.kernels.cublaslt import Algorithm, CublasLt, Product
from outpace.kernels.library import TunedLinear, by_plan
from outpace.kernels.matmul import matmul_torch
from outpace.kernels.product_search import DeviceClock, Kind, tune
from tests.models import byte_tokenizer, tiny

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")]

DTYPES = (torch.bfloat16, torch.float16)
SHAPES = ((17, 64, 64), (33, 136, 72), (19, 50, 30), (100, 4096, 1024), (231, 1536, 4096), (513, 1000, 999))
ENDS = ((), ("bias",), ("add",), ("bias", "add"))


@pytest.fixture(scope="module")
def library() -> CublasLt:
    torch.randn(8, 8, device="cuda") @ torch.randn(8, 8, device="cuda")
    return CublasLt.find()


def operands(shape: tuple[int, int, int], dtype: torch.dtype, ends: tuple[str, ...]) -> tuple[Any, ...]:
    """x, weight, bias and add; and the exact result."""
    rows, outputs, depth = shape
    kind: dict[str, Any] = {"dtype": dtype, "device": "cuda"}
    x, weight = torch.randn(rows, depth, **kind), torch.randn(outputs, depth, **kind) / depth**0.5
    bias = torch.randn(outputs, **kind) if "bias" in ends else None
    add = torch.randn(rows, outputs, **kind) if "add" in ends else None
    return x, weight, bias, add, exact(x, weight, bias, add)


def exact(x: Tensor, weight: Tensor, bias: Tensor | None, add: Tensor | None) -> Tensor:
    result = x.double() @ weight.double().t()
    for term in (bias, add):
        result = result if term is None else result + term.double()
    return result


def assert_right(got: Tensor, want: Tensor) -> None:
    error = (got.double() - want).abs().max() / want.abs().max()
    assert error < 1e-2, float(error)  # a NaN is no less


def algorithms(library: CublasLt, product: Product) -> list[Algorithm]:
    found = library.proposals(product)
    assert found or product.outputs % 8 or product.depth % 8, product
    return found


@pytest.mark.parametrize("ends", ENDS, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_every_algorithm_is_right(
    shape: tuple[int, int, int], dtype: torch.dtype, ends: tuple[str, ...], library: CublasLt
) -> None:
    x, weight, bias, add, want = operands(shape, dtype, ends)
    product = Product.of(x, weight, bias, add)
    for algorithm in algorithms(library, product):
        assert library.checked(product, algorithm.data) is not None
        plan = library.plan(product, algorithm)
        out = torch.full(want.shape, float("nan"), dtype=dtype, device="cuda")
        plan(x, weight, bias, add, out)
        assert_right(out, want)
        if add is not None:
            place = add.clone()
            plan(x, weight, bias, place, place)
            assert_right(place, want)


@pytest.mark.parametrize("ends", ENDS, ids=str)
def test_graphs_have_workspaces_of_their_own(ends: tuple[str, ...], library: CublasLt) -> None:
    """Graphs of several algorithms, captured before either runs, replayed at once on two streams."""
    x, weight, bias, add, _ = operands((64, 1024, 8192), torch.bfloat16, ends)
    product = Product.of(x, weight, bias, add)
    found = sorted(algorithms(library, product), key=lambda each: -each.workspace)[:4]
    graphs: list[tuple[torch.cuda.CUDAGraph, Tensor]] = []
    pool = torch.cuda.graph_pool_handle()
    for number, algorithm in enumerate(found):
        plan = library.plan(product, algorithm)
        by_plan(plan, x, weight, bias, add=add)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=pool if number < 2 else None):
            out = torch.empty(64, 1024, dtype=x.dtype, device="cuda")
            for _ in range(3):
                by_plan(plan, x, weight, bias, add=add, out=out)
        graphs.append((graph, out))
    x.copy_(torch.randn_like(x))
    want = exact(x, weight, bias, add)
    for graph, _ in graphs[:2]:  # those that share memory: one after the other
        graph.replay()
    assert_right(graphs[min(1, len(graphs) - 1)][1], want)
    torch.cuda.synchronize()
    streams = [torch.cuda.Stream() for _ in graphs[2:]]
    for (graph, _), stream in zip(graphs[2:], streams, strict=True):
        with torch.cuda.stream(stream):
            graph.replay()
    torch.cuda.synchronize()
    for _, out in graphs[2:]:
        assert_right(out, want)


def test_a_search_finds_algorithms_that_are_right(library: CublasLt) -> None:
    kinds = []
    for outputs, depth, has_bias, has_add in (
        (4096, 4096, False, True),
        (6144, 4096, True, False),
        (1024, 2048, True, True),
    ):
        layers = [operands((1, outputs, depth), torch.bfloat16, ("bias",) if has_bias else ())[1:3] for _ in range(4)]
        product = Product(17, outputs, depth, torch.bfloat16, has_bias, has_add)
        kinds.append(Kind(product, tuple(layers), (24, 32, 128, 232, 256)))
    with torch.no_grad():
        tuned = tune(kinds, library, DeviceClock(), {}, seconds=30.0)
    assert len(tuned.found) == 15
    assert tuned.left == 0
    again = tune(kinds, library, DeviceClock(), tuned.found, seconds=0.0)
    assert again.plans.keys() == tuned.plans.keys()
    linear = TunedLinear()
    linear.use(tuned.plans)
    for kind, rows in itertools.product(kinds, (24, 232)):
        weight, bias = kind.operands[0]
        x = torch.randn(rows, kind.product.depth, dtype=torch.bfloat16, device="cuda")
        add = torch.randn(rows, kind.product.outputs, dtype=torch.bfloat16, device="cuda") if kind.product.add else None
        want = exact(x, weight, bias, add)
        assert_right(linear(x, weight, bias, add=add), want)
        assert_right(matmul_torch(x, weight, bias, add=add), want)


def test_operands_that_no_algorithm_takes(library: CublasLt) -> None:
    x, weight, _, _, _ = operands((65, 64, 64), torch.bfloat16, ())
    product = Product(64, 64, 64, torch.bfloat16, False, False)
    linear = TunedLinear()
    linear.use({product: library.plan(product, algorithms(library, product)[0])})
    assert_right(linear(x[1:], weight), exact(x[1:], weight, None, None))
    strided = torch.randn(64, 128, dtype=torch.bfloat16, device="cuda")[:, :64]
    assert_right(linear(strided, weight), exact(strided, weight, None, None))


def test_a_start_tunes_and_the_next_one_reads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OUTPACE_CACHE", str(tmp_path))
    tokenizer = byte_tokenizer()
    texts = []
    tuned = {"kernels": {"linear": "tuned"}}
    for options in (tuned, tuned, {}):
        model = tiny("llama", vocab_size=len(tokenizer), max_position_embeddings=512)
        given: dict[str, Any] = {"dtype": "bf16", "num_blocks": 200, "max_num_seqs": 32, **options}
        with LLM(model, tokenizer=tokenizer, device="cuda", **given) as llm:
            params = SamplingParams(max_tokens=4, temperature=0.0)
            found = llm.generate([f"prompt {number}" for number in range(40)], params, use_tqdm=False)
        texts.append([output.outputs[0].token_ids for output in found])
    assert len(list((tmp_path / "products").glob("*.json"))) == 1
    assert [len(each) for each in texts] == [40, 40, 40]
