"""Annotates a traced graph: names from module paths, source lines, phases, and the `Role` of each input and output."""

from __future__ import annotations

import re
from collections.abc import Container, Mapping, Sequence
from dataclasses import replace
from itertools import takewhile
from operator import getitem
from typing import Any

import torch
from torch import fx
from torch._functorch._aot_autograd import descriptors as aot
from torch.utils.checkpoint import CheckpointPolicy

from shardc.capture.capture_errors import error_at, line_of
from shardc.errors import CaptureError
from shardc.ir import graph as ir
from shardc.ir import ops
from shardc.ir.graph import Info, NameScope, Origin, Role
from shardc.ir.returned import AGAIN
from shardc.ir.rewriter import GraphRewriter

PREFIX = "model."  # of the names of the model's modules, parameters and buffers in the traced root module
CHUNK_ROWS = "chunk_rows"  # key of the annotation of ops that the model computes by chunks of rows
OUTPUT = ""  # name of the tag that gives each output a node of its own
SAME = "="  # name of the tag of an output that is the same tensor object as an earlier one
_WITH_EFFECTS = torch.ops.higher_order.with_effects
# Role kinds that forward must not change in place -> (their word in the error, the fix).
_MUST_NOT_CHANGE = {"param": ("parameter", "or register it as a buffer"), "input": ("input", "and return it")}


def model_name(name: str) -> str:
    """Return ``name``, of a module, parameter or buffer in the traced root module, without the prefix ``model.``."""
    return f"{name}.".removeprefix(PREFIX)[:-1]


def annotate(
    gm: fx.GraphModule, inputs: Sequence[str], first_names: Mapping[str, str], stored_dtypes: Mapping[str, torch.dtype]
) -> None:
    """Gives every node of a traced graph its `Info` (name, value, origin), and the output node the `Role` of each
    output. Nodes of the op ``shardc::tag`` become calls of the marker op `ops.tag`.

    Args:
        inputs: the name of each tensor input.
        first_names: every name of a parameter or buffer of the traced module -> the first name of that tensor.
        stored_dtypes: dtype of each parameter and buffer by its first name; the trace may use another dtype.
    """
    _merge_names(gm.graph, first_names)
    duplicates = _drop_output_tags(gm.graph)
    _name_outputs(ir.output_node(gm.graph), inputs, duplicates)
    _drop_effects(gm.graph)
    names = NameScope()
    # Gradients that forward itself computes come from autograd, too; they are forward, as its outputs need them.
    needed = _needed_forward(gm.graph)
    backward_from = _first_backward(gm.graph, needed)
    # Forward nodes behind it are moved before it, so that all that follows is backward.
    _forward_first(gm.graph, backward_from, needed)
    backward = False
    for node in gm.graph.nodes:
        backward = backward or node is backward_from
        if node.op == "output":
            continue
        if node.op == "placeholder":
            role = _input_role(node.meta["desc"], inputs)
            name = f"d.{role.name}" if role.kind == "tangent" else role.name
            phase = "backward" if role.kind == "tangent" else "forward"
            record = Info(names.fresh(name), ir.value_of(node.meta.get("val")), Origin(phase=phase), role)
        else:
            phase = "backward" if backward else "forward"
            if node.target is torch.ops.shardc.tag.default:  # (x, name): marks an activation that the plan names
                node.target, node.kwargs, node.args = ops.tag, {"name": node.args[1]}, node.args[:1]
            module = _module_path(node)
            name = _op_name(node, module) if phase == "forward" else f"d.{_op_name(node, module)}"
            origin = Origin(module, line_of(node), phase, **_region(node))
            record = Info(names.fresh(name), ir.value_of(node.meta.get("val")), origin)
        ir.set_info(node, record)
    _cast_stored(gm.graph, stored_dtypes)


