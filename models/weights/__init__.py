"""A model's files: configs, safetensors, quantized and file-backed weights."""
