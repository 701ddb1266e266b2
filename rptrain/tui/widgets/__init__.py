"""The widgets that several screens use."""
