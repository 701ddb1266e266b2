"""Host memory: a model, its gradients and optimizer state, and activations between stages."""
