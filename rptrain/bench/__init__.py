"""How fast this machine is: its floor, and what training reaches of it."""
