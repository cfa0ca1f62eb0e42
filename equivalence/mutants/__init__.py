"""Kernels broken on purpose, by small named edits of the true ones, to measure what the checkers catch."""
