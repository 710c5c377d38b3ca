"""The Trainer of transformers, Ray Train and examples: what `make test-integrations` installs and runs."""
