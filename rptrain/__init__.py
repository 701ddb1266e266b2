"""Fine-tunes language models that are larger than the GPUs they train on."""
