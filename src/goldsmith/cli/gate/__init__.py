"""`goldsmith gate`: its options, its run, its display, and Ray."""
