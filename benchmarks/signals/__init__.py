"""Signals and kills at random times of a training process: whether each ends as promised, and nothing is lost."""
