"""Data: from text files to batches of tokens."""
