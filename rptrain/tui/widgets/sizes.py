"""Screen sizes above which a screen shows more."""

NARROW = 72  # columns
MEDIUM = 110
WIDE = 160
TALL = 32  # lines
