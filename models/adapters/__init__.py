"""LoRA adapters and frozen parameters."""
