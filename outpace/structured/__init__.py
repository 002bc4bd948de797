"""Answers held to a JSON schema, a regular expression, a grammar or a choice. All that is known of xgrammar is here."""
