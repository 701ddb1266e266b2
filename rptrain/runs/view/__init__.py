"""The state of a run, computed from its records for display."""
