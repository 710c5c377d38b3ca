"""Elastic jobs: recovery after a death, ranks that join later, and which part of a divided job goes on."""
