"""Functionalizes custom ops that write to their arguments: AOTAutograd then traces a call of the functional form, which
returns the new values.

torch's own form is a higher-order op on the memory that the arguments are views of. Here a view that is written is
written back by the view's own inverse, so that a graph has the functional op (`shardc.custom_ops.functional_ops`) and
plain ops (``slice_scatter``, ``view``).
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import combinations
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import Tensor
from torch._higher_order_ops import auto_functionalize
from torch._subclasses.functional_tensor import FunctionalTensorMode, PythonFunctionalizeAPI
from torch.fx import traceback

from shardc.capture.capture_errors import error_at, frames, user_frame
from shardc.custom_ops.functional_ops import functional, written_names


def functionalized(mode: FunctionalTensorMode, op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Replaces a call of ``op``, a custom op that writes to arguments, in a trace. Calls the functional form of ``op``,
    assigns the new values to the arguments, and returns what ``op`` returns.

    Raises:
        CaptureError: two written arguments share elements.
    """
    if not isinstance(op, torch._ops.OpOverload):
        return _of_torch(mode, op, args, kwargs)
    names = [argument.name for argument in op._schema.arguments]
    named = {**dict(zip(names, args, strict=False)), **kwargs}
    # Tensors that the op writes to, in the order in which its functional form returns their new values.
    written = [x for name in written_names(op) for x in pytree.tree_leaves(named.get(name)) if isinstance(x, Tensor)]
    for first, second in combinations(written, 2):
        if _overlap(first, second):
            raise error_at(
                user_frame(frames("".join(traceback.format_stack()))),
                f"{op} writes to two arguments that share memory",
                "pass a copy of one of them (x.clone())",
            )
    ctx: Any = PythonFunctionalizeAPI(mode=mode)
    with ctx.redispatch_to_next():
        outs = functional(op)(*ctx.unwrap_tensors(args), **ctx.unwrap_tensors(kwargs))
    results = list(outs) if isinstance(outs, (list, tuple)) else [outs]
    # The last results are the new values. Views of an argument's memory get them, too.
    for argument, value in zip(written, results[len(results) - len(written) :], strict=True):
        ctx.replace(argument, value)
        ctx.commit_update(argument)
        ctx.sync(argument)
    new = iter(results)
    returned = [
        # A result with alias info is one of the arguments.
        ctx.wrap_tensors(next(new)) if result.alias_info is None else _argument(op, result.alias_info, named)
        for result in op._schema.returns
    ]
    return None if not returned else returned[0] if len(returned) == 1 else tuple(returned)


def _argument(op: Any, alias: Any, named: Mapping[str, Any]) -> Any:
    """Return the argument that ``op`` returns as one of its results. ``alias`` is the alias info of that result in the
    op's schema; ``named`` has the arguments by name.
    """
    # An alias set of the schema, such as ``a`` in ``Tensor(a!)``, tells which argument a result is.
    sets = {argument.name: argument.alias_info for argument in op._schema.arguments if argument.alias_info is not None}
    return named[next(name for name, info in sets.items() if info.before_set & alias.before_set)]


def _overlap(x: Any, y: Any) -> bool:
    """Return whether two functional tensors share elements. True also if their strides do not tell."""
    if x.elem.untyped_storage()._cdata != y.elem.untyped_storage()._cdata or not x.numel() or not y.numel():
        return False
    # Position in the storage of the last element of each.
    ends = [sum((n - 1) * s for n, s in zip(a.shape, a.stride(), strict=True)) + a.storage_offset() for a in (x, y)]
    if x.storage_offset() > ends[1] or y.storage_offset() > ends[0]:
        return False
    if x.stride() != y.stride():
        return True
    # With equal strides, they share elements if their ranges overlap in every dim. Offsets are read as numbers whose
    # digits, by strides from the largest on, are the starts along the dims. What is left must be equal.
    offsets, starts = (x.storage_offset(), y.storage_offset()), []
    for dim in sorted(range(x.dim()), key=lambda dim: -x.stride(dim)):
        stride = max(x.stride(dim), 1)
        starts.append((dim, offsets[0] // stride, offsets[1] // stride))
        offsets = offsets[0] % stride, offsets[1] % stride
    return all(i < j + y.shape[dim] and j < i + x.shape[dim] for dim, i, j in starts) and offsets[0] == offsets[1]


_of_torch = auto_functionalize.do_auto_functionalize_v2
# (owner, attribute name, replacement)
OTHER_FORMS: tuple[tuple[object, str, object], ...] = (
    (auto_functionalize, "do_auto_functionalize_v2", functionalized),
    (auto_functionalize, "do_auto_functionalize", functionalized),
)
