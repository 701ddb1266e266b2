"""Changes of a model: adapters, frozen and quantized parameters, FP8, half sums, balance of experts."""
