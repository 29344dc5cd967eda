"""Commands: one module each, with its options and its screen, on the parts that they share."""
