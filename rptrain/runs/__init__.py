"""The files of a run: their records, the state that follows from these, and their folder. Nothing imports torch."""
