"""Native model definitions: specs, layers, weights, presets."""
