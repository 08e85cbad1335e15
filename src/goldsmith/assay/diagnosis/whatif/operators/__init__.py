"""Changes of one operator: terms, factors, functions, constants, convolutions."""
