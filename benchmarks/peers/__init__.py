"""What the ruler compares: a file for each peer, and shardc's own."""
