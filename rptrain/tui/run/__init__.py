"""The Run screen: one run, current or past."""
