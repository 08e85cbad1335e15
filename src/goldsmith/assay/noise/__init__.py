"""How much honest implementations differ: ensembles of legal summation orders."""
