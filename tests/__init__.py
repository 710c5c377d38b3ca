"""The Python test suite: ranks are real processes, hosts are network namespaces.

One folder for each subject. `support` holds what tests share, `reference` what results are compared with.
"""
