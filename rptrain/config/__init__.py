"""The config: its keys, how a TOML file and overrides become one, and what is said about mistakes."""
