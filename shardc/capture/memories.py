"""Finds which storage each output of a model has on one device, from Dynamo's graph."""

from __future__ import annotations

from collections.abc import Sequence
from operator import getitem
from typing import Any

import torch
from torch import Tensor, fx, nn

from shardc.capture.annotate import OUTPUT, PREFIX, SAME
from shardc.ir.returned import Memory


def memories_of(
    traced: Any, root: nn.Module, places: dict[str, str], fakes: Sequence[Tensor], inputs: Sequence[str]
) -> tuple[tuple[Memory, ...], dict[int, str]]:
    """Return the storage of each output, and storage -> name of its owner, as `returned` takes them.

    Dynamo's graph has the ops that one device runs; AOTAutograd's graph is functionalized.
    """
    plain = [(f"{path}.{key}", x) for path, module in root.named_modules() for key, x in vars(module).items()]
    tensors = (*plain, *root.named_parameters(), *root.named_buffers())
    names = {id(x): places.get(name, name).removeprefix(PREFIX) for name, x in tensors}
    names |= dict(zip(map(id, fakes), inputs, strict=True))
    feeds = zip(traced.graph.find_nodes(op="placeholder"), traced._dynamo_bytecode_flatten(*fakes), strict=True)
    owners = {_memory(node): names.get(id(x), "a tensor forward reads") for node, x in feeds if isinstance(x, Tensor)}
    tags = traced.graph.find_nodes(op="call_function", target=torch.ops.shardc.tag.default)
    outputs = [tag.args[0] for tag in tags if tag.kwargs.get("name") in (OUTPUT, SAME)]
    return tuple(Memory(_memory(x), *_as_view(x)) for x in outputs), owners


def _as_view(node: fx.Node) -> tuple[bool, bool]:
    """Return whether ``node`` is a view through ``as_strided``, and whether torch refuses in-place changes of it.

    It refuses them for a view that a custom autograd function returns, and for one whose elements share memory.
    """
    strided = fixed = False
    memory = _memory(node)
    while node.op.startswith("call_") and node.all_input_nodes:
        before = node.all_input_nodes[0]
        if before.target is torch.ops.higher_order.autograd_function_apply and node.target is getitem:
            return strided, fixed or any(_memory(x) == memory for x in before.all_input_nodes if _is_tensor(x))
        if not _is_tensor(before) or _memory(before) != memory:
            break
        if node.target in ("as_strided", torch.as_strided):
            strided, fixed = True, fixed or _overlaps_itself(node.meta["example_value"])
        node = before
    return strided, fixed


def _is_tensor(node: fx.Node) -> bool:
    return isinstance(node.meta.get("example_value"), Tensor)


def _overlaps_itself(x: Tensor) -> bool:
    """Return whether elements of ``x`` may share memory: a stride is within the span of smaller strides."""
    span = 0
    for step, size in sorted((step, size) for step, size in zip(x.stride(), x.shape, strict=True) if size > 1):
        if step <= span:
            return True
        span += step * (size - 1)
    return False


def _memory(node: fx.Node) -> int:
    x = node.meta["example_value"]
    return int(x.untyped_storage()._cdata) if x.layout is torch.strided else id(x)
