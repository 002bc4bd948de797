"""Tests a real server with load and faults for minutes: `scripts/soak`. docs/reliability.md explains each row."""
