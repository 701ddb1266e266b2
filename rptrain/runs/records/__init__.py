"""The records of a run: their types, and reading them from its files."""
