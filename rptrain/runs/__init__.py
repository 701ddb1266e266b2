"""Runs seen from outside: what a trainer writes, read while it writes. Nothing here imports torch."""
