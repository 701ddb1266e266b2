"""The screens and dialogs of the interface."""
