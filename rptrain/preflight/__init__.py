"""Before a run: the model that a config trains, and the checks that can refuse it."""
