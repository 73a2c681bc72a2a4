"""Rewrites causal convolutions in Dynamo's graph. A model may pad both ends of the sequence and cut off the end of the
result; rewritten, it pads the front only.

``conv(x, padding=k - 1)[..., :length]`` is ``conv(pad(x, (k - 1, 0)))``. Values in between then keep the size of the
sequence, so that a split sequence stays split (pass `Windows`), and what is cut off is not computed.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import fx
from torch.fx.experimental.symbolic_shapes import statically_known_true

from shardc.capture.slices import arguments

_POINTWISE = frozenset({
    F.silu, F.relu, F.gelu, F.sigmoid, F.tanh, F.mish, F.softplus, F.elu, F.leaky_relu, F.hardswish, F.relu6,
    torch.relu, torch.sigmoid, torch.tanh,
})  # fmt: skip
_POINTWISE_METHODS = frozenset(
    {"relu", "sigmoid", "tanh", "contiguous", "clone", "float", "double", "half", "bfloat16"}
)


def pad_at_the_begin(gm: fx.GraphModule) -> None:
    """Rewrites causal convolutions (over one dim) in ``gm`` that pad both ends of the sequence, so that they pad the
    front only.

    All uses of the result must slice it to the length of the sequence, from element 0 on, maybe after transposes and
    pointwise functions.
    """
    for node in gm.graph.nodes:
        if node.op == "call_function" and node.target is torch.conv1d:
            _rewrite(gm.graph, node)
    gm.recompile()


def _rewrite(graph: fx.Graph, conv: fx.Node) -> None:
    """Rewrites the convolution ``conv`` to pad the front only, and removes the slices that cut off the end of its
    result. Changes nothing if the convolution is not causal.
    """
    named = arguments(conv, "input", "weight", "bias", "stride", "padding", "dilation", "groups")
    x, weight = _shape(named["input"]), _shape(named["weight"])
    stride, padding, dilation = (_number(named.get(name, default)) for name, default in
                                 (("stride", 1), ("padding", 0), ("dilation", 1)))  # fmt: skip
    if x is None or weight is None or stride != 1 or not padding or dilation is None:
        return
    if padding != dilation * (weight[-1] - 1):  # as long on both sides as the kernel reaches back
        return
    cuts = _cuts(conv, len(x) - 1, x[-1])  # the sequence is the last dim, of x[-1] elements before padding
    if not cuts:
        return
    with graph.inserting_before(conv):
        padded = graph.call_function(F.pad, (named["input"], (padding, 0)))
    padded.meta.update({key: value for key, value in conv.meta.items() if key != "example_value"})
    conv.args, conv.kwargs = (), {**named, "input": padded, "padding": 0}
    for cut, dim in cuts:  # the result has the sequence's length now
        if cut.target == "narrow":
            cut.replace_all_uses_with(cut.args[0])
            graph.erase_node(cut)
        else:
            index = list(_index(cut, len(x)) or ())  # a call that may slice other dims, too
            index[dim] = slice(None)
            cut.args = (cut.args[0], tuple(index))


def _shape(node: object) -> Sequence[Any] | None:
    """Return the shape of a node's example value; None if it has none."""
    value = node.meta.get("example_value") if isinstance(node, fx.Node) else None
    return value.shape if isinstance(value, torch.Tensor) else None


def _number(x: object) -> int | None:
    """Return ``x`` if it is a number, or the number in a tuple of one. None for anything else (``padding="same"``)."""
    x = x[0] if isinstance(x, (tuple, list)) and len(x) == 1 else x
    return x if isinstance(x, int) else None


def _cuts(node: fx.Node, dim: int, length: Any) -> list[tuple[fx.Node, int]] | None:
    """Return the calls that cut off the end of ``node``, each as (call, dim that it slices to ``length`` elements).
    None if anything reads the end.
    """
    out: list[tuple[fx.Node, int]] = []  # empty if nothing uses ``node``
    shape = _shape(node)
    if shape is None:
        return None
    for user in node.users:
        after = _shape(user)
        if after is None or len(after) != len(shape):
            return None
        moved = _moved(user, dim, len(shape))
        # The users of a transpose or pointwise function must cut the end; any other user must itself.
        if moved is None and _slices_from_start(user, dim, len(shape)) and statically_known_true(after[dim] == length):
            out.append((user, dim))
            continue
        further = None if moved is None else _cuts(user, moved, length)
        if further is None:
            return None
        out += further
    return out


def _moved(user: fx.Node, dim: int, rank: int) -> int | None:
    """Return the position, in the result of ``user``, of dim ``dim`` of its operand. None if ``user`` is neither a
    transpose nor a pointwise function of one operand; ``rank`` is the operand's number of dims.
    """
    if user.target in _POINTWISE or user.op == "call_method" and user.target in _POINTWISE_METHODS:
        return dim if len(user.all_input_nodes) == 1 else None
    order = list(range(rank))  # for each dim of the result, the operand's dim
    if user.target is getattr and user.args[1] == "mT" and rank > 1:
        order[-2:] = order[:-3:-1]  # the last two dims, swapped
    elif user.target in ("transpose", torch.transpose):
        named = arguments(user, "input", "dim0", "dim1")
        a, b = named["dim0"], named["dim1"]
        order[a], order[b] = order[b], order[a]
    elif user.target in ("permute", torch.permute):
        to = arguments(user, "input", "dims")["dims"]
        order = [d % rank for d in (user.args[1:] if isinstance(to, int) else to)]
    else:
        return None
    return order.index(dim)


def _slices_from_start(user: fx.Node, dim: int, rank: int) -> bool:
    """Return whether ``user`` is a slice that takes ``dim`` of its operand from element 0 on, with step 1. ``rank`` is
    the operand's number of dims.
    """
    if user.op == "call_method" and user.target == "narrow" and len(user.args) == 4:
        return user.args[1] in (dim, dim - rank) and user.args[2] == 0
    index = _index(user, rank)
    return index is not None and index[dim].start in (None, 0) and index[dim].step in (None, 1)


def _index(user: fx.Node, rank: int) -> list[slice] | None:
    """Return one slice per dim if ``user`` indexes its operand by slices only (``x[:, 2:]``), else None. ``rank`` is
    the operand's number of dims.
    """
    if user.target is not operator.getitem:
        return None
    index = user.args[1] if isinstance(user.args[1], tuple) else (user.args[1],)
    # An ellipsis stands for whole slices of all dims without an entry.
    if Ellipsis in index and all(isinstance(each, slice) or each is Ellipsis for each in index):
        at = index.index(Ellipsis)
        index = (*index[:at], *[slice(None)] * (rank - len(index) + 1), *index[at + 1 :])
    if not all(isinstance(each, slice) for each in index) or len(index) > rank:
        return None
    return [*index, *[slice(None)] * (rank - len(index))]
