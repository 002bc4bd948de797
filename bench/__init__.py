"""What is measured and how; results lie in bench/results."""
