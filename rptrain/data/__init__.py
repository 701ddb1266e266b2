"""From files of text to batches of tokens."""
