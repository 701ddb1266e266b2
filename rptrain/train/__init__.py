"""Training: the loop, its setup, checkpoints, validation and monitoring."""
