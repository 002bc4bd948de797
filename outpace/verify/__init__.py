"""Whether a model with fused layers is still the model it was: plain Hugging Face and Outpace side by side."""

from outpace.verify.ranks import RanksReport, verify_ranks
from outpace.verify.report import Compared, PromptReport, Report
from outpace.verify.run import verify

__all__ = ["Compared", "PromptReport", "RanksReport", "Report", "verify", "verify_ranks"]
