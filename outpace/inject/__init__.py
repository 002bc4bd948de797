"""Fused layers in place of a model's own: policies say which module plays which role, one layer runs them all."""
