"""A trained model's answers: text from a run, and scores of the built-in tasks."""
