"""Bad and hostile inputs, each with the outcome that the program must show; see `__main__.py`."""
