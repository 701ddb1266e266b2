"""Files of models: configs, safetensors, quantized and file-backed weights."""
