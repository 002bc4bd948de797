"""The benchmarks of scripts/bench and scripts/soak; results are in bench/results."""
