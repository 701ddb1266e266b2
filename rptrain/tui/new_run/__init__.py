"""The New run screen: a config with its plan, to edit and start."""
