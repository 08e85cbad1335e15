"""Right: the inner axis is cut into pieces of 16, whose products are added in pairs."""

PROBLEM = "a_matmul"
STATUS = "accepted"


def candidate(a, b):
    parts = [left @ right for left, right in zip(a.split(16, 1), b.split(16, 0))]
    while len(parts) > 1:
        parts = [sum(parts[i : i + 2]) for i in range(0, len(parts), 2)]
    return parts[0]
