"""The Python test-suite: ranks are real processes, hosts are network namespaces."""
