"""Tunes the matrix products of steps before graphs are captured (see `kernels.product_search`)."""

import json
from collections.abc import Sequence

import torch

from outpace.inject.paged import BatchModel
from outpace.kernels.compile_ahead import launching_nothing
from outpace.kernels.cublaslt import CublasLt, Unavailable
from outpace.kernels.library import TunedLinear
from outpace.kernels.product_cache import ProductCache, by_names, cache_file, from_names, identity
from outpace.kernels.product_search import ROWS, DeviceClock, Found, Kind, Tuned, kinds_of, tune
from outpace.loading.cache import cache_dir
from outpace.log import chosen
from outpace.parallel.group import Group
from outpace.runner.runner import Runner
from outpace.runner.step_graphs import Shape

SECONDS = 2.0  # seconds for the search; the next start continues it


@torch.no_grad()
def tune_products(model: BatchModel, runner: Runner, wanted: Sequence[Shape]) -> None:
    """Find the fastest algorithms for the products of these step shapes, or read them from the cache folder.

    Runs a step to collect the products, without kernels that may not be compiled yet. With several ranks, the first
    rank of a stage searches and the others use its result: what each rank computes redundantly, such as a router, must
    not differ between ranks.
    """
    linear, shape = model.kernels.linear, unambiguous_shape(wanted)
    if not isinstance(linear, TunedLinear) or shape is None or model.streaming is not None:
        return
    with linear.watched() as calls, launching_nothing():
        runner.warm_up(shape)
    tokens, seqs = ({shape.num_tokens for shape in wanted}, {shape.num_seqs for shape in wanted})
    kinds = kinds_of(calls, {shape.num_tokens: sorted(tokens), shape.num_seqs: sorted(seqs)})
    tuned = _tuned(model.device, kinds) if model.ranks.rank == 0 else Tuned()
    if model.ranks.size > 1:
        taken = _from_first_rank(model.ranks, tuned.taken, model.device)
        mine = [product for kind in kinds for product in kind.products()]
        if model.ranks.rank > 0:
            tuned = _tuned(model.device, kinds, {product: taken.get(product) for product in mine})
        same = all(product in tuned.plans for product in mine if product in taken)
        if not model.ranks.least(int(same), model.device):
            chosen("products", "as torch computes them", "a rank cannot compute them as the first one does")
            return
    linear.use(tuned.plans)


def _tuned(device: torch.device, kinds: Sequence[Kind], given: Found | None = None) -> Tuned:
    """Plans for these products. given: those of the first rank; None: this rank searches."""
    try:
        with torch.cuda.device(device):
            library = CublasLt.find()
            if given is not None:
                return tune(kinds, library, DeviceClock(), given, seconds=0.0)
            known_by = identity(device, library.version)
            cache = ProductCache(cache_file(cache_dir(), device, known_by), known_by)
            tuned = tune(kinds, library, DeviceClock(), cache.read(), SECONDS)
    except (Unavailable, torch.OutOfMemoryError) as error:
        chosen("products", "as torch computes them", str(error).splitlines()[0])
        return Tuned()
    cache.add(tuned.found)
    tuned.log()
    return tuned


def _from_first_rank(ranks: Group, taken: Found, device: torch.device) -> Found:
    text = json.dumps(by_names(taken)).encode()
    size = int(ranks.from_first(torch.tensor([len(text)], device=device))[0])
    sent = torch.tensor(list(text) if ranks.rank == 0 else [0] * size, dtype=torch.uint8, device=device)
    return from_names(json.loads(bytes(ranks.from_first(sent).tolist())))


def unambiguous_shape(wanted: Sequence[Shape]) -> Shape | None:
    """A shape in which a product's number of rows shows whether it has a row per token or per sequence."""
    few = all(shape.num_seqs < ROWS.start for shape in wanted)  # then only rows per token matter
    for kind in ("fresh", "chunks") if few else ("mixed", "chunks"):
        sizes = sorted((shape for shape in wanted if shape.kind == kind), key=lambda shape: shape.num_tokens)
        for shape in sizes[:1] + sizes[-1:]:  # kernels of both kinds are compiled
            if shape.num_tokens != shape.num_seqs:
                return shape
    return None
