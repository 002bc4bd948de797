"""Answers that follow a JSON schema, a regular expression, a grammar or a choice, by llguidance."""
