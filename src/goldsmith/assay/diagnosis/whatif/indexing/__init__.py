"""Changes of indices, offsets, views and the order of places."""
