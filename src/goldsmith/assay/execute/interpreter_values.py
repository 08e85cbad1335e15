"""Cached replacements for functions that Triton's interpreter calls for every value: same values, types and errors.

Each factory takes Triton's function and returns one that handles the common case and calls Triton's otherwise.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import partial
from types import ModuleType
from typing import Any

Function = Callable[..., Any]
Change = tuple[Any, str, Any]  # (owner, name, the new value)
USED = ("_patch_builtin", "_patch_attr", "TensorHandle", "TritonSemantic", "InterpreterBuilder")
WIDE = {"fp32", "fp64", "int1", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"}
WHOLE = ("minimum", "maximum", "clamp", "ashr")
_numpy_types: dict[ModuleType, dict[str, Any]] = {}
_builtins: dict[Any, tuple[str, ...]] = {}  # module or class of the language -> names of its builtins


def changes(module: ModuleType) -> tuple[list[Change], Callable[[], None]]:
    """(changes to `triton.runtime.interpreter`, function that clears the cached types of one launch)"""
    core, semantic = module.tl.core, module.TritonSemantic
    blocks: dict[object, Any] = {}
    pointers: dict[object, Any] = {}
    whole: list[bool] = []
    unwrap = _unwrap(core, core._unwrap_if_constexpr)
    replacements: list[Change] = [
        (module, "_patch_builtin", partial(_patch_builtin, module)),
        (module, "_patch_attr", partial(_patch_attr, module, core.builtin(_nothing).__code__)),
        (core, "_unwrap_if_constexpr", unwrap),
        (core.constexpr, "__init__", _constexpr_init(core, {})),
        (core.dtype, "__eq__", _dtype_eq(core.dtype, core.dtype.__eq__)),
        (core.block_type, "__init__", _block_init(core, blocks, pointers, core.block_type.__init__)),
        (core.block_type, "with_element_ty", _with_element_ty(core, blocks, core.block_type.with_element_ty)),
        (core.tensor, "__init__", _tensor_init(core)),
        (module.TensorHandle, "__init__", _handle_init(module)),
        (semantic, "to_tensor", _to_tensor(core.tensor, semantic.to_tensor)),
        (semantic, "cast", _cast(core, semantic.cast)),
        (semantic, "computation_type_impl", _computation_type(core.dtype, {}, semantic.computation_type_impl)),
        (semantic, "scalar_constant", _scalar_constant(module, semantic.scalar_constant)),
        (semantic, "binary_op_type_checking_impl", _operands(core, whole, semantic.binary_op_type_checking_impl)),
        *((semantic, name, _whole(whole, getattr(semantic, name))) for name in WHOLE),
        (semantic, "broadcast_impl_value", _broadcast(core, semantic.broadcast_impl_value)),
    ]
    return replacements, pointers.clear


def _nothing() -> None:
    pass


def _patch_builtin(module: ModuleType, package: object, builder: object, scope: object) -> None:
    """Patches the builtins of the language by cached names; Triton searches for them at every launch."""
    is_builtin = module.tl.core.is_builtin
    if package not in _builtins:
        _builtins[package] = tuple(name for name, member in inspect.getmembers(package) if is_builtin(member))
    for name in _builtins[package]:
        member = getattr(package, name)
        if is_builtin(member):
            module._patch_attr(package, name, member, builder, scope)


def _patch_attr(
    module: ModuleType, checking: object, obj: object, name: str, member: Any, builder: object, scope: Any
) -> None:
    """Replaces a builtin by a call with the semantics, without the wrapper that only checks that they are passed."""
    semantic = module.TritonSemantic(builder)
    inner = member.__wrapped__ if getattr(member, "__code__", None) is checking else member

    def call(*args: object, **kwargs: object) -> Any:
        kwargs["_semantic"] = semantic
        return inner(*args, **kwargs)

    scope.set_attr(obj, name, call)


def _unwrap(core: ModuleType, ask: Function) -> Function:
    constexpr = core.constexpr
    plain = {int, float, bool, str, type(None), core.dtype, core.block_type, core.pointer_type, core.tensor}

    def _unwrap_if_constexpr(o: Any) -> Any:
        kind = type(o)
        if kind is constexpr:
            return o.value
        return o if kind in plain else ask(o)

    return _unwrap_if_constexpr


def _constexpr_init(core: ModuleType, types: dict[int, Any]) -> Function:
    constexpr, constexpr_type = core.constexpr, core.constexpr_type

    def __init__(self: Any, value: Any) -> None:
        while isinstance(value, constexpr):
            value = value.value
        self.value = value
        if type(value) is not int:
            self.type = constexpr_type(value)
            return
        if value not in types:
            types[value] = constexpr_type(value)
        self.type = types[value]

    return __init__


def _dtype_eq(dtype: Any, ask: Function) -> Function:
    def __eq__(self: Any, other: Any) -> Any:
        if type(other) is dtype:
            return self.name == other.name
        return ask(self, other)

    return __eq__


def _block_init(core: ModuleType, blocks: dict[object, Any], pointers: dict[object, Any], init: Function) -> Function:
    """Copies a known type of equal elements and shape; known types keep their elements alive, so ids stay valid."""
    plain, lists, constexpr = core.dtype, (list, tuple, core.tuple), core.constexpr

    def __init__(self: Any, element_ty: Any, shape: Any) -> None:
        numbers = tuple([s.value if type(s) is constexpr else s for s in shape]) if type(shape) in lists else ("",)
        known, key = (blocks, element_ty.name) if type(element_ty) is plain else (pointers, id(element_ty))
        twin = known.get((key, numbers))
        if twin is not None:
            self.__dict__.update(twin.__dict__)
            return
        init(self, element_ty, shape)
        if type(self) is core.block_type and {type(n) for n in numbers} == {int}:
            self._of_a_tensor = core.tuple([constexpr(n) for n in numbers]), constexpr(self.numel)
            known[key, numbers] = self

    return __init__


def _with_element_ty(core: ModuleType, blocks: dict[object, Any], ask: Function) -> Function:
    def with_element_ty(self: Any, scalar_ty: Any) -> Any:
        cached = None
        if type(self) is core.block_type and type(scalar_ty) is core.dtype:
            cached = blocks.get((scalar_ty.name, tuple(self.shape.values)))
        return ask(self, scalar_ty) if cached is None else cached

    return with_element_ty


def _tensor_init(core: ModuleType) -> Function:
    constexpr, scalar = core.constexpr, (core.tuple([]), core.constexpr(1))

    def __init__(self: Any, handle: Any, type: Any) -> None:
        self.handle, self.type, self.dtype = handle, type, type.scalar
        if not type.is_block():
            self.shape, self.numel = scalar
        elif "_of_a_tensor" in type.__dict__:
            self.shape, self.numel = type._of_a_tensor
        else:  # a type created before the patch, or of an unusual shape
            self.shape = core.tuple([constexpr(s) for s in type.shape])
            self.numel = constexpr(type.numel)

    return __init__


def _handle_init(module: ModuleType) -> Function:
    init, pointer_type = module.TensorHandle.__init__, module.tl.pointer_type

    def __init__(self: Any, data: Any, dtype: Any, *attr: object, **named: object) -> None:
        if attr or named or not (type(dtype) is pointer_type or data.itemsize * 8 <= dtype.primitive_bitwidth):
            return init(self, data, dtype, *attr, **named)
        self.data, self.dtype, self.attr = data, dtype, {}

    return __init__


def _to_tensor(tensor: object, ask: Function) -> Function:
    def to_tensor(self: object, x: object, check_type: bool = True) -> Any:
        return x if type(x) is tensor else ask(self, x, check_type)

    return to_tensor


def _cast(core: ModuleType, ask: Function) -> Function:
    tensor, dtype = core.tensor, core.dtype

    def cast(self: Any, input: Any, dst_ty: Any, fp_downcast_rounding: object = None) -> Any:
        if type(input) is tensor and type(input.dtype) is dtype and type(dst_ty) is dtype:
            if input.dtype.name == dst_ty.name:
                return input
        return ask(self, input, dst_ty, fp_downcast_rounding)

    return cast


def _computation_type(dtype: Any, table: dict[object, Any], ask: Function) -> Function:
    def computation_type_impl(
        self: object, a: Any, a_is_scalar: bool, b: Any, b_is_scalar: bool, div_or_mod: bool
    ) -> Any:
        if not (type(a) is dtype and type(b) is dtype):
            return ask(self, a, a_is_scalar, b, b_is_scalar, div_or_mod)
        key = (a.name, a_is_scalar, b.name, b_is_scalar, div_or_mod)
        if key not in table:
            table[key] = ask(self, a, a_is_scalar, b, b_is_scalar, div_or_mod)
        return table[key]

    return computation_type_impl


def _scalar_constant(module: ModuleType, ask: Function) -> Function:
    array, handle, numpy = module.np.array, module.TensorHandle, _numpy(module)

    def scalar_constant(self: Any, value: Any, dtype: Any) -> Any:
        known = numpy.get(dtype.name) if type(dtype) is module.tl.core.dtype else None
        if known is None:
            return ask(self, value, dtype)
        return self.tensor(handle(array([0 if value == 0 else value], dtype=known), dtype), dtype)

    return scalar_constant


def _numpy(module: ModuleType) -> dict[str, Any]:
    """numpy type of each dtype in WIDE; computed once, because each computation takes 1 ms and there is one a run."""
    if module not in _numpy_types:
        _numpy_types[module] = _numpy_of(module)
    return _numpy_types[module]


def _numpy_of(module: ModuleType) -> dict[str, Any]:
    return {name: module._get_np_dtype(module.tl.core.dtype(name)) for name in WIDE}


def _number(core: ModuleType, value: object) -> Any:
    """The dtype of a bare number; None if Triton has to decide."""
    if type(value) is int:
        return core.int32 if -(2**31) <= value < 2**31 else None
    if type(value) is float:
        return core.float32 if value == 0.0 or 2**-126 <= abs(value) <= (2 - 2**-23) * 2**127 else None
    return None


def _operands(core: ModuleType, whole: list[bool], ask: Function) -> Function:
    """Operands without casts or broadcasts: two tensors of one dtype, a tensor and a number, a pointer and offsets.

    `whole` is non-empty during an operation whose operands need equal shapes.
    """
    tensor, dtype, block_type, pointer_type = core.tensor, core.dtype, core.block_type, core.pointer_type

    def among(self: Any, value: Any, other: Any, div_or_mod: bool, first: bool) -> Any:
        """A number as a tensor of the other operand's dtype, if the operation computes in that dtype; else None."""
        own, kind = _number(core, value), other.dtype
        if own is None or type(kind) is not dtype or kind.name not in WIDE:
            return None
        order = (own, True, kind, False) if first else (kind, False, own, True)
        wanted = self.computation_type_impl(*order, div_or_mod)
        if wanted.name != kind.name:
            return None
        if kind.is_int() and not kind.get_int_min_value() <= value <= kind.get_int_max_value():
            return None
        return self.scalar_constant(value, kind)

    def together(self: Any, left: Any, right: Any) -> Any:
        """Both operands with the type of the result; numpy broadcasts their unchanged values the same way."""
        a, b = left.type, right.type
        if type(a) is block_type and type(b) is block_type:
            rows, columns = a.shape.values, b.shape.values
            if rows == columns:
                return left, right
            if len(rows) == len(columns) and all([m == n or m == 1 or n == 1 for m, n in zip(rows, columns)]):
                shape = [n if m == 1 else m for m, n in zip(rows, columns)]
                return (
                    left if shape == rows else tensor(left.handle, block_type(a.scalar, shape)),
                    right if shape == columns else tensor(right.handle, block_type(b.scalar, shape)),
                )
        elif type(a) is block_type and b is right.dtype:
            return left, tensor(right.handle, a.with_element_ty(b))
        elif type(b) is block_type and a is left.dtype:
            return tensor(left.handle, b.with_element_ty(a)), right
        return self.broadcast_impl_value(left, right)

    def binary_op_type_checking_impl(
        self: Any,
        lhs: Any,
        rhs: Any,
        allow_lhs_ptr: bool = False,
        allow_rhs_ptr: bool = False,
        arithmetic_check: bool = True,
        div_or_mod: bool = False,
    ) -> Any:
        left, right = lhs, rhs
        if arithmetic_check and type(lhs) is tensor and type(rhs) is not tensor:
            right = among(self, rhs, lhs, div_or_mod, False)
        elif arithmetic_check and type(rhs) is tensor and type(lhs) is not tensor:
            left = among(self, lhs, rhs, div_or_mod, True)
        if type(left) is tensor and type(right) is tensor:
            a, b = left.dtype, right.dtype
            if type(b) is dtype and (
                (type(a) is dtype and a.name == b.name and a.name in WIDE)
                or (type(a) is pointer_type and allow_lhs_ptr and b.is_int())
            ):
                return self.broadcast_impl_value(left, right) if whole else together(self, left, right)
        return ask(self, lhs, rhs, allow_lhs_ptr, allow_rhs_ptr, arithmetic_check, div_or_mod)

    return binary_op_type_checking_impl


def _whole(whole: list[bool], ask: Function) -> Function:
    """Marks operations on whole blocks: max of +0 and -0 depends on numpy's loop, and a shift writes to its operand."""

    def operation(self: object, *args: object, **named: object) -> Any:
        whole.append(True)
        try:
            return ask(self, *args, **named)
        finally:
            whole.pop()

    return operation


def _broadcast(core: ModuleType, ask: Function) -> Function:
    block_type = core.block_type

    def broadcast_impl_value(self: object, lhs: Any, rhs: Any) -> Any:
        a, b = lhs.type, rhs.type
        if type(a) is block_type and type(b) is block_type and a.shape.values == b.shape.values:
            return lhs, rhs
        return ask(self, lhs, rhs)

    return broadcast_impl_value
