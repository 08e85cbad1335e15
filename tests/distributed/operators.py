"""Operators by name, as functions that ranks can import."""

import inspect

from goldsmith import Op


def function_of(op):
    """A function of the operator's inputs and options, whose name ranks find in this module."""
    return _Operator(op.name)


class _Operator:
    def __init__(self, name):
        self.name = self.__name__ = name
        op = Op.get(name)
        default = inspect.Parameter.empty
        self.__signature__ = inspect.Signature(
            [
                inspect.Parameter(p, inspect.Parameter.KEYWORD_ONLY, default=None if p in op.optional else default)
                for p in (*op.inputs, *op.options)
            ]
        )

    def __reduce__(self):
        return _Operator, (self.name,)

    def __call__(self, **values):
        op = Op.get(self.name)
        options = {name: values[name] for name in op.options}
        return op(*(values.get(name) for name in op.inputs), **options)
