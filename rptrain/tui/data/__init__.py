"""The data browser: rows as the model reads them."""
