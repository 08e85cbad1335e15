"""Edits of forms that several operators make together: loops, pieces of a tensor, chosen entries, rows."""
