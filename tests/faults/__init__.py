"""Ranks that disagree, die, stay silent or lose their link: every rank soon raises the right error."""
