"""The terminal interface: a folder per feature, and what they share. Only the app and its imports need Textual."""
