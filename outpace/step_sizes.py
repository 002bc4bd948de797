"""The token budget of the next step, and how much of it one prompt may have. No tensors.

A long step delays every token it produces. While any request is streamed (`Request.streamed`), a step has at most
`max_streamed_tokens`, and in a step with decodes one prompt has at most `max_chunk_beside_decodes` of them, so that it
delays decodes and short prompts only a little. Otherwise prompts are computed whole, up to `max_num_batched_tokens`.
"""

from collections.abc import Sequence as List
from dataclasses import dataclass

from outpace.errors import ConfigError
from outpace.sequence import Sequence

MAX_CHUNK = 384  # tokens of one prompt in a step with decodes, if neither set by the user nor measured
OVERTIME = (0.02, 16)  # allowed delay of the last end: fraction of the longest request's steps, at most this many


@dataclass(slots=True, kw_only=True)
class StepSizes:
    """Limits of steps."""

    max_num_seqs: int
    max_num_batched_tokens: int
    """Most tokens of a step."""
    max_streamed_tokens: int
    """Most tokens of a step while a request is streamed."""
    max_chunk_beside_decodes: int
    """Most tokens of one prompt in a step with decodes, while a request is streamed."""
    chunk_always: bool = False
    """Whether that holds while nothing is streamed, too."""
    paced: bool = False
    """Whether prompts are spread over the steps, see `pace`."""
    padded: tuple[int, ...] = ()
    """Sizes to which steps with prompts are padded; empty: no padding."""

    @classmethod
    def of(
        cls,
        *,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        max_streamed_tokens: int | None,
        max_chunk_beside_decodes: int | None,
        streamed_chunk: int | None,
        paced: bool,
        padded: List[int],
    ) -> "StepSizes":
        """Check the values and fill in defaults for None.

        max_chunk_beside_decodes: set by the user, so it also holds when nothing is streamed. streamed_chunk: the
        measured default; None: a quarter of a step, at most 384, so that several prompts advance side by side.
        """
        if not 1 <= max_num_seqs <= max_num_batched_tokens:
            raise ConfigError(
                f"max_num_batched_tokens={max_num_batched_tokens}: must be at least max_num_seqs={max_num_seqs} (>= 1),"
                " a token for each request"
            )
        streamed = min(max_streamed_tokens or max_num_batched_tokens, max_num_batched_tokens)
        default = streamed_chunk or max(1, min(MAX_CHUNK, streamed // 4))
        chunk = default if max_chunk_beside_decodes is None else max_chunk_beside_decodes
        if chunk < 1:
            raise ConfigError(f"max_chunk_beside_decodes: must be at least 1, got {chunk}")
        return cls(
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_batched_tokens,
            max_streamed_tokens=max(max_num_seqs, streamed),
            max_chunk_beside_decodes=chunk,
            chunk_always=max_chunk_beside_decodes is not None,
            paced=paced,
            padded=tuple(padded),
        )

    def tokens(self, num_streamed: int) -> int:
        return self.max_streamed_tokens if num_streamed else self.max_num_batched_tokens

    def paced_tokens(self, most: int, running: List[Sequence], waiting: List[Sequence]) -> int:
        """Token budget, at most `most`, of a step that spreads prompts over the steps."""
        if not self.paced:
            return most
        everyone = (*running, *waiting)
        # there are too few slots, so fill them soon; or some requests are more urgent, and must not be spread
        if len(everyone) > self.max_num_seqs or len({each.order.priority for each in everyone}) > 1:
            return min(most, self.max_streamed_tokens)  # a larger step would have fewer decodes beside its prompts
        wanted = pace(running, waiting)
        return most if wanted is None else min(most, next((size for size in self.padded if size >= wanted), wanted))

    def chunk(self, tokens: int, num_streamed: int, running: List[Sequence]) -> int:
        if not num_streamed and not self.chunk_always:
            return tokens
        decoding = any(each.target - each.num_computed == 1 for each in running)
        return self.max_chunk_beside_decodes if decoding else tokens


def pace(running: List[Sequence], waiting: List[Sequence]) -> int | None:
    """Token budget at which all requests end about when the longest one does; None: any budget will do.

    Decodes read all weights and leave the arithmetic units idle, so prompt tokens in the same step cost little. A
    request with n tokens to produce delays nobody if it starts n steps before the longest one ends. So each prompt is
    computed as late as that allows, and as many steps as possible have both decodes and prompt tokens.
    """
    prompts = [each for each in running if each.is_prefilling]
    prompts += waiting
    if not prompts:
        return None
    longest = max(1, *(each.num_missing for each in (*running, *waiting)))
    last = longest + min(OVERTIME[0] * longest, OVERTIME[1])
    tokens, rate = 0, 0.0
    for each in prompts:
        tokens += each.target - each.num_computed
        rate = max(rate, tokens / (last - each.num_missing))
    decodes = len(running) + len(waiting) - len(prompts)
    return max(len(running) + 1, decodes + int(rate) + 1)
