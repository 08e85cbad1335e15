"""`goldsmith bench`: proves, then times, in one run with the peers."""
