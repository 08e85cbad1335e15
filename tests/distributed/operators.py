"""Operators by name, as functions that ranks can import."""

from goldsmith.cli.verify.rank_targets import OperatorOnRanks


def function_of(op):
    """A function of the operator's inputs and options, which ranks load by its name."""
    return OperatorOnRanks(op.name)
