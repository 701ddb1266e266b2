"""Schedules as values: partition, lowering, validation."""
