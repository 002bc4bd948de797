"""One file per op: a torch reference, a Triton kernel, and the launcher that checks its input and runs one of them."""
