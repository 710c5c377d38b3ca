"""Runs the test suites of the libraries that Trigram takes the place of, as they are, with Trigram and with
what it replaces, and writes docs/conformance.md. Nothing of the suites is copied into the project."""
