"""What several screens use and does not draw: the draft, the helper process, starting trainers, preferences."""
