"""Training: the loop, what it needs, and what it leaves."""
