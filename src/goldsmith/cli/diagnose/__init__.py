"""`goldsmith diagnose` and `goldsmith replay`."""
