"""`goldsmith verify`: choose cases, check them in worker processes, show the matrix of verdicts."""
