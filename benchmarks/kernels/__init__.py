"""Measurements of each kernel beside other implementations."""
