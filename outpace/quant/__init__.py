"""Quantized weights: schemes say what a weight becomes, rules say which weight gets which scheme."""
