"""Saving, resuming and exporting."""
