"""Load and faults against a real server, over minutes: `scripts/soak`. docs/reliability.md says what each row shows."""
