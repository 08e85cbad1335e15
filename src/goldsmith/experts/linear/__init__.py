"""experts.linear: a dense product with a packed weight."""
