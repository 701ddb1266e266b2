"""Families of models: one file each, what they share, and the registry that collects them."""