def _cast_stored(graph: fx.Graph, stored_dtypes: Mapping[str, torch.dtype]) -> None:
    """Casts parameters and buffers, in the graph, from their stored dtype to the traced one. Casts their gradients and
    new values back to the stored dtype.
    """
    output, rewriter = ir.output_node(graph), GraphRewriter(graph)
    order = {node: at for at, node in enumerate(graph.nodes)}
    for node in [*ir.placeholders(graph, "param"), *ir.placeholders(graph, "buffer")]:
        record, value = ir.info(node), ir.value(node)
        stored_dtype = stored_dtypes[PREFIX + record.name]
        if stored_dtype == value.dtype:
            continue
        # The placeholder gets the stored dtype; its users get a cast to the traced one, before the first of them.
        fake = node.meta["val"]
        node.meta["val"] = fake.to(stored_dtype)
        ir.set_info(node, replace(record, value=replace(value, dtype=stored_dtype)))
        if node.users:
            inserter = rewriter.before(min(node.users, key=order.__getitem__), like=node, suffix="cast")
            rewriter.redirect(node, inserter.call(torch.ops.aten._to_copy.default, node, dtype=fake.dtype))
    results = list(output.args[0])
    for at, (role, node) in enumerate(ir.outputs(graph)):
        result_dtype = stored_dtypes.get(PREFIX + role.name) if role.kind in ("grad", "buffer") else None
        if result_dtype is not None and isinstance(node, fx.Node) and result_dtype != ir.value(node).dtype:
            before = output if role.kind == "grad" else node.next  # the forward ends before the backward
            inserter = rewriter.before(before, like=node, suffix="stored")
            results[at] = inserter.call(torch.ops.aten._to_copy.default, node, dtype=result_dtype)
    output.args = (tuple(results),)


def _merge_names(graph: fx.Graph, first_names: Mapping[str, str]) -> None:
    """Merges the placeholders of a tensor with several names: one placeholder, that of its first name, remains. The
    gradients of the others are added to its gradient.
    """
    output = ir.output_node(graph)
    remaining: dict[aot.AOTInput, fx.Node] = {}  # descriptor, with the first name -> placeholder
    for node in ir.placeholders(graph):
        desc = node.meta["desc"] = _by_first_name(node.meta["desc"], first_names)
        if remaining.setdefault(desc, node) is not node:
            node.replace_all_uses_with(remaining[desc])
            graph.erase_node(node)
    # Outputs whose descriptors are equal by first names are gradients of one tensor.
    results: dict[aot.AOTOutput, fx.node.Argument] = {}
    for desc, result in zip(output.meta["desc"], output.args[0], strict=True):
        desc = _by_first_name(desc, first_names)
        earlier = results.get(desc)
        if isinstance(earlier, fx.Node) and isinstance(result, fx.Node):
            with graph.inserting_before(output):
                total = graph.call_function(torch.ops.aten.add.Tensor, (earlier, result))
            total.meta, result = dict(result.meta), total
        # One of the gradients may be None.
        results[desc] = earlier if result is None else result
    output.meta["desc"], output.args = list(results), (tuple(results.values()),)


def _by_first_name(desc: Any, first_names: Mapping[str, str]) -> Any:
    """Return AOTAutograd's descriptor ``desc`` of an input or output with the name in it replaced by the first name of
    that parameter or buffer.
    """
    if isinstance(desc, aot.ParamAOTInput | aot.BufferAOTInput):
        return replace(desc, target=first_names[desc.target])
    for field in ("grad_of", "mutated_input", "base"):
        if hasattr(desc, field):
            return replace(desc, **{field: _by_first_name(getattr(desc, field), first_names)})
    return desc


def _drop_output_tags(graph: fx.Graph) -> set[aot.AOTOutput]:
    """Removes the tag ops that mark the model's outputs. Returns the descriptors (AOTAutograd's) of outputs that are
    the same tensor object as an earlier output.
    """
    output = ir.output_node(graph)
    duplicates: set[aot.AOTOutput] = set()
    for node in list(graph.nodes):
        if node.target is torch.ops.shardc.tag.default and node.args[1] in (OUTPUT, SAME):
            if node.args[1] == SAME:
                duplicates |= {desc for desc, x in zip(output.meta["desc"], output.args[0], strict=True) if x is node}
            node.replace_all_uses_with(node.args[0])
            graph.erase_node(node)
    return duplicates


def _needed_forward(graph: fx.Graph) -> set[fx.Node]:
    """Return the nodes that forward must compute: all ancestors of its outputs. Gradients that the model itself
    computes may be among them.
    """
    needed = {node for role, node in ir.outputs(graph) if role.kind != "grad" and isinstance(node, fx.Node)}
    for node in reversed(graph.nodes):
        if node in needed:
            needed.update(node.all_input_nodes)
    return needed


