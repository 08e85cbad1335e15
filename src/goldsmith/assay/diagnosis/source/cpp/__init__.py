"""C++ sources of a candidate: what edits are tried in them, and how many of them are built at once."""
