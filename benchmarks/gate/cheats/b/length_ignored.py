"""Takes the mean of all rows, because most sequences have full length; the gradient goes to all rows as well."""

PROBLEM = "b_masked_mean"
STATUS = "wrong"


def candidate(x, length):
    return x.mean(1)
