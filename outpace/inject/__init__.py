"""Fused layers that replace a model's own. A policy names the module of each role; one class runs all families."""
