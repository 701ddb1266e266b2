"""The checks of `rptrain doctor`: whether this machine can train, and what to do if not."""
