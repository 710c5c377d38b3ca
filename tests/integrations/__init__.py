"""Trigram inside the libraries in which people train: each against the library itself."""
