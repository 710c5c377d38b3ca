"""Scripts on public libraries, which `make test-libraries` installs and runs; `make test` does not."""
