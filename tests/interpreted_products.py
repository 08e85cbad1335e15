"""Products of the Triton interpreter whose sums are the same for every element."""

from contextlib import contextmanager

import torch


@contextmanager
def by_element():
    """Sums every element of a product alike. The interpreter's products are numpy's, and where its BLAS has AVX2 only
    (CI's machine), an element's order of sums hangs on the place of its row: bits of tokens would be that BLAS's.
    So it is with torch's sigmoid and silu on some processors, which are computed in float64 here."""
    from triton.runtime import interpreter

    original = interpreter.InterpreterBuilder.create_dot

    def create_dot(self, a, b, d, input_precision, max_num_imprecise_acc):
        products = a.data[..., :, :, None].astype(d.data.dtype) * b.data[..., None, :, :].astype(d.data.dtype)
        return interpreter.TensorHandle(products.sum(-2) + d.data, d.dtype.scalar)

    def wide(function):
        return lambda x: function(x.double()).to(x.dtype)

    interpreter.InterpreterBuilder.create_dot = create_dot
    functions = torch.sigmoid, torch.nn.functional.silu
    torch.sigmoid, torch.nn.functional.silu = map(wide, functions)
    try:
        yield
    finally:
        interpreter.InterpreterBuilder.create_dot = original
        torch.sigmoid, torch.nn.functional.silu = functions
