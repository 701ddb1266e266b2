"""The Runs screen: the runs of a folder, compared."""
