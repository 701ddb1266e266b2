"""Transfers between host and devices: parameters, gradients, boundary activations and inputs."""
