"""Every algorithm against a simulation of all ranks.

Weights, bytes sent, state, graphs, robust averages, and what is refused.
"""
