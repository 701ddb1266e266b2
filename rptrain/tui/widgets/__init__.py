"""What screens are put together from, and how numbers are written in them."""
