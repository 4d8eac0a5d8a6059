"""Policies: models with their tokenizers."""
