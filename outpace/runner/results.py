"""The way of a step's results to the host: copies that nobody waits for until they are read."""

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from outpace.sampling import Logprobs
from outpace.types import Logprob, Request, StepOutput, TokenLogprobs


class Arriving:
    """Tensors on their way to the host."""

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self._tensors = [tensor.to("cpu", non_blocking=True) for tensor in tensors]  # page-locked
        self._event = None
        if tensors and tensors[0].device.type == "cuda":
            self._event = torch.cuda.Event()
            self._event.record()

    def read(self) -> list[Tensor]:
        """Wait for them."""
        if self._event is not None:
            self._event.synchronize()
        return self._tensors


class ArrivingLogprobs:
    """Log-probabilities on their way."""

    def __init__(self, token_ids: Tensor, found: Logprobs) -> None:
        self._arriving = Arriving(
            [token_ids, found.token_logprobs, found.token_ranks, found.top_ids, found.top_logprobs]
        )

    def read(self, counts: Sequence[int | None]) -> list[TokenLogprobs | None]:
        """For each row the chosen token and so many of the likeliest; None where none are wanted."""
        token_ids, logprobs, ranks, top_ids, top = (tensor.tolist() for tensor in self._arriving.read())
        found: list[TokenLogprobs | None] = []
        for row, count in enumerate(counts):
            if count is None:
                found.append(None)
                continue
            values = top[row][:count]
            likeliest = zip(top_ids[row], values, strict=False)
            entry = {token: Logprob(value, 1 + values.index(value)) for token, value in likeliest}
            found.append({token_ids[row]: Logprob(logprobs[row], ranks[row])} | entry)
        return found


def send_back(
    step_id: int,
    requests: Sequence[Request],
    chosen: Arriving,
    places: Sequence[int],
    details: ArrivingLogprobs | None,
    prompts: Callable[[], Mapping[str, Mapping[int, TokenLogprobs]]],
    failed: Mapping[str, str] | None = None,
) -> Callable[[], StepOutput]:
    """The output of a step, once it is there: the token of each request stands at its place in what was chosen."""

    def output() -> StepOutput:
        tokens = chosen.read()[0].tolist()
        names = [request.request_id for request in requests]
        token_ids = {name: tokens[place] for name, place in zip(names, places, strict=True)}
        found = [] if details is None else details.read([request.params.logprobs for request in requests])
        wanted = {name: entry for name, entry in zip(names, found, strict=False) if entry is not None}
        return StepOutput(step_id, token_ids, wanted, prompts(), failed or {})

    return output
