"""Edits of the backward's own operators: factors of addends, and indices."""
