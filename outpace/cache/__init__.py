"""The key-value cache: pages that any sequence can own."""
