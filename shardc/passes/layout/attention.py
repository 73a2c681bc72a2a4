"""Attention: if the plan splits the sequence, replaces attention kernels with ops that know global positions."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import prod
from operator import getitem

import torch
from torch import fx
from torch.fx.node import Argument

from shardc.cost.model import Pricing
from shardc.custom_ops import attention_ops, flex_ops
from shardc.errors import PlanError, ShardcWarning
from shardc.ir import graph as ir
from shardc.ir.comm_volume import arguments_of
from shardc.ir.graph import NameScope
from shardc.ir.mesh import Mesh
from shardc.ir.rewriter import erase_dead_code
from shardc.passes.op_calls import Work, call_of, passing_seconds
from shardc.plan.entries import Cp
from shardc.rules import spec_of

_PREFIX, _BACKWARD = "aten._scaled_dot_product_", "_backward.default"
_FLEX = (flex_ops.FLEX, flex_ops.FLEX_GRADIENT)


@dataclass(frozen=True)
class Attention:
    """Replaces attention kernels with ``shardc_attention::call``, and their backward with
    ``shardc_attention::gradient``, if the plan splits their sequence (cp entries).

        %o, ... = aten._scaled_dot_product_flash_attention(%q, %k, %v)
        ->  %o, %lse = shardc_attention::call(%q, %k, %v, ..., "cp", "ring")

    ``flex_attention`` is such an op from the start, and gets the entry's axes and methods. Kernels with dropout stay,
    since they draw random numbers by position; so do causal kernels with a bias, and kernels
    whose bias needs a gradient.

    *Requires:* a captured graph. *Ensures:* the op carries the entry's axes and methods, from which its rule follows.

    Raises:
        PlanError: the axis does not divide the heads; an entry names a method and its modules compute no attention.

    Warns:
        ShardcWarning: an entry names a method, and its attention has dropout or is written out as matrix products.

    Args:
        mesh: the mesh of the layouts.
        cost: the cost model, which decides for method "auto" whether keys and values pass round the ring or are
            gathered.
        entries: the plan's cp entries.
    """

    mesh: Mesh
    cost: Pricing
    entries: tuple[Cp, ...] = ()
    name = "attention"

    def __call__(self, gm: fx.GraphModule) -> fx.GraphModule:
        kernels = [node for node in gm.graph.nodes if _is_kernel(node)]
        applied: set[Cp] = set()
        names = NameScope.of(gm.graph)
        for node in [kernel for kernel in kernels if not _is_backward(kernel)]:
            module = ir.info(node).origin.module
            # Of several entries for an axis, the last one.
            entries = tuple({entry.axis: entry for entry in self.entries if entry.applies_to(module)}.values())
            backward = _backwards(node)
            # Forward and backward are replaced together or not at all: one reads the results of the other.
            if entries and all(map(_supported, [node, *backward])):
                for entry in entries:
                    self._check(node, entry)
                applied.update(entries)
                around = any(self._uses_ring(node, entry) for entry in entries)
                # A backward kernel is listed once for each result of the forward that it reads.
                for kernel in dict.fromkeys([*backward, node]):
                    if kernel.target in _FLEX:
                        _write_axes(kernel, entries, around)
                    else:
                        _replace(kernel, entries, around, names)
        erase_dead_code(gm.graph)
        self._check_unapplied(gm.graph, applied)
        return gm

    def _check(self, node: fx.Node, entry: Cp) -> None:
        """Raises PlanError if ``entry`` splits heads over an axis that does not divide them."""
        heads, size = ir.value(node.args[0]).shape[1], self.mesh.size(entry.axis)
        if entry.method == "ulysses" and heads % size:
            raise PlanError(
                f"{ir.info(node).name} has {heads} heads, which {entry.axis} of {size} ranks does not divide",
                plan_entry=str(entry),
                source=ir.info(node).origin.source or None,
                fix='write method="ring" or method="gather", which leave heads as they are',
            )

    def _uses_ring(self, node: fx.Node, entry: Cp) -> bool:
        """Decides how a rank gets the keys and values of the others: returns True if they pass round a ring of ranks,
        False if they are gathered. The method of ``entry`` decides or, if it is "auto", the predicted time.
        """
        if entry.method != "auto" or self.mesh.size(entry.axis) == 1:
            return entry.method == "ring"
        call = call_of(node)
        spec, work = spec_of(call), Work.of(call)
        assert spec is not None
        arguments = arguments_of(node)
        # Bytes of all keys and values; each rank starts with its ``part`` of them.
        sent = sum(prod(v.shape) * v.itemsize for v in (ir.value(arguments[name]) for name in ("key", "value")))
        operations = spec.flops / self.mesh.ranks
        computed = self.cost.compute_seconds(operations, 0, work.dtypes[0], work.attention)
        axes, part = (entry.axis,), sent / self.mesh.ranks
        # A ring passes them beside the computation, a gather (None) before it.
        gathered = passing_seconds(self.mesh, axes, part, computed=None, cost=self.cost)
        return passing_seconds(self.mesh, axes, part, computed, self.cost) <= gathered

    def _check_unapplied(self, graph: fx.Graph, applied: set[Cp]) -> None:
        """Reports the entries that ask for a method (ring or ulysses) and were applied to no kernel: raises PlanError
        if their modules compute no attention, else warns.
        """
        for entry in self.entries:
            if entry.method not in ("ring", "ulysses") or entry in applied or self.mesh.size(entry.axis) == 1:
                continue
            # What may be part of an attention: batched products (it is written out), and kernels that were left as is.
            written = [n for n in graph.nodes if n.target is torch.ops.aten.bmm.default or _is_kernel(n)]
            first = next((n for n in written if entry.applies_to(ir.info(n).origin.module)), None)
            fix = 'use scaled_dot_product_attention (attn_implementation="sdpa") without dropout'
            if first is None:
                raise PlanError(f"no attention is computed in {entry.modules!r}", plan_entry=str(entry), fix=fix)
            record = ir.info(first)
            text = (
                f"method {entry.method!r} is not applied: {record.name} ({first.target}) is part of an attention that"
            )
            error = PlanError(
                f"{text} has dropout or is written out; the cheapest layouts are used, such as gathered keys",
                plan_entry=str(entry),
                source=record.origin.source or None,
                fix=fix,
            )
            warnings.warn(str(error), ShardcWarning, stacklevel=2)


def _is_kernel(node: fx.Node) -> bool:
    """Returns whether ``node`` calls one of torch's attention kernels, or ``flex_attention``, forward or backward."""
    return str(node.target).startswith(_PREFIX) or node.target in _FLEX


