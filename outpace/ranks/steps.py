"""Converts a step to the message that the other ranks get."""

from outpace.ranks.messages import About, Launch, Piece
from outpace.sampling import is_plain
from outpace.types import Request, ScheduledSequence, Step


def launch_of(step: Step, *, for_logits: bool = False) -> Launch:
    """A step as a message. for_logits: see `Launch`."""
    pieces = [_piece(entry) for entry in step.sequences]
    gone = step.ended, list(step.preempted)
    return Launch(step.step_id, *gone, step.copied, step.copies, step.after, pieces, for_logits)


def _piece(entry: ScheduledSequence) -> Piece:
    about = None if entry.request is None else _about(entry.request)
    numbers = entry.request_id, entry.start, entry.num_new_tokens, entry.samples
    return Piece(*numbers, entry.new_blocks, entry.token_ids, about)


def _about(request: Request) -> About:
    reads = request.watch is not None or request.params.prompt_logprobs is not None
    prompt = len(request.prompt_token_ids)
    return About(prompt, request.pooling, request.prompt_only, reads, is_plain(request))
