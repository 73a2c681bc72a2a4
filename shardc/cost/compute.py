"""The compute of a step: kernels, FLOPs and bytes of its ops, and dense ops that several ranks compute redundantly.

Consecutive ops between matrix products, attentions, convolutions and collectives count as one kernel. It reads values
from outside and writes those that are used outside: roughly what Inductor's fusion does. `wasted` returns the warning
of `shardc.compile` about redundant dense ops.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from math import prod
from typing import Any

import torch
from torch import Tensor, fx

from shardc.cost.step_sequence import COMPUTE, INPUT, MOVE, START, WAIT, Op, Sequence, aliased
from shardc.custom_ops.flops import flops, is_attention
from shardc.custom_ops.flops import is_dense as is_dense_op
from shardc.errors import PlanError
from shardc.ir import graph as ir
from shardc.ir import ops
from shardc.ir.comm import is_stored
from shardc.ir.layout import Layout
from shardc.ir.mesh import MICRO, Mesh, split_part

aten = torch.ops.aten
# Ops that read only some rows of their first operand.
_LOOKUPS = {aten.embedding.default, aten.index_select.default, aten.gather.default, aten.index.Tensor}


@dataclass
class Buffer:
    """Memory that one op of a step allocates: its bytes, and the positions of the ops that use it.

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
    """Local ops of a step that run as one kernel, with its operations and bytes.

    Args:
        ops: positions of the ops in the step.
        name, module, source, phase: name, module, source line and phase of the first op.
        flops: operations of its dense ops.
        bytes: bytes read from and written to memory.
        dtype: dtype of its operands, which selects the peak rate of the hardware.
        attention: whether it is an attention kernel.
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

    @property
    def kind(self) -> str:
        """Return the kind of kernel as text: "attention" or "product" with the dtype (``product, bf16``), or "fused"
        without a dense op.
        """
        dtype = ir.DTYPE_NAMES.get(self.dtype, self.dtype)
        return f"attention, {dtype}" if self.attention else f"product, {dtype}" if self.flops else "fused"


def flops_of(node: fx.Node) -> int:
    """Return the floating-point operations of a dense op (a matrix product, attention, ...) at its (global or local)
    shapes, by torch's counter. 0 for other ops.
    """
    if not is_dense(node):
        return 0
    args, kwargs = fx.node.map_arg((node.args, node.kwargs), _shape)
    return flops(node.target, args, tuple(kwargs.items()), _shape(node))


def _shape(node: fx.Node) -> Any:
    """Return the shape of a node's result, or a tuple with the shape of each (None for a non-tensor)."""
    value = ir.info(node).value
    if isinstance(value, tuple):
        return tuple(torch.Size(x.shape) if x is not None else None for x in value)
    return torch.Size(value.shape) if value is not None else None


def is_dense(node: fx.Node) -> bool:
    """Return whether ``node`` is a matrix product, attention, convolution or recurrent layer, which no kernel fuses."""
    return is_dense_op(node.target)


def buffers(step: Sequence) -> list[tuple[Buffer | None, ...]]:
    """Return, for each op of ``step``, the `Buffer` of each of its results; None for a result that is not a tensor."""
    out: list[tuple[Buffer | None, ...]] = []
    for at, op in enumerate(step.ops):
        out.append(_result_buffers(op, at, out))
        awaited = step.ops[op.reads[0]] if op.kind == WAIT else None
        # A copy to the host reads its operand until it is awaited.
        copied = awaited.reads if awaited is not None and is_stored(awaited.node) else ()
        for buffer in (buffer for read in (*op.reads, *copied) for buffer in out[read] if buffer is not None):
            buffer.last = at
            if op.kind not in (MOVE, WAIT):
                buffer.readers.append(at)
    return out


def _result_buffers(op: Op, at: int, buffers_of: list[tuple[Buffer | None, ...]]) -> tuple[Buffer | None, ...]:
    """Return the buffers that hold the results of ``op``, which is at position ``at``: those of its operand for a view,
    wait or getitem, else new ones. None stands for a result that is no tensor.
    """
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


def tensor_bytes(x: object) -> int:
    """Return the bytes of ``x``; 0 if it is not a tensor."""
    return prod(x.shape) * x.dtype.itemsize if isinstance(x, Tensor) else 0


