"""The interfaces of other libraries, for scripts that move: only their import changes."""
