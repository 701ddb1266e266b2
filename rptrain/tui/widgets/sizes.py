"""Screen sizes above which a screen shows more."""

MEDIUM = 110  # columns
WIDE = 160
TALL = 32  # lines
