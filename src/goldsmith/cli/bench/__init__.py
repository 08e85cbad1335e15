"""`goldsmith bench`: verify operators, then time them."""
