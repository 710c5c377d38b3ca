"""Strangers on the network, in the store and on the host neither join a job nor disturb it."""
