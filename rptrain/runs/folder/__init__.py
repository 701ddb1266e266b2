"""The folder of a run: its files, its lock, commands to its trainer, and folders of several runs."""
