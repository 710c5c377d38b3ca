"""Mixture of experts, see docs/moe.md."""