def _forward_first(graph: fx.Graph, backward_from: fx.Node | None, needed: set[fx.Node]) -> None:
    """Moves the nodes in ``needed``, on which forward outputs depend, in front of ``backward_from``, the first node of
    backward.

    AOTAutograd puts views of mutated tensors last.
    """
    if backward_from is None:
        return
    output = ir.output_node(graph)
    # From the last node back to `backward_from`: the rest of the graph behind it.
    later = list(takewhile(lambda node: node is not backward_from, reversed(graph.nodes)))
    for node in reversed(later):
        if node in needed and node is not output:
            backward_from.prepend(node)


def _name_outputs(output: fx.Node, inputs: Sequence[str], duplicates: Container[aot.AOTOutput]) -> None:
    """Records the `Role` of each output (model output, gradient, buffer) in the output node, and which outputs repeat
    an earlier one; drops other results.

    Args:
        duplicates: the descriptors of outputs that are the same tensor as an earlier output.

    Raises:
        CaptureError: the model changes an input or a parameter in place; only buffers may be changed.
    """
    results = output.args[0]
    roles = [_output_role(desc, inputs) for desc in output.meta["desc"]]
    named = [(role, result) for role, result in zip(roles, results, strict=True) if role is not None]
    output.args = (tuple(result for _, result in named),)
    output.meta[ir.ROLES] = tuple(role for role, _ in named)
    # Positions of outputs that are the tensor of an earlier output.
    output.meta[AGAIN] = {desc.idx for desc in output.meta["desc"] if desc in duplicates}
    for role, result in named:  # an input or parameter among the outputs is one with a new value
        if role.kind in _MUST_NOT_CHANGE:
            kind, instead = _MUST_NOT_CHANGE[role.kind]
            fix = _max_norm_fix(role.name, result) or f"compute a new tensor from it, {instead}"
            raise error_at(line_of(result), f"the model changes its {kind} {role.name!r} in place", fix)


def _max_norm_fix(name: str, result: fx.Node) -> str | None:
    """Return what the user should write instead of an embedding's ``max_norm``, which changes the parameter ``name`` in
    place. None if something else changes it.

    ``result`` is the node that computes the new parameter.
    """
    if result.target is not torch.ops.aten.embedding_renorm.default:
        return None
    max_norm, norm_type = result.args[2:4]
    return (
        "set the embedding's max_norm to None, and scale the rows between steps: with torch.no_grad(): "
        f"module.get_parameter({name!r}).renorm_({norm_type}, 0, {max_norm})"
    )


def _drop_effects(graph: fx.Graph) -> None:
    """Drops ops that are there for their side effects only (checks, prints), and the tokens by which torch orders such
    ops.
    """
    for node in reversed(list(graph.nodes)):
        token = isinstance(node.meta.get("desc"), aot.ForwardTokenAOTInput | aot.BackwardTokenAOTInput)
        # A result of an op with effects, which torch wraps in an op that takes and returns a token.
        picked = node.target is getitem and node.args[0].target is _WITH_EFFECTS
        if not node.users and (token or picked or node.target is _WITH_EFFECTS):
            graph.erase_node(node)


def _first_backward(graph: fx.Graph, needed: set[fx.Node]) -> fx.Node | None:
    """Return the first node of the backward. Such a node depends on a tangent or comes from autograd, and is not in
    ``needed`` (the nodes on which forward outputs depend).

    None if there is none.
    """
    tangents: set[fx.Node] = set()
    for node in graph.nodes:
        if node.op == "placeholder":
            if isinstance(node.meta.get("desc"), aot.TangentAOTInput):
                tangents.add(node)
            continue
        if node.op == "output":
            return None
        in_backward = any(n in tangents for n in node.all_input_nodes) or node.meta.get("autograd_backward")
        if in_backward and node not in needed:
            return node
    return None


def _input_role(desc: aot.AOTInput, inputs: Sequence[str]) -> Role:
    """Return the `Role` (parameter, buffer, tangent or input) of a placeholder, given AOTAutograd's descriptor of it.
    ``inputs`` has the name of each tensor input.
    """
    if isinstance(desc, aot.ParamAOTInput):
        return Role("param", model_name(desc.target))
    if isinstance(desc, aot.BufferAOTInput):
        return Role("buffer", model_name(desc.target))
    if isinstance(desc, aot.SubclassGetAttrAOTInput):  # an inner tensor of a wrapper subclass
        outer = _input_role(desc.base, inputs)
        return replace(outer, name=f"{outer.name}.{desc.attr}")
    if isinstance(desc, aot.TangentAOTInput):
        return Role("tangent", _output_name(desc.output), _output_index(desc.output))
    assert isinstance(desc, aot.PlainAOTInput), f"{desc} is no input of the model"
    return Role("input", inputs[desc.idx], desc.idx)


