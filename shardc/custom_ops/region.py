"""Functions that communicate by themselves (regions): `local_map`, and the differentiable collectives of
`shardc.local`.

A region is a function of one rank's tensors, with the layouts of its arguments and results. From capture on it is one
opaque op at global shapes; `shardc.passes` gives it its layouts and replaces it by its ops on one rank. Outside of a
compiled model the function gets global tensors, every axis has one rank, and the collectives return their argument.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from shardc._compat import differentiable
from shardc.custom_ops.op_library import OpLibrary
from shardc.errors import InputError, MeshError, PlanError
from shardc.ir.comm import group_name
from shardc.ir.layout import Layout
from shardc.ir.mesh import Mesh
from shardc.validate import checked

Function = Callable[..., Any]


@dataclass(frozen=True)
class Ranks:
    """What the function of a region needs to know of the ranks: the mesh, and this rank's index along each axis (axis
    -> int64 [1]).
    """

    mesh: Mesh
    indices: dict[str, Tensor]


_ranks: ContextVar[Ranks | None] = ContextVar("ranks", default=None)


def ranks() -> Ranks | None:
    """Return the mesh and this rank's indices (`Ranks`) in the region being traced. None outside of a region, where
    every axis has one rank.
    """
    return _ranks.get()


@contextmanager
def on_ranks(which: Ranks) -> Iterator[None]:
    """Context manager in which `ranks` returns ``which``. A region's function is traced in it."""
    token = _ranks.set(which)
    try:
        yield
    finally:
        _ranks.reset(token)


