"""What the interface does without drawing: drafts, the helper process, starting trainers, preferences."""
