"""Results as plain data, and their rendering as text and HTML."""