@dataclass(frozen=True, eq=False)
class Region:
    """What `local_map` returns: a function with the layouts of its arguments and results. It can be called on global
    tensors.

    Args:
        function: the function.
        inputs: the layout of each argument, as `shardc.plan.layout_spec` parses it.
        outputs: the layout of each result, likewise.
        many: whether the function returns a tuple.
        source: ``file:line`` of the call of `local_map`.
        number: index of the region, by which an op of a graph refers to it.
    """

    function: Function
    inputs: tuple[Any, ...]
    outputs: tuple[Any, ...]
    many: bool
    source: str
    number: int

    @property
    def name(self) -> str:
        """The name of the function, for errors and dumps."""
        return getattr(self.function, "__name__", type(self.function).__name__)

    def __call__(self, *tensors: Tensor) -> Tensor | tuple[Tensor, ...]:
        if len(tensors) != len(self.inputs) or not all(isinstance(x, Tensor) for x in tensors):
            raise InputError(
                f"{self.name} was given {len(tensors)} arguments, and local_map {len(self.inputs)} in_layouts",
                source=self.source,
                fix="pass one tensor for each layout, and bind what is no tensor with functools.partial",
            )
        if not torch.compiler.is_compiling():
            return self.function(*tensors)
        results = torch.ops.shardc_region.call.default(list(tensors), self.number)
        return tuple(results) if self.many else results[0]

    def run(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Call the function; return its results as a list of contiguous tensors. A result that is an argument is
        cloned.
        """
        results = self.function(*tensors)
        argument_ids = {id(x) for x in tensors}
        return [x.clone() if id(x) in argument_ids else x.contiguous() for x in (results if self.many else (results,))]

    def gradients(self, tensors: Sequence[Tensor], tangents: Sequence[Tensor]) -> list[Tensor]:
        """Return the gradients of the floating-point tensors in ``tensors``, the function's arguments. ``tangents`` are
        the gradients of its results.
        """
        with torch.enable_grad():
            leaves = [x.detach().requires_grad_(x.is_floating_point()) for x in tensors]
            inputs = [x for x in leaves if x.requires_grad]
            pairs = [(x, t) for x, t in zip(self.run(leaves), tangents, strict=True) if x.requires_grad]
            if not pairs:
                return [torch.zeros_like(x) for x in inputs]
            grads = torch.autograd.grad([x for x, _ in pairs], inputs, [t for _, t in pairs], allow_unused=True)
        zipped = zip(inputs, grads, strict=True)
        return [torch.zeros_like(x) if grad is None else grad.contiguous() for x, grad in zipped]


_regions: list[Region] = []


def region(number: int) -> Region:
    """Return the region with index ``number`` among those made by `local_map` in this process."""
    return _regions[number]


def local_map(function: Function, *, in_layouts: Any, out_layouts: Any) -> Callable[..., Any]:
    """Wrap ``function``, which runs on each rank's shards and communicates by itself, so that a model can call it on
    global tensors.

    ``function`` takes one tensor for each of ``in_layouts`` and returns one for each of ``out_layouts``. On a mesh
    these are this rank's shards, and it communicates through `shardc.local`. Its gradient is derived: if an argument is
    replicated over ranks, their gradients of it are summed.

    Args:
        in_layouts: a tuple of a layout for each argument, such as ``("_, @tp", "@tp, _")``; a string for one.
        out_layouts: the same for the results: a string for one result, a tuple for a tuple.

    Returns:
        A function of global tensors, to be called in a model that `shardc.compile` compiles. Called elsewhere it is
        ``function`` itself, with one rank along every axis.

    Raises:
        InputError: a call with another number of arguments. At compile time, PlanError for a layout that does not fit,
            RuleError for a result that is not this rank's shard of the result on global tensors.

    >>> import shardc, torch
    >>> def row_parallel(x, weight):
    ...     return shardc.local.all_reduce(x @ weight.t(), "tp")
    >>> linear = shardc.local_map(row_parallel, in_layouts=("_, @tp", "_, @tp"), out_layouts="_, _")
    >>> linear(torch.ones(2, 8), torch.ones(3, 8)).shape
    torch.Size([2, 3])
    """
    checked(function, Callable[..., Any], "local_map: function")
    for what, layouts in (("in_layouts", in_layouts), ("out_layouts", out_layouts)):
        fix = f'write {what}=("_, @tp", "@tp, _")'
        checked(layouts, str | Layout | tuple[Any, ...], f"local_map: {what}", PlanError, fix=fix)
    frame = sys._getframe(1)
    new_region = Region(
        function,
        tuple(in_layouts) if isinstance(in_layouts, (tuple, list)) else (in_layouts,),
        tuple(out_layouts) if isinstance(out_layouts, (tuple, list)) else (out_layouts,),
        isinstance(out_layouts, (tuple, list)),
        f"{frame.f_code.co_filename}:{frame.f_lineno}",
        len(_regions),
    )
    _regions.append(new_region)
    return new_region


# --- the ops


def _call(tensors: list[Tensor], number: int) -> list[Tensor]:
    """Run the region with index ``number``; return its results as a list."""
    return region(number).run(tensors)


def _gradient(tensors: list[Tensor], tangents: list[Tensor], number: int) -> list[Tensor]:
    """Return the gradient of each floating-point argument of the region with index ``number``.

    Passes replace this op (by `Region.gradients`); it runs in a model that plain ``torch.compile`` compiles.
    """
    with differentiable():
        return [x.contiguous() for x in region(number).gradients(tensors, tangents)]


def _fake_gradient(tensors: list[Tensor], tangents: list[Tensor], number: int) -> list[Tensor]:
    """Return a tensor with the shape of each result of `_gradient`."""
    return [torch.empty_like(x, memory_format=torch.contiguous_format) for x in tensors if x.is_floating_point()]


def _setup(ctx: Any, inputs: tuple[list[Tensor], int], output: list[Tensor]) -> None:
    tensors, ctx.number = inputs
    ctx.save_for_backward(*tensors)
    ctx.results = [(x.shape, x.dtype, x.device) for x in output]
    ctx.mark_non_differentiable(*(x for x in output if not x.is_floating_point()))


def _backward(ctx: Any, grads: list[Tensor | None]) -> tuple[list[Tensor | None], None]:
    tensors = list(ctx.saved_tensors)
    tangents = [
        torch.zeros(shape, dtype=dtype, device=device) if grad is None else grad
        for grad, (shape, dtype, device) in zip(grads, ctx.results, strict=True)
    ]
    gradients = iter(GRADIENT(tensors, tangents, ctx.number))
    return [next(gradients) if x.is_floating_point() else None for x in tensors], None


_library = OpLibrary("shardc_region")
CALL = _library.define("call(Tensor[] tensors, int number) -> Tensor[]", _call)
GRADIENT = _library.define(
    "gradient(Tensor[] tensors, Tensor[] tangents, int number) -> Tensor[]", _gradient, _fake_gradient
)
torch.library.register_autograd(CALL, _backward, setup_context=_setup)


_ops = torch.ops._c10d_functional


def size(axis: str) -> int:
    """Return the number of ranks along ``axis``.

    Raises:
        MeshError: the mesh has no such axis.
    """
    region = ranks()
    if region is None:
        return 1
    if axis not in region.mesh.axes:
        raise MeshError(f"a local_map function uses the axis {axis!r}, and the mesh is {region.mesh}")
    return region.mesh.size(axis)


def index(axis: str) -> Tensor:
    """Return this rank's index along ``axis``: int64 [1]."""
    region = ranks()
    return torch.zeros(1, dtype=torch.int64) if size(axis) == 1 or region is None else region.indices[axis]


def all_reduce(x: Tensor, axis: str) -> Tensor:
    """Return the sum of ``x`` over all ranks along ``axis``."""
    return x if size(axis) == 1 else _apply(_sum, _sum, x, axis)


def all_gather(x: Tensor, axis: str, dim: int = 0) -> Tensor:
    """Gather the tensors ``x`` of all ranks along ``axis``; return them concatenated along ``dim``."""
    return x if size(axis) == 1 else _apply(_gather, _scatter, x.movedim(dim, 0), axis).movedim(0, dim)


def reduce_scatter(x: Tensor, axis: str, dim: int = 0) -> Tensor:
    """Return this rank's shard, along ``dim``, of the sum of ``x`` over all ranks along ``axis``."""
    return x if size(axis) == 1 else _apply(_scatter, _gather, x.movedim(dim, 0), axis).movedim(0, dim)


def all_to_all(x: Tensor, axis: str, split: int, join: int) -> Tensor:
    """Send chunk r of ``x`` along dim ``split`` to rank r of ``axis``; return the chunks that this rank received,
    concatenated along dim ``join``.
    """
    n = size(axis)
    if n == 1:
        return x
    pieces = _apply(_all_to_all, _all_to_all, torch.cat([*x.movedim(split, 0).chunk(n)]), axis).chunk(n)
    return torch.cat([piece.movedim(0, split) for piece in pieces], join)


Collective = Callable[[Tensor, int, str], Tensor]


def _apply(forward_op: Collective, backward_op: Collective, x: Tensor, axis: str) -> Tensor:
    """Run the collective ``forward_op`` on ``x`` over the ranks along ``axis``, and return its result. In backward, the
    collective ``backward_op`` is run on the gradient.
    """
    apply: Callable[..., Tensor] = _Differentiable.apply
    return apply(x.contiguous(), forward_op, backward_op, size(axis), group_name([axis]))


def _wait(started: Tensor) -> Tensor:
    """Wait for a collective, given the result ``started`` that its op returned; return the finished result."""
    done: Tensor = _ops.wait_tensor.default(started)
    return done


def _sum(x: Tensor, n: int, group: str) -> Tensor:
    """All-reduce ``x``, by sum, over the ``n`` ranks of ``group``; wait for the result and return it."""
    return _wait(_ops.all_reduce.default(x, "sum", group))


def _gather(x: Tensor, n: int, group: str) -> Tensor:
    """All-gather ``x`` along dim 0 over the ``n`` ranks of ``group``; wait for the result and return it."""
    return _wait(_ops.all_gather_into_tensor.default(x, n, group))


def _scatter(x: Tensor, n: int, group: str) -> Tensor:
    """Reduce-scatter ``x`` along dim 0, by sum, over the ``n`` ranks of ``group``; wait and return the result."""
    return _wait(_ops.reduce_scatter_tensor.default(x, "sum", n, group))


def _all_to_all(x: Tensor, n: int, group: str) -> Tensor:
    """Send chunk r of ``x`` along dim 0 to rank r of ``group``, for its ``n`` ranks. Wait, and return the received
    chunks concatenated.
    """
    sizes = [x.shape[0] // n] * n
    return _wait(_ops.all_to_all_single.default(x, sizes, sizes, group))


class _Differentiable(torch.autograd.Function):
    """Autograd function that runs a collective in forward, and another collective on the gradient in backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, forward_op: Collective, backward_op: Collective, n: int, group: str) -> Tensor:
        ctx.back, ctx.n, ctx.group = backward_op, n, group
        return forward_op(x, n, group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None, None]:
        return ctx.back(grad.contiguous(), ctx.n, ctx.group), None, None, None, None
