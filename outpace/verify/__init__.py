"""Checks that fused layers do not change a model: compares its results in Outpace with plain Hugging Face."""

from outpace.verify.ranks import RanksReport, verify_ranks
from outpace.verify.report import Compared, PromptReport, Report
from outpace.verify.run import verify

__all__ = ["Compared", "PromptReport", "RanksReport", "Report", "verify", "verify_ranks"]
