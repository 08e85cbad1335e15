"""The source of a candidate: its files, its functions, and the kinds of values in them."""
