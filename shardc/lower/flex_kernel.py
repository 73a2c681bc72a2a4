"""Decompositions of shardc's `flex_attention` op to torch's own, for which Inductor has kernels on CUDA.

torch's ops take score and mask functions of numbers. Those of `shardc.custom_ops.flex_ops` run on numbers unchanged,
but for views that align them with a block of scores. Global positions become tensors that the functions capture.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from math import log
from typing import Any

import torch
from torch import Tensor, fx
from torch._dynamo._trace_wrapped_higher_order_op import ModIndex
from torch._higher_order_ops.flex_attention import create_fw_bw_graph, flex_attention, flex_attention_backward
from torch._inductor.inductor_prims import force_stride_order
from torch.nn.attention.flex_attention import BlockMask

from shardc._compat import differentiable
from shardc.custom_ops.flex_ops import BLOCK, FLEX, FLEX_GRADIENT
from shardc.custom_ops.function_ops import function_of

aten = torch.ops.aten
SMALLEST = 16  # features; torch's kernel takes no fewer
_Options = Mapping[str, bool | int | str]  # of torch's kernel
_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def takes(query: Tensor, key: Tensor, value: Tensor) -> bool:
    """Return whether torch's ``flex_attention`` kernel supports these operands: on CUDA, not empty, all of one dtype
    that it computes in, and with enough features.
    """
    operands = (query, key, value)
    return (
        query.device.type == "cuda"
        and query.dtype in _DTYPES
        and all(x.dtype == query.dtype and x.shape[3] >= SMALLEST and x.numel() for x in operands)
    )


class _OfNumbers(fx.Interpreter):
    """Interprets the graph of a score or mask function on single numbers (zero-dim tensors), as torch's ops call such
    functions; the graph is written for blocks of scores.

    Args:
        graph: see `shardc.custom_ops.flex_ops`.
        differentiable: whether lookups are to have the gradient that the kernel's backward can compute.
    """

    def __init__(self, graph: fx.Graph, differentiable: bool) -> None:
        super().__init__(fx.GraphModule({}, graph))
        self.differentiable = differentiable

    def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
        if target is aten.view.default and args[1] == [1, 1, 1, 1]:
            return args[0]
        if target is aten.index.Tensor and self.differentiable:
            return ModIndex.apply(*args)
        return super().call_function(target, args, kwargs)


@dataclass(frozen=True)
class _Call:
    """A call of `flex` or `flex_gradient`, translated for torch's ``flex_attention``: it makes the score and mask
    functions of one element (zero-dim tensors), the tensors that they capture, and the block mask.

    Args:
        body, scale, keys: as of `shardc.custom_ops.flex_ops.flex`.
        size: [b, h, q, k].
        captured: tensors that the score function reads, then those that the mask function reads.
        positions: rows, columns, batches and heads, as of the op.
        tables: result of ``flex_tables``.
    """

    body: str
    scale: float
    keys: int
    size: Sequence[int]
    captured: Sequence[Tensor]
    positions: Sequence[Tensor | None]
    tables: Sequence[Tensor]

    @property
    def position_tensors(self) -> tuple[Tensor, ...]:
        """Return those of ``positions`` (global rows, columns, batches, heads) that are not None, as int32."""
        return tuple(x.to(torch.int32) for x in self.positions if x is not None)

    @property
    def of_score(self) -> tuple[Tensor, ...]:
        """Return the tensors that `score`, the function for torch's op, captures: those of the user's score function,
        then `position_tensors`.
        """
        return *self.captured[: function_of(self.body).counts[0]], *self.position_tensors

    @property
    def of_mask(self) -> tuple[Tensor, ...]:
        """Return the tensors that `mask`, the function for torch's op, captures: those of the user's mask function,
        then `position_tensors`.
        """
        return *self.captured[function_of(self.body).counts[0] :], *self.position_tensors

    def _numbers(self, here: Sequence[Tensor], position_tensors: Sequence[Tensor]) -> list[Tensor]:
        """Return [batch, head, row, column, batch, head] as numbers: the first four are global positions, the last two
        ``here`` again. ``here`` is (batch, head, row, column) within the rank's operands.
        """
        tables = iter(position_tensors)
        b, h, m, n = here
        rows, columns, batches, heads = (
            x if position is None else aten.index.Tensor(next(tables), [x])
            for x, position in zip((m, n, b, h), self.positions, strict=True)
        )
        if self._has_padding:
            columns = columns.clamp(max=self.keys - 1)
        return [batches, heads, rows, columns, b, h]

    @property
    def _has_padding(self) -> bool:
        """Whether columns of the operands may be padding, whose global positions are ``keys`` or higher."""
        return self.positions[1] is not None or self.size[3] > self.keys

    def score(self, differentiable: bool = False) -> Callable[..., Tensor]:
        """Return the score function for torch's op. It takes (score, batch, head, row, column, *`of_score`), with
        positions counted within the rank's operands.
        """
        function = function_of(self.body)
        run, count = _OfNumbers(function.graphs[0], differentiable).run, function.counts[0]

        def score(x: Tensor, b: Tensor, h: Tensor, m: Tensor, n: Tensor, *captured: Tensor) -> Tensor:
            numbers = self._numbers((b, h, m, n), captured[count:])
            result: Tensor = run(x, *numbers, *captured[:count])[0]
            return result

        return score

    def mask(self) -> Callable[..., Tensor]:
        """Return the mask function for torch's op. It takes (batch, head, row, column, *`of_mask`), with positions
        counted within the rank's operands.
        """
        function = function_of(self.body)
        run, count = _OfNumbers(function.graphs[1], False).run, function.counts[1]

        def mask(b: Tensor, h: Tensor, m: Tensor, n: Tensor, *captured: Tensor) -> Tensor:
            visible: Tensor = run(*self._numbers((b, h, m, n), captured[count:]), *captured[:count])[0]
            if not self._has_padding:
                return visible
            columns = n if self.positions[1] is None else aten.index.Tensor(captured[count:][self._column], [n])
            return visible & (columns < self.keys)

        return mask

    @property
    def _column(self) -> int:
        """The index of the tensor of global columns in `position_tensors`, if there is one."""
        return 0 if self.positions[0] is None else 1

    def blocks(self) -> tuple[Any, ...]:
        """Return the block mask as the tuple (``BlockMask.as_tuple()``) that torch's op takes."""
        block_mask: Any = BlockMask
        fields: tuple[Any, ...] = block_mask(self.size[2:], *self.tables, (BLOCK, BLOCK), self.mask()).as_tuple()
        return fields

    def rest(self, options: _Options) -> tuple[dict[str, Any], tuple[Tensor, ...], tuple[Tensor, ...]]:
        """Return the last arguments of torch's ops: the kernel's options, those of the user before ``options``, and the
        tensors that the score and the mask function capture.
        """
        return {**options, **dict(function_of(self.body).options)}, self.of_score, self.of_mask


