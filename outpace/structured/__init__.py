"""Answers held to a JSON schema, a regular expression, a grammar or a choice: the border with llguidance."""
