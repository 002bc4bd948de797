"""Weight quantization: a scheme says how a weight is stored, rules say which weight gets which scheme."""
