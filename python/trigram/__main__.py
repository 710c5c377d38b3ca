"""`python -m trigram` is the `trigram` command."""

from trigram.cli import main

if __name__ == "__main__":
    main()
