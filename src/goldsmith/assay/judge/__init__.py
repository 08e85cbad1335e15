"""From measurements to findings: the verdict ladder for one tensor, and the examination of one case."""