def _translated(
    query: Tensor, key: Tensor, value: Tensor, captured: Sequence[Tensor], body: str, scale: float, keys: int,
    axis: str = "", method: str = "", around: bool = False,
    rows: Tensor | None = None, columns: Tensor | None = None, batches: Tensor | None = None,
    heads: Tensor | None = None, visible: Sequence[Tensor] | None = None,
) -> _Call | None:  # fmt: skip
    """Return a call of `flex`, with its arguments, as a `_Call`. Return None if torch's kernel does not support the
    operands, or the call has no block tables (``visible``).
    """
    if visible is None or not takes(query, key, value):
        return None
    size, positions = (*query.shape[:3], key.shape[2]), (rows, columns, batches, heads)
    return _Call(body, scale, keys, size, captured, positions, visible)


def _forward(options: _Options, query: Tensor, key: Tensor, value: Tensor, *rest: Any, **named: Any) -> Any:
    """Decompose `flex` to torch's ``flex_attention``: return (output, log-sum-exp of each query's scores). Return
    NotImplemented if `_translated` gives None; ``rest`` and ``named`` are its other arguments.
    """
    call = _translated(query, key, value, *rest, **named)
    if call is None:
        return NotImplemented
    results = flex_attention(query, key, value, call.score(), call.blocks(), call.scale, *call.rest(options))
    return _by_row(results[0]), _by_row(results[1]) * log(2)


