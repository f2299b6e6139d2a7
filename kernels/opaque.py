"""Operations that torch.compile does not look into: each is one node of the graph that it makes.

The public functions of operations ask `is_traced` and call these. What compiles such a graph may
run the node, which is the operation as it always runs, or take its plain PyTorch form in its place,
to fuse it with what comes before and after it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

# Alive as long as its operators.
_library: Any = torch.library.Library("specengine", "FRAGMENT")  # type: ignore[no-untyped-call]

# Operator -> the same in plain PyTorch, of the same arguments.
PLAIN_FORMS: dict[Any, Callable[..., Any]] = {}


# Whether torch.compile looks at the caller, whose tensors have no values then.
is_traced: Callable[[], bool] = torch.compiler.is_dynamo_compiling


def opaque(
    schema: str,
    run: Callable[..., Any],
    fake: Callable[..., Any],
    plain: Callable[..., Any] | None = None,
) -> Any:
    """The operator of a schema, such as "double(Tensor x) -> Tensor".

    run: computes it, on any device. fake: gives tensors of the output's shape, dtype and strides,
    which must not share memory with an input. plain: of PLAIN_FORMS; None where there is none.
    """
    name = schema.partition("(")[0]
    _library.define(schema)
    _library.impl(name, run, "CompositeExplicitAutograd")
    torch.library.register_fake(f"specengine::{name}", fake, lib=_library)
    operator = getattr(torch.ops.specengine, name).default
    if plain is not None:
        PLAIN_FORMS[operator] = plain
    return operator
