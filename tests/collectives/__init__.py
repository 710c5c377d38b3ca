"""Collective calls and messages: sums, groups, work in flight, hosts, helpers, agreement of ranks."""
