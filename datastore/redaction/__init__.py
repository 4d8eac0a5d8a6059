"""Secrets in rows: where they are, and rows in which typed placeholders stand for them."""
