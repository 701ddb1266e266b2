"""Fine-tunes language models that are larger than the GPUs they train on."""

__version__ = "0.1.0"
