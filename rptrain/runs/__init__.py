"""The files of a run: writing them, and reading them while the trainer writes. Nothing here imports torch."""
