"""Samplers and caches, see docs/data.md."""
