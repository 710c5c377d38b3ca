"""Import, init, shutdown, signals, forks and leaks: what the process that uses trigram sees."""
