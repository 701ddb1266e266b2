"""Fused AdamW on the CPU, and the gradients that it applies."""
