"""Inference: text generation, and scores on the built-in tasks."""
