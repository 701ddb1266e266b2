"""The optimizer's thread, and fused AdamW on the CPU."""
