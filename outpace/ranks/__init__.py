"""The ranks that `LLM` starts itself: how they begin, work and end together."""
