"""Products of the Triton interpreter whose sums are the same for every element."""

from contextlib import contextmanager


@contextmanager
def by_element():
    """Sums every element of a product alike. The interpreter's products are numpy's, and where its BLAS has AVX2 only
    (CI's machine), an element's order of sums hangs on the place of its row: bits of tokens would be that BLAS's."""
    from triton.runtime import interpreter

    original = interpreter.InterpreterBuilder.create_dot

    def create_dot(self, a, b, d, input_precision, max_num_imprecise_acc):
        products = a.data[..., :, :, None].astype(d.data.dtype) * b.data[..., None, :, :].astype(d.data.dtype)
        return interpreter.TensorHandle(products.sum(-2) + d.data, d.dtype.scalar)

    interpreter.InterpreterBuilder.create_dot = create_dot
    try:
        yield
    finally:
        interpreter.InterpreterBuilder.create_dot = original
