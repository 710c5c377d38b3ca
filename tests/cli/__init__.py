"""The commands of `trigram`, as users type them."""
