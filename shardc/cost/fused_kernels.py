"""Estimates the work of a step's ops: buffers that they allocate, kernels into which they fuse, FLOPs and bytes.

Consecutive ops between matrix products, attentions, convolutions and collectives count as one kernel. It reads values
from outside and writes those that are used outside: roughly what Inductor's fusion does.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from math import prod
from typing import Any

import torch
from torch import Tensor, fx

from shardc.cost.step_sequence import COMPUTE, INPUT, MOVE, START, WAIT, Op, Sequence, aliased
from shardc.custom_ops.flops import flops, is_attention
from shardc.custom_ops.flops import is_dense as is_dense_op
from shardc.ir import graph as ir

aten = torch.ops.aten
# Ops that read only some rows of their first operand.
_LOOKUPS = {aten.embedding.default, aten.index_select.default, aten.gather.default, aten.index.Tensor}


@dataclass
class Buffer:
    """Memory that one op allocates.

    Args:
        size: bytes.
        allocated: position of the op that allocates it.
        last: position of the last op that reads it, directly or through views.
        readers: positions of all readers, except views and waits.
    """

    size: int
    allocated: int
    last: int
    readers: list[int] = field(default_factory=list)


@dataclass(frozen=True)
class Kernel:
    """Local ops that run as one kernel.

    Args:
        ops: positions of the ops in the step.
        name, module, source, phase: those of the first op.
        flops: operations of its dense ops.
        bytes: bytes read from and written to memory.
        dtype: selects the peak of the hardware.
        attention: it is an attention kernel.
    """

    ops: tuple[int, ...]
    name: str
    module: str
    source: str
    phase: str
    flops: int
    bytes: int
    dtype: torch.dtype
    attention: bool = False


def flops_of(node: fx.Node) -> int:
    """Return the operations of ``node`` at its shapes (global or local) by torch's counter; 0 if it is not dense."""
    if not is_dense(node):
        return 0
    args, kwargs = fx.node.map_arg((node.args, node.kwargs), _shape)
    return flops(node.target, args, tuple(kwargs.items()), _shape(node))


def _shape(node: fx.Node) -> Any:
    """Return the shape of a node's result, or the shapes of its results."""
    value = ir.info(node).value
    if isinstance(value, tuple):
        return tuple(torch.Size(x.shape) if x is not None else None for x in value)
    return torch.Size(value.shape) if value is not None else None


def is_dense(node: fx.Node) -> bool:
    """Return whether ``node`` is a matrix product, attention, convolution or recurrent layer, which no kernel fuses."""
    return is_dense_op(node.target)


def buffers(step: Sequence) -> list[tuple[Buffer | None, ...]]:
    """Return, for each op, the buffer of each of its results."""
    out: list[tuple[Buffer | None, ...]] = []
    for at, op in enumerate(step.ops):
        behind = _behind(op, at, out)
        out.append(behind)
        for read in op.reads:
            for buffer in out[read]:
                if buffer is not None:
                    buffer.last = at
                    if op.kind not in (MOVE, WAIT):
                        buffer.readers.append(at)
    return out


def _behind(op: Op, at: int, buffers_of: list[tuple[Buffer | None, ...]]) -> tuple[Buffer | None, ...]:
    node = op.node
    if op.kind == WAIT:
        return buffers_of[op.reads[0]]
    if op.kind == MOVE:
        owner = aliased(node)
        if owner is not None:
            return buffers_of[op.reads[node.all_input_nodes.index(owner)]]
        index: Any = node.args[1]
        return (buffers_of[op.reads[0]][index],)
    value = node.meta.get("val")
    results = value if isinstance(value, list | tuple) else (value,)
    return tuple(Buffer(x.untyped_storage().nbytes(), at, at) if isinstance(x, Tensor) else None for x in results)


def tensor_bytes(x: Any) -> int:
    return prod(x.shape) * x.dtype.itemsize if isinstance(x, Tensor) else 0


def kernels(step: Sequence, memory: list[tuple[Buffer | None, ...]]) -> dict[int, Kernel]:
    """Return the kernels that Inductor would fuse of a step's ops, each by the position of its last op."""
    step_outputs = {id(b) for _, at in step.outputs for b in memory[at]}
    out: dict[int, Kernel] = {}
    run: list[int] = []

    def close() -> None:
        if run:
            out[run[-1]] = _kernel(step, memory, tuple(run), step_outputs)
            run.clear()

    for at, op in enumerate(step.ops):
        if op.kind in (INPUT, MOVE):
            continue
        if run and (op.kind in (START, WAIT) or is_dense(op.node) or op.phase != step.ops[run[-1]].phase):
            close()
        if op.kind == COMPUTE:
            run.append(at)
            if is_dense(op.node):
                close()
    close()
    return out


def _kernel(
    step: Sequence, memory: list[tuple[Buffer | None, ...]], run: tuple[int, ...], step_outputs: set[int]
) -> Kernel:
    members = set(run)
    reads: dict[int, int] = {}
    written = operations = 0
    for at in run:
        op = step.ops[at]
        operations += flops_of(op.node)
        result_bytes = tensor_bytes(op.node.meta.get("val"))
        for place, (node, read) in enumerate(zip(op.node.all_input_nodes, op.reads, strict=True)):
            size = tensor_bytes(node.meta.get("val"))
            if place == 0 and op.node.target in _LOOKUPS:
                size = min(size, result_bytes)
            for buffer in memory[read]:
                if buffer is not None and buffer.allocated not in members:
                    reads[id(buffer)] = max(reads.get(id(buffer), 0), min(size, buffer.size))
        written += sum(b.size for b in memory[at] if b is not None and not is_inner(b, members, step_outputs))
    first = step.ops[run[0]]
    record = ir.info(first.node)
    return Kernel(
        run, record.name, record.origin.module, record.origin.source, first.phase,
        operations, written + sum(reads.values()), _dtype(first.node), is_attention(first.node.target),
    )  # fmt: skip


def is_inner(buffer: Buffer, kernel: set[int], step_outputs: set[int]) -> bool:
    """Return whether a buffer is used only inside the kernel that allocates it."""
    return id(buffer) not in step_outputs and all(reader in kernel for reader in buffer.readers)


def _dtype(node: fx.Node) -> torch.dtype:
    values = [x.meta.get("val") for x in node.all_input_nodes]
    return next((x.dtype for x in values if isinstance(x, Tensor)), torch.float32)