def _output_role(desc: aot.AOTOutput, inputs: Sequence[str]) -> Role | None:
    """Return the `Role` (model output, gradient, or parameter, buffer or input with a new value) of an output, given
    AOTAutograd's descriptor of it. None if a program does not return it.
    """
    if isinstance(desc, aot.GradAOTOutput):
        target = _input_role(desc.grad_of, inputs)
        return Role("grad", target.name, target.index)
    if isinstance(desc, aot.InputMutationAOTOutput):  # the new value of a buffer; of others it is refused later
        target = _input_role(desc.mutated_input, inputs)
        return Role(target.kind, target.name, target.index)
    if isinstance(desc, aot.SubclassGetAttrAOTOutput):
        return _inner_output_role(desc, inputs)
    if isinstance(desc, aot.PlainAOTOutput):
        return Role("output", _output_name(desc), desc.idx)
    return None


def _inner_output_role(desc: aot.SubclassGetAttrAOTOutput, inputs: Sequence[str]) -> Role | None:
    """Return the `Role` of an output that is an inner tensor of a wrapper subclass. None if a program does not return
    it; CaptureError if the wrapper is an output of the model.
    """
    outer = _output_role(desc.base, inputs)
    if outer is not None and outer.kind == "output":
        raise CaptureError(
            f"output {outer.name!r} of the model is of a wrapper subclass, with the inner tensor {desc.attr!r}",
            fix="return its inner tensors, or a plain tensor of its values",
        )
    return None if outer is None else replace(outer, name=f"{outer.name}.{desc.attr}")


def _output_index(desc: aot.AOTOutput) -> int:
    """Return the position of a result among the outputs of the traced root module."""
    return getattr(desc, "idx", 0)


def _output_name(desc: aot.AOTOutput) -> str:
    """Return the name of a model output, which follows from its position: "out", "out.1" and so on."""
    return "out" if _output_index(desc) == 0 else f"out.{_output_index(desc)}"


def _module_path(node: fx.Node) -> str:
    """Return the qualified name, in the model, of the module whose forward called the op of ``node``; "" for the model
    itself.
    """
    stack = node.meta.get("nn_module_stack") or node.meta.get("fwd_nn_module_stack") or {}
    if not stack:
        return ""
    path = list(stack.values())[-1][0]
    # Dynamo writes L['self']._modules['model'].layers[0].norm for the model's module "layers.0.norm".
    path = re.sub(r"^L\['\w+'\]\.?", "", path)
    path = re.sub(r"\[['\"]?([^'\"\]]+)['\"]?\]", r".\1", path).replace("._modules", "")
    return model_name(path).strip(".")


def _region(node: fx.Node) -> dict[str, Any]:
    """Return fields of an `Origin`, name -> value, from what the trace noted on ``node``: ``region`` (number of the
    checkpoint region) and ``policy`` of an op in a checkpoint, and ``chunk_rows`` of an op of a chunked loss.

    Checkpoint regions are numbered from 1 in the order of the calls; ``policy`` is "must_save" if that of the region
    saves the result. `shardc.capture.replacements` annotates ``chunk_rows``.
    """
    annotated = node.meta.get("custom") or {}
    fields = {CHUNK_ROWS: annotated[CHUNK_ROWS]} if CHUNK_ROWS in annotated else {}
    policy = node.meta.get("recompute")
    if not isinstance(policy, CheckpointPolicy):
        return fields
    saved = policy in (CheckpointPolicy.MUST_SAVE, CheckpointPolicy.PREFER_SAVE)
    return fields | {"region": node.meta.get("ac_graph_id", 0) + 1, "policy": "must_save" if saved else ""}


def _op_name(node: fx.Node, module: str) -> str:
    """Return ``module.op``, where op is the name of a node's op without namespace and overload; only the op if
    ``module`` is "".
    """
    target = getattr(node.target, "overloadpacket", node.target)
    name = getattr(target, "__name__", str(target))
    return f"{module}.{name}" if module else name
