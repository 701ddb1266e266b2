"""Dialogs that several screens open, and their texts."""
