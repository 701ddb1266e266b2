"""Export of a run: the questions, the process and its progress."""
