"""`goldsmith verify`: plan, worker processes, progress, matrix."""
