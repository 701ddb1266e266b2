"""The layers of a decoder, forward and backward, and text generation with a cache."""
