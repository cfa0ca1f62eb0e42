"""The command line and what it needs."""