def _is_backward(kernel: fx.Node) -> bool:
    """Returns whether an attention kernel is a backward one."""
    return str(kernel.target).endswith(_BACKWARD) or kernel.target is flex_ops.FLEX_GRADIENT


def _backwards(kernel: fx.Node) -> list[fx.Node]:
    """Returns the backward kernels that take results of a forward kernel."""
    kernels, results = [], list(kernel.users)
    for result in results:  # grows by what autograd detaches before it saves it
        kernels += [user for user in result.users if _is_backward(user)]
        results += [user for user in result.users if user.target is torch.ops.aten.detach.default]
    return kernels


def _supported(node: fx.Node) -> bool:
    """Returns whether an op of ``shardc_attention`` can replace the kernel ``node``. Dropout, a causal mask beside a
    bias, and a bias that needs a gradient prevent that.
    """
    arguments = arguments_of(node)
    # A backward kernel has a mask of the gradients that are wanted: of query, key, value and bias.
    wants_bias = (arguments.get("grad_input_mask") or [False] * 4)[3] and _bias(arguments) is not None
    both = bool(arguments.get("is_causal")) and _bias(arguments) is not None
    return not arguments.get("dropout_p") and not wants_bias and not both


def _bias(arguments: dict[str, Argument]) -> Argument:
    """Returns the attention bias among the arguments of a kernel; None for none."""
    return arguments.get("attn_mask") if arguments.get("attn_bias") is None else arguments["attn_bias"]


def _axes_and_methods(entries: Sequence[Cp]) -> tuple[str, str]:
    """Returns (the axes of ``entries``, their methods), each joined by commas to one text, as the attention ops take
    them.
    """
    return ",".join(entry.axis for entry in entries), ",".join(entry.method for entry in entries)


def _write_axes(node: fx.Node, entries: Sequence[Cp], around: bool) -> None:
    """Writes the axes and methods of ``entries`` into the arguments of the ``flex_attention`` ``node``, in place;
    ``around``: keys and values are passed from rank to rank (a ring) instead of gathered.
    """
    names = [argument.name for argument in node.target._schema.arguments]
    # The last arguments, from ``axis`` on, are (axes, methods, ring or gather).
    node.args = (*node.args[: names.index("axis")], *_axes_and_methods(entries), around)


def _replace(node: fx.Node, entries: Sequence[Cp], around: bool, names: NameScope) -> None:
    """Turns the attention kernel ``node`` into the ``shardc_attention`` op of ``entries``, in place; ``around``: keys
    and values are passed from rank to rank (a ring) instead of gathered.
    """
    arguments, record, old = arguments_of(node), ir.info(node), node.target
    query, key = arguments["query"], arguments["key"]
    scale = ir.value(query).shape[3] ** -0.5 if arguments.get("scale") is None else arguments["scale"]
    # Causal, scale, number of keys, axes, methods, ring or gather: the last arguments of both ops.
    how = (bool(arguments.get("is_causal")), scale, ir.value(key).shape[2], *_axes_and_methods(entries), around)
    tensors = (query, key, arguments["value"])
    # A backward kernel reads the result of its forward.
    if "out" in arguments:
        grad = arguments.get("grad_out", arguments.get("grad_out_"))
        node.target = attention_ops.GRADIENT
        node.args = (grad, *tensors, arguments["out"], arguments["logsumexp"], _bias(arguments), *how)
        count = 3  # results: the gradients of query, key and value
    else:
        # Results: output and logsumexp.
        node.target, node.args, count = attention_ops.CALL, (*tensors, _bias(arguments), *how), 2
    node.kwargs = {}
    vals = fx.map_arg(node.args, lambda x: x.meta["val"])
    node.meta["val"] = tuple(node.target(*vals))
    value = ir.value_of(node.meta["val"][:count])
    assert isinstance(value, tuple)
    # The kernel's name in the node's name ("_scaled_dot_product_flash_attention") is replaced by "attention".
    plain = record.name.replace(str(old).removeprefix("aten.").removesuffix(".default"), "attention")
    ir.set_info(node, replace(record, name=names.fresh(plain), value=value))
    for user in node.users:
        at = user.args[1]
        # Only the replaced backward kernel reads the results beyond these (offsets, random state).
        if user.target is getitem and at < count:
            user.meta["val"] = node.meta["val"][at]
            ir.set_info(user, replace(ir.info(user), value=value[at]))
