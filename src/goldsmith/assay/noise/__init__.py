"""What honest implementations differ by: ensembles of legal summation orders."""