def kernels(step: Sequence, memory: list[tuple[Buffer | None, ...]]) -> dict[int, Kernel]:
    """Return the kernels of a step: position of the last op of a kernel -> `Kernel`. A kernel is a group of ops that
    Inductor would fuse. ``memory`` has the buffers of each op's results, from `buffers`.
    """
    step_outputs = {id(b) for _, at in step.outputs for b in memory[at]}
    out: dict[int, Kernel] = {}
    run: list[int] = []  # positions of the ops of the kernel so far

    def close() -> None:
        """Add a kernel of the ops in ``run`` to the result, and empty ``run``."""
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
    """Return the kernel that consists of the ops at the positions ``run``. ``step_outputs`` are the ids of buffers that
    leave the step.
    """
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
        operations, written + sum(reads.values()), operand_dtype(first.node), is_attention(first.node.target),
    )  # fmt: skip


def is_inner(buffer: Buffer, kernel: set[int], step_outputs: set[int]) -> bool:
    """Return whether ``buffer`` is used only inside the kernel that allocates it, and is no output of the step.
    ``kernel`` has the positions of that kernel's ops.
    """
    return id(buffer) not in step_outputs and all(reader in kernel for reader in buffer.readers)


def operand_dtype(node: fx.Node) -> torch.dtype:
    """Return the dtype of the first tensor that ``node`` reads; float32 if there is none."""
    return next((ir.value(x).dtype for x in node.all_input_nodes if ir.is_tensor(x)), torch.float32)


SHARE = 0.05  # share of a rank's operations from which `shardc.compile` warns: a high cost by `lint`
LEAST = 10**9  # wasted operations per rank and step below which there is no warning: well under a second anywhere
NAMED = 3  # most modules named in a warning


@dataclass(frozen=True)
class Dense:
    """A dense op (`is_dense`) on one rank: its operations and bytes, and how many ranks repeat them.

    Args:
        name, module: name and module of the op.
        flops: operations of one rank.
        bytes: bytes that one rank reads and writes.
        times: axis -> number of ranks along it that compute the same.
        gathered: (axis, name of an all-gather, bytes that a rank receives) of each all-gather, over an axis of
            ``times``, of an activation that the op reads.
    """

    name: str
    module: str
    flops: int
    bytes: int
    times: dict[str, int]
    gathered: tuple[tuple[str, str, int], ...]


def layers_of(name: str) -> str:
    """Return ``name`` with the numbers of repeated layers replaced by ``*``, such as ``layers.*.mlp.up``."""
    return re.sub(r"\.\d+(?=\.|$)", ".*", name)


def model_flops(graph: fx.Graph) -> Iterator[tuple[fx.Node, int]]:
    """Yield (node, operations) of each dense op of a global graph, at global shapes. The numbers are for all ranks
    together, without work that ranks repeat.
    """
    for node in graph.nodes:
        if node.op == "call_function" and (flops := flops_of(node)):
            yield node, flops


