"""Results of a step on their way to the host: asynchronous copies, waited for when they are read."""

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from outpace.sampling import LogprobRows, Logprobs
from outpace.types import Logprob, Request, StepOutput, TokenLogprobs


class Arriving:
    """Tensors being copied to the host."""

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self._tensors = [tensor.to("cpu", non_blocking=True) for tensor in tensors]  # page-locked
        self._event = None
        if tensors and tensors[0].device.type == "cuda":
            self._event = torch.cuda.Event()
            self._event.record()

    def read(self) -> list[Tensor]:
        if self._event is not None:
            self._event.synchronize()
        return self._tensors


class ArrivingLogprobs:
    """Log-probabilities being copied to the host."""

    def __init__(self, token_ids: Tensor, found: Logprobs) -> None:
        tensors = [token_ids, found.token_logprobs, found.token_ranks, found.top_ids, found.top_logprobs]
        self._arriving = Arriving(tensors if found.top_ranks is None else [*tensors, found.top_ranks])

    def read(self, counts: Sequence[int]) -> list[TokenLogprobs]:
        """For each row the sampled token and `count` others; -1: the whole vocabulary."""
        token_ids, logprobs, ranks, others, values, *given = (tensor.tolist() for tensor in self._arriving.read())
        found: list[TokenLogprobs] = []
        for row, count in enumerate(counts):
            some = slice(None) if count < 0 else slice(count)
            ordered = given[0][row] if given else _ranks(values[row])
            rest = zip(others[row][some], values[row][some], ordered[some], strict=True)
            entry = {token: Logprob(value, rank) for token, value, rank in rest}
            found.append({token_ids[row]: Logprob(logprobs[row], ranks[row])} | entry)
        return found


def _ranks(values: Sequence[float]) -> list[int]:
    """Ranks of values sorted in descending order; equal values share the better rank."""
    ranks: list[int] = []
    for place, value in enumerate(values):
        ranks.append(ranks[-1] if place and value == values[place - 1] else place + 1)
    return ranks


def arriving_logprobs(
    token_ids: Tensor, found: Sequence[tuple[LogprobRows, Logprobs]]
) -> list[tuple[tuple[int, ...], ArrivingLogprobs]]:
    """Start copying the log-probabilities of a step, by row number."""
    return [
        (wanted.places, ArrivingLogprobs(token_ids if wanted.rows is None else token_ids[wanted.rows], details))
        for wanted, details in found
    ]


def send_back(
    step_id: int,
    requests: Sequence[Request],
    chosen: Arriving,
    places: Sequence[int],
    details: Sequence[tuple[tuple[int, ...], ArrivingLogprobs]],
    prompts: Callable[[], Mapping[str, Mapping[int, TokenLogprobs]]],
    failed: Mapping[str, str] | None = None,
) -> Callable[[], StepOutput]:
    """A function that waits for a step's output; the token of each request is at its index in the sampled tokens."""

    def output() -> StepOutput:
        tokens = chosen.read()[0].tolist()
        names = [request.request_id for request in requests]
        token_ids = {name: tokens[place] for name, place in zip(names, places, strict=True)}
        wanted: dict[str, TokenLogprobs] = {}
        for rows, arriving in details:
            found = arriving.read([requests[row].params.num_logprobs for row in rows])
            wanted.update(zip((names[row] for row in rows), found, strict=True))
        return StepOutput(step_id, token_ids, wanted, prompts(), failed or {})

    return output
