"""Steps of two processes over a limited network, against the plan's prediction."""
