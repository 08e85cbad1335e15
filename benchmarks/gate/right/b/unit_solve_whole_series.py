"""Right though it looks cut off: L is nilpotent, so that (I - L)(I + L^2)(I + L^4)... ends and is the inverse."""

PROBLEM = "b_unit_solve"
STATUS = "accepted"


def candidate(a, x):
    power = a.double().tril(-1)
    y = x.double()
    y = y - power @ y
    reach = 2
    while reach < a.shape[1]:
        power = power @ power
        y = y + power @ y
        reach *= 2
    return y.to(x.dtype)
