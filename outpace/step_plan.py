"""A step while the scheduler puts it together, and the totals of all steps. No tensors."""

from dataclasses import dataclass, field

from outpace.cache.tiers import TierTotals
from outpace.sequence import Sequence
from outpace.types import Step


@dataclass(slots=True)
class StepPlan:
    """A step being put together, and the room that is left in it."""

    step: Step
    budget: int  # tokens
    chunk: int  # most of them for one request, as long as others want some
    longest: int  # most of them for one request
    turns: list[Sequence]  # running requests in the order of service; the last give way first
    num_served: int = 0  # of these
    decodes: int = 0  # requests that may still decode, where there are several stages
    waiting_rank: tuple[int, float] | None = None  # the lowest of waiting requests, where several callers take part
    refused: set[str] = field(default_factory=set)  # callers whose first waiting request did not fit
    blocked: list[Sequence] = field(default_factory=list)  # those that had a slot and lacked blocks
    claimed: int = 0  # blocks that requests in this step will need for the tokens they have
    prefill: int = 0  # tokens of prompts, and of answers that are computed once more
    flying: list[tuple[Sequence, int, bool]] = field(default_factory=list)  # sequence, its end, whether it samples

    def room(self, sequence: Sequence) -> int:
        """Tokens that this request may have: one is kept for each running request that is still to come."""
        kept = len(self.turns) - self.num_served
        return min(sequence.target - sequence.num_computed, self.chunk, self.budget - kept)

    def after(self, sequence: Sequence) -> list[Sequence]:
        """Running requests of other callers and a higher rank that may give way to a waiting one."""
        caller, rank = sequence.request.caller, sequence.rank
        return [
            each
            for each in self.turns[self.num_served :]
            if each.rank > rank and each.request.caller != caller and each.may_give_way
        ]


@dataclass(slots=True)
class Totals:
    """What has been scheduled so far."""

    steps: int = 0
    """Steps that computed anything."""
    prefill_tokens: int = 0
    """Tokens of prompts, and those that are computed once more after a preemption."""
    decode_tokens: int = 0
    preemptions: int = 0
    prefix_hits: int = 0
    """Tokens that were found in the cache, on whatever level, when their request came in."""
    prefix_queries: int = 0
    """Tokens that were looked for there."""
    iteration_tokens: int = 0
    """Prefill tokens of the steps that are over, and the new tokens that these gave."""
    tiers: TierTotals = field(default_factory=TierTotals)
    """Of the levels of the prefix cache below the device."""
