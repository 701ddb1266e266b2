"""LoRA adapters, and which parameters train."""
