"""Seed: writes the plan's layouts on parameters, buffers, inputs and named activations."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from torch import fx

from shardc.custom_ops import expert_ops
from shardc.custom_ops.float8_ops import QUANTISE
from shardc.errors import PlanError
from shardc.ir import graph as ir
from shardc.ir import ops
from shardc.ir.graph import Value
from shardc.ir.layout import Digit, Layout
from shardc.ir.mesh import Mesh
from shardc.ir.op_traits import CAST, RESHAPES
from shardc.ir.rewriter import GraphRewriter
from shardc.passes.layout.save_policies import mark_saves
from shardc.plan.placed import SavePolicy
from shardc.plan.ports import InputPlan
from shardc.plan.resolve import ParamPlan


@dataclass(frozen=True)
class Seed:
    """Gives every placeholder except tangents its layout.

        %w: f32[8,4]                        %w: f32[8@fsdp,4]
        %y = mm(%x, %w)                 ->  %w.full: f32[8,4] = reshard(%w)
                                            %y = mm(%x, %w.full)

    A ``reshard`` from storage to compute layout stands before each parameter's first use, and an ``unpad`` if storage
    is padded; they stand after the cast if the only use is a cast to a smaller dtype. A ``pad`` brings the gradient to
    the stored shape.

    *Requires:* a captured graph in canonical form. *Ensures:* placeholders have layouts and causes; tags that the plan
    does not mention are gone; origins have the plan's policies for saved activations.

    Args:
        mesh: the mesh of the layouts.
        params: qualified name -> the parameter's plan.
        inputs: plan of each tensor input, in order.
        pinned: activation tags that the plan mentions.
        saves: where the activations of modules that backward reads are kept, in the plan's order.

    Raises:
        PlanError: none of the ops of an entry about saved activations is in its modules.
    """

    mesh: Mesh
    params: Mapping[str, ParamPlan]
    inputs: Sequence[InputPlan]
    pinned: frozenset[str] = frozenset()
    saves: tuple[SavePolicy, ...] = ()
    name = "seed"

    def __call__(self, gm: fx.GraphModule) -> fx.GraphModule:
        graph, rewriter = gm.graph, GraphRewriter(gm.graph)
        for node in list(graph.nodes):
            if node.op == "get_attr":
                ir.set_info(node, ir.info(node).at(Layout.whole(self.mesh, ir.value(node).shape)))
            if node.target is ops.tag and node.kwargs["name"] not in self.pinned:
                rewriter.replace(node, node.args[0])
        mark_saves(graph, self.saves)
        order = {node: at for at, node in enumerate(graph.nodes)}  # position of each node
        inputs = iter(self.inputs)
        for node in ir.placeholders(graph):
            record = ir.info(node)
            role = ir.role(node)
            if role.kind == "param":
                # The last argument is the first use.
                self._param(rewriter, node, min(node.users, key=order.__getitem__, default=None))
            elif role.kind == "buffer":
                ir.set_info(node, record.at(Layout.whole(self.mesh, ir.value(node).shape)))
            elif role.kind == "input" and isinstance(record.value, Value):
                input_plan = next(inputs)
                ir.set_info(
                    node, replace(record.at(input_plan.layout), origin=replace(record.origin, cause=input_plan.cause))
                )
        self._grads(rewriter)
        return gm

    def _param(self, rewriter: GraphRewriter, node: fx.Node, first_use: fx.Node | None) -> None:
        """Writes the layout of parameter ``node``, and inserts its reshard and ``unpad`` before ``first_use``
        (None: the parameter has no use).
        """
        record = ir.info(node)
        plan = self.params[record.name]
        _check_experts(node, plan)
        origin = replace(record.origin, cause=plan.storage_cause)
        dtype, shape = ir.value(node).dtype, ir.value(node).shape
        ir.set_info(node, replace(record, value=Value(dtype, plan.storage.shape, plan.storage), origin=origin))
        if plan.storage.shape != shape:  # storage is padded, and the placeholder stands for storage
            node.meta["val"] = node.meta["val"].new_empty(plan.storage.shape)
        is_padded = plan.storage.shape != shape
        for source, users in gathered(node, is_padded).items() if first_use is not None else ():
            self._gather(rewriter, node, source, users, plan, shape, first_use)

    def _gather(
        self, rewriter: GraphRewriter, node: fx.Node, source: fx.Node, users: Sequence[fx.Node], plan: ParamPlan,
        shape: Sequence[int], first_use: fx.Node,
    ) -> None:  # fmt: skip
        """Inserts the reshard (gather) of ``source`` and the ``unpad`` after it; ``users`` then read the result.
        ``source`` is the parameter ``node``, or is computed from the parameter's shard.

        Args:
            users: the nodes that read what is gathered.
            plan: the parameter's plan.
            shape: shape of the parameter in the model; that in storage may be padded.
            first_use: first use of the parameter.
        """
        dtype, stored = ir.value(source).dtype, plan.storage.shape
        # What is computed from a shard is padded as it is; of a form in float8, so are the values its scale is from.
        on_shards = [] if source is node else [source, *_float8_magnitudes(source)]
        for x in on_shards:
            _set_shape(x, stored)
        # ``last`` is the newest node of the chain: reshards at the stored (padded) sizes, then an unpad for each dim.
        padded, last, current = _repad(plan.compute, stored), source, plan.storage
        at = first_use if source is node else source.next
        # A dim that compute splits, but cannot divide, is gathered at padded sizes first (`ParamPlan.split`).
        for layout in (plan.split, padded):
            if layout is not None and layout != current:
                place = rewriter.before(at, like=node, suffix="full")
                last, current = place.typed(Value(dtype, layout.shape, layout), ops.reshard, last), layout
        for dim, (have, want) in enumerate(zip(stored, shape, strict=True)):
            if have != want:
                padded = _resize(padded, dim, want)
                place = rewriter.before(at, like=node, suffix="unpadded")
                last = place.typed(Value(dtype, padded.shape, padded), ops.unpad, last, dim=dim, size=want)
        for user in users if last is not source else ():
            user.replace_input_with(source, last)

    def _grads(self, rewriter: GraphRewriter) -> None:
        """Pads the gradients of padded parameters to their stored shapes."""
        output = ir.output_node(rewriter.graph)

        def stored(role: ir.Role, grad: fx.Node) -> fx.Node:
            """Returns the output ``grad``, padded if it is the gradient of a padded parameter."""
            if role.kind != "grad" or role.name not in self.params:
                return grad
            if grad.target is not CAST or len(grad.users) != 1:
                return self._padded(rewriter, grad, output, role.name)
            source = grad.args[0]
            padded = self._padded(rewriter, source, grad, role.name)
            if padded is not source:  # the cast stays last, where `Precision` expects autograd's cast
                grad.args = (padded,)
                _set_shape(grad, ir.value(padded).shape)
            return grad

        ir.change_outputs(rewriter.graph, stored)

    def _padded(self, rewriter: GraphRewriter, grad: fx.Node, before: fx.Node, name: str) -> fx.Node:
        """Returns ``grad`` padded to the stored shape of parameter ``name``, by a node inserted before ``before``."""
        shape, want = list(ir.value(grad).shape), self.params[name].storage.shape
        for dim, (have, size) in enumerate(zip(tuple(shape), want, strict=True)):
            if have != size:
                shape[dim] = size
                value = replace(ir.value(grad), shape=tuple(shape))
                place = rewriter.before(before, like=grad, suffix="padded")
                grad = place.typed(value, ops.pad, grad, dim=dim, size=size)
        return grad


def _set_shape(node: fx.Node, shape: tuple[int, ...]) -> None:
    """Records that the result of ``node`` has ``shape``."""
    ir.update(node, value=replace(ir.value(node), shape=shape))
    node.meta["val"] = node.meta["val"].new_empty(shape)


def _check_experts(param: fx.Node, plan: ParamPlan) -> None:
    """Raises PlanError if ``plan`` splits the weights of experts along another dim than that of the experts (dim 0)."""
    casts = [user for user in param.users if user.target is CAST]
    # The op over all experts that reads the parameter, at once or through a cast.
    call = next((user for x in (param, *casts) for user in x.users if user.target is expert_ops.CALL), None)
    layout = plan.split or plan.compute  # `split`: the compute layout at padded sizes, if an axis does not divide a dim
    axes = [axis for dim in range(1, layout.ndim) for axis in layout.dim_axes(dim)]
    if call is None or not axes:
        return
    name, over = ir.info(param).name, [*layout.dim_axes(0), *axes]
    # The plan entry that the error proposes, with all axes on dim 0: "_@(ep,tp), _, _".
    spec = ", ".join([f"_@({','.join(over)})" if len(over) > 1 else f"_@{over[0]}", *["_"] * (layout.ndim - 1)])
    raise PlanError(
        f"parameter {name!r} has the weights of experts, and {layout} splits each of them over {', '.join(axes)}",
        plan_entry=plan.compute_cause or None,
        source=ir.info(call).origin.source or None,
        fix=f"split the experts between the ranks, over axes or parts of axes: Plan(params={{{name!r}: {spec!r}}}) for "
        "axes along which ranks have the same tokens, shardc.ep(...) for those that split the batch too",
    )


def gathered(param: fx.Node, padded: bool = False) -> dict[fx.Node, list[fx.Node]]:
    """Returns what is gathered for ``param``, as node -> its users: each of its float8 forms and, for other uses, its
    cast to a smaller dtype if that is the only one, else the parameter. ``padded``: whether the parameter is stored
    padded.

    Float8 forms are quantised on shards. If ``padded``, a form with a scale for each row or column is not gathered.
    """
    # The second argument of a form has the maxima for its scales; that for the whole matrix has no dims.
    forms = [user for user in param.users if user.target is QUANTISE and not (padded and ir.value(user.args[1]).shape)]
    of_shard = {*forms, *(x for form in forms for x in _float8_magnitudes(form))}
    others = [user for user in param.users if user not in of_shard]
    # Behind a cast to a smaller dtype there are fewer bytes to gather.
    source = others[0] if len(others) == 1 and _narrows(others[0]) else param
    rest = {} if not others else {source: others if source is param else list(source.users)}
    return {form: list(form.users) for form in forms} | rest


def _float8_magnitudes(form: fx.Node) -> tuple[fx.Node, ...]:
    """Returns a tuple of one node, the absolute values from which the scale of ``form`` (a float8 form of a parameter)
    is computed. Returns () if ``form`` is not a float8 form.
    """
    if form.target is not QUANTISE:
        return ()
    # quantise(x, amax(abs(x))), for scales of blocks quantise(x, amax(view(abs(x)))).
    magnitudes = form.args[1].args[0]
    return (magnitudes.args[0] if magnitudes.target in RESHAPES else magnitudes,)


def _narrows(cast: fx.Node) -> bool:
    """Returns whether a node is a cast to a smaller dtype."""
    is_cast = cast.target is CAST and set(cast.kwargs) == {"dtype"}  # it changes neither device nor memory format
    return is_cast and ir.value(cast).itemsize < ir.value(cast.args[0]).itemsize


def _repad(compute: Layout, shape: Sequence[int]) -> Layout:
    """Returns the layout ``compute`` of a parameter with its sizes changed to ``shape``, the parameter's padded shape.
    Dims that change must not be split.
    """
    for dim, (have, want) in enumerate(zip(compute.shape, shape, strict=True)):
        if have != want:
            compute = _resize(compute, dim, want)
    return compute


def _resize(layout: Layout, dim: int, size: int) -> Layout:
    """Returns ``layout`` with the unsplit dim ``dim`` changed to ``size``."""
    assert not layout.dim_axes(dim), f"dim {dim} of {layout} is padded in storage and split in compute"
    return layout.replace(dims=[*layout.dims[:dim], (Digit(size),), *layout.dims[dim + 1 :]])
