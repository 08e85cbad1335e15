"""Results that are assembled from several runs of the golden, or exchanged."""
