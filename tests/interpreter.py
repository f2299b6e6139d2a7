"""Triton's interpreter in a fraction of the time: what it works out anew at each launch, for each
function that a kernel calls or for each value, is worked out once. What kernels compute stays."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import cache
from typing import Any


def quicken() -> None:
    """From now on, in this process; a Triton that has another way takes the time it does."""
    of_launches, of_types = (_keep_patched, _leave_out_checks), (_keep_dtypes, _keep_blocks)
    for change in (*of_launches, *of_types, _keep_shapes, _keep_sides):
        try:
            change()
        except (ImportError, AttributeError):
            continue


def _keep_patched() -> None:
    """At each launch and call it looks through its whole language to put its own operations there.
    Here they stay there."""
    from triton.runtime import interpreter

    patch, nothing = interpreter._patch_lang, interpreter._LangPatchScope

    @cache
    def once(function: Any) -> None:
        """All of the language that it sees."""
        patch(function)

    def patched(function: Any) -> Any:
        once(function)
        return nothing()

    interpreter._patch_lang = patched


def _leave_out_checks() -> None:
    """Each sum of integers is made in 64 bits as well, for a check that is made in debugging
    alone."""
    from triton.runtime import interpreter

    builder = interpreter.interpreter_builder
    if not builder.options.debug:
        builder.options = replace(builder.options, sanitize_overflow=False)


def _keep_dtypes() -> None:
    from triton.runtime import interpreter

    find, found = interpreter._get_np_dtype, dict[str, Any]()

    def numpy_dtype(dtype: Any) -> Any:
        name = dtype.name
        if name not in found:
            found[name] = find(dtype)
        return found[name]

    interpreter._get_np_dtype = numpy_dtype


def _keep_shapes() -> None:
    """A tensor's shape and size as the language's constants, one object for all of that shape."""
    from triton.language import core

    @cache
    def constants(shape: tuple[int, ...]) -> tuple[Any, Any]:
        return core.constexpr(math.prod(shape)), core.tuple([core.constexpr(n) for n in shape])

    def init(self: Any, handle: Any, type: Any) -> None:
        self.handle, self.type, self.dtype = handle, type, type.scalar
        shape = tuple(type.shape.values) if type.is_block() else ()
        self.numel, self.shape = constants(shape)

    core.tensor.__init__ = init


def _keep_blocks() -> None:
    """The types of blocks, which are immutable: one object for all of a shape and an element."""
    from triton.language import core

    make = core.block_type.__init__
    found = dict[Any, dict[str, Any]]()

    def init(self: Any, element_ty: Any, shape: Any) -> None:
        sizes = tuple(shape)
        if {*map(type, sizes)} != {int}:
            return make(self, element_ty, shape)
        key = element_ty.name, getattr(element_ty, "address_space", None), sizes
        if key not in found:
            make(self, element_ty, shape)
            found[key] = vars(self).copy()
        vars(self).update(found[key])

    core.block_type.__init__ = init


def _keep_sides() -> None:
    """What has the type or the shape already that an operation wants is given back at once."""
    from triton.language.semantic import TritonSemantic

    cast, broadcast = TritonSemantic.cast, TritonSemantic.broadcast_impl_value

    def quick_cast(self: Any, value: Any, to: Any, *rounding: Any) -> Any:
        return value if value.type.scalar is to.scalar else cast(self, value, to, *rounding)

    def quick_broadcast(self: Any, one: Any, other: Any) -> Any:
        shapes = [side.type.shape.values if side.type.is_block() else [] for side in (one, other)]
        return (one, other) if shapes[0] == shapes[1] else broadcast(self, one, other)

    TritonSemantic.cast, TritonSemantic.broadcast_impl_value = quick_cast, quick_broadcast