def dense(graph: fx.Graph, mesh: Mesh) -> Iterator[tuple[fx.Node, Dense]]:
    """Yield (node, `Dense`) of each dense op of a global graph; ranks along an axis that splits none of its tensors
    repeat the op.
    """
    for node, total in model_flops(graph):
        values = [value for x in (*node.all_input_nodes, node) for value in ir.info(x).tensors if value.layout]
        parts = {axis for value in values if value.layout for axis in value.layout.bound}
        workers = {axis: prod(mesh.size(p) for p in parts if split_part(p)[0] == axis) for axis in mesh.axes}
        workers = {axis: min(ranks, mesh.size(axis)) for axis, ranks in workers.items()}
        times = {axis: mesh.size(axis) // ranks for axis, ranks in workers.items() if mesh.size(axis) > ranks}
        gathered = [gather for x in node.all_input_nodes for gather in _gathers(x) if gather[0] in times]
        record, flops = ir.info(node), total // prod(workers.values())
        nbytes = sum(map(_local, values))
        yield node, Dense(record.name, record.origin.module, flops, nbytes, times, tuple(gathered))


def _local(value: ir.Value) -> int:
    """Return the bytes of ``value`` on one rank, given its layout."""
    layout = value.layout
    return value.nbytes if layout is None else value.nbytes // prod(map(layout.mesh.size, layout.bound))


def _gathers(node: fx.Node) -> Iterator[tuple[str, str, int]]:
    """Yield (axis, name, bytes received) of the all-gathers from which ``node`` comes, through ops with one operand.
    Gathers of parameters are left out.
    """
    gathers = []
    while node.op == "call_function" and len(node.all_input_nodes) == 1 and not isinstance(ir.info(node).value, tuple):
        (source,) = node.all_input_nodes
        if node.target is ops.all_gather:
            received = _local(ir.value(node)) - _local(ir.value(source))
            over = str(node.kwargs["axis"])
            axes = {split_part(axis)[0] for axis in over.split(",")}
            gathers += [(axis, ir.info(node).name, received) for axis in axes]
        node = source
    role = ir.info(node).role
    if role is None or role.kind == "input":
        yield from gathers


@dataclass
class _Axis:
    """The operations and bytes that each rank repeats in a step because other ranks along one mesh axis compute the
    same.

    Attributes:
        flops, bytes: redundant operations, and redundant bytes read and written.
        within: operations of the repeated ops in total, including those that are not redundant.
        modules: module -> its redundant operations.
        gathered: name of an all-gather for these ops -> bytes that a rank receives.
    """

    flops: float = 0.0
    bytes: float = 0.0
    within: float = 0.0
    modules: dict[str, float] = field(default_factory=dict)
    gathered: dict[str, int] = field(default_factory=dict)


def wasted(
    ops: Iterable[Dense], mesh: Mesh, params: Mapping[str, Layout], counts: Callable[[str], int] = lambda name: 1
) -> PlanError | None:
    """Return a warning about compute that ranks repeat, as a PlanError whose text is shown; None if too little is
    repeated.

    Args:
        ops: the dense ops of a step.
        mesh: the mesh.
        params: parameter -> its compute layout.
        counts: maps the name of an op to the number of ops that it represents (repeated layers).
    """
    axes: dict[str, _Axis] = {}
    total = 0
    for op in ops:
        count = counts(op.name)
        total += count * op.flops
        for axis, times in op.times.items():
            work, extra = axes.setdefault(axis, _Axis()), count * (1 - 1 / times)
            work.flops += extra * op.flops
            work.bytes += extra * op.bytes
            work.within += count * op.flops
            module = layers_of(op.module)
            work.modules[module] = work.modules.get(module, 0.0) + extra * op.flops
            work.gathered |= {name: count * received for over, name, received in op.gathered if over == axis}
    large = {axis: work for axis, work in axes.items() if work.flops >= max(SHARE * total, LEAST)}
    if not large:
        return None
    ordered = sorted(large, key=lambda axis: -large[axis].flops)
    what = "; ".join(_describe(axis, large[axis], mesh, total) for axis in ordered)
    mends = [_remedy(axis, large[axis], total, params) for axis in ordered]
    return PlanError(what, fix="; ".join(mends) + "; program.lint() lists the ops")


def _describe(axis: str, work: _Axis, mesh: Mesh, total: int) -> str:
    """Return the warning's text about the redundant ``work`` of the ranks along ``axis``. ``total`` is the number of
    operations of a rank and step.
    """
    who = "no op is split over it" if work.within >= total else f"no axis splits {_names(work.modules)} there"
    gathered = f", for which {sum(work.gathered.values()):.2g} bytes are gathered over it" if work.gathered else ""
    copies = f"{mesh.size(axis)} ranks along axis {axis!r} of the mesh {mesh}"
    if axis == mesh.time:
        copies = f"{mesh.size(axis)} microbatches"
    return (
        f"the {copies} compute the same: {work.flops:.2g} of the {total:.2g} operations of a rank and step are wasted "
        f"({work.flops / total:.0%}), and {work.bytes:.2g} bytes that they read and write{gathered}; {who}"
    )


def _remedy(axis: str, work: _Axis, total: int, params: Mapping[str, Layout]) -> str:
    """Return advice on how to avoid the redundant ``work`` of the ranks along ``axis``, such as the plan entry that
    would split the work.

    Args:
        total: all operations of a rank and step.
        params: parameter -> its compute layout.
    """
    if axis == MICRO:
        return "use fewer microbatches, of a number that divides the batch"
    if work.within >= total:
        return f'add shardc.fsdp("{axis}"), which splits the batch over it, or leave the axis out of the mesh'
    whole = {
        layers_of(name) for name, layout in params.items() if axis not in {split_part(part)[0] for part in layout.axes}
    }
    modules = _largest(work.modules)
    weights = ", ".join(f'"{module}"' for module in modules if f"{module}.weight" in whole)
    if f"{modules[0]}.weight" in whole:
        return f'add shardc.tp("{axis}", colwise=[{weights}]), or the same rowwise'
    name = modules[0] or "the model"
    return f"split what goes into {name} over {axis}, by tp of the linears before it or Plan(activations=...)"


def _largest(modules: dict[str, float]) -> list[str]:
    """Return the names of the modules with the most operations, at most `NAMED`, the largest first. ``modules`` maps
    name -> operations.
    """
    return sorted(modules, key=lambda module: -modules[module])[:NAMED]


def _names(modules: dict[str, float]) -> str:
    """Return as text the names of the modules with the most operations, and the number of modules left out. ``modules``
    maps name -> operations.
    """
    left = len(modules) - NAMED
    return ", ".join(name or "the model" for name in _largest(modules)) + (f" and {left} more" if left > 0 else "")
