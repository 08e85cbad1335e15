"""Edits of source text: what each kind does, and the order in which they are tried."""
