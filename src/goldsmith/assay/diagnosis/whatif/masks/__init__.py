"""Changes of masks, padding and invalid entries."""
