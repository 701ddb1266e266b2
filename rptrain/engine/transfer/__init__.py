"""What moves between host and device: parameters, gradients, boundary activations, inputs."""
