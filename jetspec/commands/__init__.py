"""What the commands show: one module per command, on top of what they share in `screen`."""