def _gradient(
    options: _Options, grad: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, logsumexp: Tensor,
    grad_logsumexp: Tensor | None, wanted: Sequence[int], *rest: Any, **named: Any,
) -> Any:  # fmt: skip
    """Decompose `flex_gradient` to torch's ``flex_attention_backward``: return a list of the gradients of query, key,
    value and of the captured tensors ``wanted``. Return NotImplemented in the cases of `_forward`.
    """
    call = _translated(query, key, value, *rest, **named)
    if call is None:
        return NotImplemented
    score, joint = _joint(call, query, wanted)
    if grad_logsumexp is None:
        grad_logsumexp = torch.zeros_like(logsumexp)
    grads = flex_attention_backward(
        query, key, value, out, _contiguous(logsumexp / log(2)), grad, grad_logsumexp * log(2), score, joint,
        call.blocks(), call.scale, *call.rest(options),
    )  # fmt: skip
    return [*map(_by_row, grads[:3]), *(grads[3][at] for at in wanted)]


def _joint(call: _Call, query: Tensor, wanted: Sequence[int]) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """Return two functions for torch's backward op: the score function, and one that also computes the gradients of the
    score and of those tensors of ``of_score`` that are at the positions ``wanted``.
    """
    needs = [at in wanted for at in range(len(call.of_score))]
    buffers = tuple(x.detach().requires_grad_(need) for x, need in zip(call.of_score, needs, strict=True))
    b, h, m, n = (query.new_zeros((), dtype=torch.int32) for _ in range(4))
    numbers = query.new_zeros((), requires_grad=True), b, h, m, n
    with differentiable():
        return create_fw_bw_graph(call.score(differentiable=True), numbers, buffers)


def _contiguous(x: Tensor) -> Tensor:
    """Return ``x`` [b, h, q] with contiguous strides, which Inductor keeps. The kernel reads it as if it had these."""
    _, h, q = x.shape
    contiguous: Tensor = force_stride_order(x, (h * q, q, 1))
    return contiguous


def _by_row(x: Tensor) -> Tensor:
    """Return ``x`` [b, h, q, ...] with the strides that the results of `flex` have: contiguous as [b, q, h, ...]."""
    return x.transpose(1, 2).contiguous().transpose(1, 2)


def is_used(gm: fx.GraphModule) -> bool:
    """Return whether ``gm`` calls `flex` or `flex_gradient` with the block tables of torch's kernel, as graphs for CUDA
    do.
    """
    calls = [node for op in (FLEX, FLEX_GRADIENT) for node in gm.graph.find_nodes(op="call_function", target=op)]
    tables = [call.kwargs.get("visible", call.args[-1]) for call in calls]
    return any(isinstance(x, list | tuple) and len(x) > 1 for x in tables)


def _decompositions(**options: bool | int | str) -> dict[Any, Callable[..., Any]]:
    """Map the ops `flex` and `flex_gradient` to their decompositions (`_forward`, `_gradient`) to torch's kernel.

    Args:
        options: options of torch's kernel, which those of the user override.
    """
    return {FLEX: partial(_forward, options), FLEX_GRADIENT: partial(_gradient, options)}


KERNELS = _decompositions()
IN_LESS_MEMORY = _decompositions(num_stages=1)  # of the GPU's shared memory
