"""Changes of loops: chunks, the state between turns, updates in place."""
