"""Perplexity of a model, and its agreement with another, measured with the runtime that serves it."""

from outpace.quality.evaluate import agreement, evaluate, perplexity
from outpace.quality.report import Agreement, Evaluation, Perplexity, WindowLoss

__all__ = ["Agreement", "Evaluation", "Perplexity", "WindowLoss", "agreement", "evaluate", "perplexity"]
