"""The parts of the interface that do not draw: drafts, the helper process, starting trainers, preferences."""
