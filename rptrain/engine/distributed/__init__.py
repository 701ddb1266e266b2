"""Several processes train one model: each computes some groups of replicas, and has a part of the optimizer state."""
