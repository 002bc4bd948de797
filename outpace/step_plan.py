"""A step while the scheduler builds it, and the totals over all steps. No tensors."""

from dataclasses import dataclass, field

from outpace.cache.tiers import TierTotals
from outpace.sequence import Sequence
from outpace.types import Step


@dataclass(slots=True)
class StepPlan:
    """A step being built, and the room left in it."""

    step: Step
    budget: int  # tokens left
    chunk: int  # most tokens of one request while other callers want some
    longest: int  # most tokens of one request in any case
    turns: list[Sequence]  # running requests in order of service; the last ones are preempted first
    num_served: int = 0  # how many of `turns` have been served
    decodes: int = 0  # requests that may still decode, with several stages
    waiting_rank: tuple[int, float] | None = None  # lowest rank of a waiting request, with several callers
    refused: set[str] = field(default_factory=set)  # callers whose first waiting request did not fit
    blocked: list[Sequence] = field(default_factory=list)  # those of them for which a slot was free, but not the blocks
    claimed: int = 0  # blocks that requests in this step still need for the tokens they have
    size: int = 0  # token budget of the step
    prefill: int = 0  # tokens of prompts, and of answers that are recomputed
    flying: list[tuple[Sequence, int, bool]] = field(default_factory=list)  # sequence, its end, whether it samples

    def __post_init__(self) -> None:
        self.size = self.budget

    def room(self, sequence: Sequence) -> int:
        """Tokens that this request may have. One token is reserved for each running request not served yet."""
        kept = len(self.turns) - self.num_served
        return min(sequence.target - sequence.num_computed, self.chunk, self.budget - kept)

    def after(self, sequence: Sequence) -> list[Sequence]:
        """Running requests of other callers that may be preempted for a waiting one: those of a higher rank."""
        caller, rank = sequence.request.caller, sequence.rank
        return [
            each
            for each in self.turns[self.num_served :]
            if each.rank > rank and each.request.caller != caller and each.may_give_way
        ]


@dataclass(slots=True)
class Totals:
    """Counters of what has been scheduled."""

    steps: int = 0
    """Steps that computed anything."""
    prefill_tokens: int = 0
    """Tokens of prompts, and tokens recomputed after a preemption."""
    decode_tokens: int = 0
    preemptions: int = 0
    prefix_hits: int = 0
    """Tokens found in the prefix cache, on any level, when their request was admitted."""
    prefix_queries: int = 0
    """Tokens looked up there."""
    iteration_tokens: int = 0
    """Prefill tokens of finished steps plus the new tokens they sampled."""
    tiers: TierTotals = field(default_factory=TierTotals)
    """Counters of the cache levels below the device."""
