"""Greedy: chooses every op's strategy and every value's layout at least cost, one op after another.

A forward sweep over the joint graph compares, at each op, the strategies that its operands' layouts suggest. A strategy
costs the time of its reshards (one that an earlier consumer also needs costs nothing) and of the compute of each rank.
Parameters keep their compute layout unless nothing else works. Then a backward sweep: a value that all consumers want
sliced is computed sliced, if that adds no communication.
"""

from __future__ import annotations

import warnings
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from operator import getitem, itemgetter

import torch
from torch import fx

from shardc.cost import redistribute
from shardc.custom_ops import function_ops
from shardc.custom_ops.functional_ops import written_op
from shardc.errors import LayoutError, RuleError, ShardcWarning
from shardc.ir import graph as ir
from shardc.ir import ops
from shardc.ir.layout import Layout
from shardc.ir.op_traits import RESHAPES
from shardc.passes import local_regions
from shardc.passes.layout.propagate import Problem, decide, lay_out_getitem, padded, pin
from shardc.passes.op_calls import Gradient, Work, call_of, compute_seconds, move_of, operands_of, priced
from shardc.rules import spec_of
from shardc.rules.rule import Call
from shardc.rules.spec import Spec, Strategy, carries, from_results, infer, project, strategies


@dataclass(frozen=True)
class Greedy:
    """Chooses layouts by one forward and one backward sweep over the graph."""

    def __call__(self, problem: Problem, graph: fx.Graph) -> Mapping[fx.Node, Layout]:
        return _Sweep(problem, graph).run()


class _Sweep:
    """The state of one run of `Greedy`: a sweep over the graph from inputs to outputs, then one back.

    Attributes:
        demanded: value -> the layouts in which its uses so far need it.
        pinned: values whose layout the plan fixes; resharding them is a last resort.
        wanted: graph output -> the layout in which the caller gets it; the result of `run`.
        grad_target: node that only leads to one parameter's gradient -> the layout needed there.
    """

    def __init__(self, problem: Problem, graph: fx.Graph) -> None:
        self.problem, self.graph = problem, graph
        self.mesh, self.cost = problem.mesh, problem.cost
        self.demanded: dict[fx.Node, frozenset[Layout]] = {}
        self.pinned: set[fx.Node] = set()
        self.wanted: dict[fx.Node, Layout] = {}
        self.grad_target = _grad_targets(graph, problem.compute_layouts)

    def run(self) -> dict[fx.Node, Layout]:
        """Chooses a layout for every value and the needs of every op (the layouts of its operands). Returns output ->
        the layout in which it leaves the graph.
        """
        has_tangents = False  # whether tangents have layouts
        grad_ops: list[fx.Node] = []
        for node in self.graph.nodes:
            if node.op == "output":
                if not has_tangents:  # a graph without backward ops
                    self.wanted |= self._forward_outputs()
                for leaf in grad_ops:
                    self._choose(leaf)
                self.wanted |= self._grad_outputs()
            elif node.op == "placeholder":
                if ir.role(node).kind == "param":
                    self.pinned.add(node)  # inputs and tangents may be resharded at their price
            elif node.op == "call_function":
                # Backward reads tangents, whose layouts follow from those of the outputs.
                if not has_tangents and ir.info(node).origin.phase == "backward":
                    self.wanted |= self._forward_outputs()
                    has_tangents = True
                # Ops that only lead to a parameter's gradient come last, when the gathers of all others are known.
                if node in self.grad_target:
                    grad_ops.append(node)
                else:
                    self._choose(node)
        self._sweep_back()
        return self.wanted

    # --- forward sweep

    def _choose(self, node: fx.Node) -> None:
        """Chooses the strategy of an op, the cheapest one. For a marker node, writes the layout that follows from its
        operand or from the plan.
        """
        if node.target is getitem:
            lay_out_getitem(node)
        elif node.target is ops.tag:
            source = ir.layout(node.args[0])
            pin(self.problem, node, source)
            self._demand(node.args[0], source)
        elif node.target in (ops.reshard, ops.unpad):  # of a parameter, in its compute layout, by `Seed`
            self.pinned.add(node)
        elif node.target is ops.pad:
            self._decide(node, padded(node, ir.layout(node.args[0])))
        elif node.target in local_regions.OPS:
            self._decide(node, local_regions.strategy_of(node, self.mesh))
        else:
            self._choose_strategy(node)

    def _choose_strategy(self, node: fx.Node) -> None:
        """Chooses the cheapest strategy of an op. One without a rule or without tensor operands is computed whole."""
        call = call_of(node)
        operands = operands_of(node)
        spec = _checked_spec(node, call)
        if spec is None or not operands:
            if operands:
                self._warn_whole(node)
            whole = tuple(Layout.whole(self.mesh, v.shape) for v in call.operands)
            whole_results = tuple(Layout.whole(self.mesh, v.shape) for v in call.results if v is not None)
            self._decide(node, Strategy(whole, whole_results))
            return
        pins = tuple(x in self.pinned for x in operands)
        reachable = tuple(self._layouts_at_no_cost(x) for x in operands)
        layouts = tuple(ir.layout(x) for x in operands)
        # An op on the way to a parameter's gradient is also priced by the reduction of that gradient at the end.
        grad = Gradient(self.grad_target[node], self.problem.batch_axes) if node in self.grad_target else None
        options = priced(spec, layouts, reachable, pins, Work.of(call), grad, self.cost)
        _, chosen = min(options, key=itemgetter(0))  # on a tie the first
        self._decide(node, chosen)
        if node.target in function_ops.OPS.values():  # cond, scan, while_loop
            used = {axis for layout in chosen.operands for axis in layout.bound}
            self._warn_whole(node, {axis for layout in layouts for axis in layout.bound} - used)
        if node.target in RESHAPES and ir.info(node).origin.phase == "forward":
            self._warn_cut(node, layouts[0], chosen.operands[0], spec)
        # To reshard a view or cast of a pinned value is to reshard the value.
        if operands[0] in self.pinned and (spec.moves or node.target is torch.ops.aten._to_copy.default):
            self.pinned.add(node)

    def _decide(self, node: fx.Node, strategy: Strategy) -> None:
        """Writes ``strategy`` on ``node`` and records the layouts that it needs of its operands."""
        for operand, layout in zip(operands_of(node), strategy.operands, strict=True):
            self._demand(operand, layout)
        decide(node, strategy)

    def _demand(self, node: fx.Node, layout: Layout) -> None:
        """Records that some op needs ``node`` at ``layout``. If ``node`` is a view, also records the layout that its
        operand then needs.
        """
        if layout in self.demanded.get(node, ()):
            return
        # Sets are immutable, as `priced` is memoised by them.
        self.demanded[node] = self.demanded.get(node, frozenset()) | {layout}
        if (spec := move_of(node)) is not None and (back := from_results(spec, layout)) is not None:
            self._demand(node.args[0], back.operands[0])

    def _layouts_at_no_cost(self, node: fx.Node) -> frozenset[Layout]:
        """Returns the layouts in which ``node`` can be read without a further reshard, because other ops already need
        it, or the value that it is a view of, in these layouts.
        """
        wanted = self.demanded.get(node, frozenset())
        if (spec := move_of(node)) is None:  # no view
            return wanted
        # A view of a resharded source is this value, resharded; `infer` returns a text if the view does not allow it.
        moved = (infer(spec, [layout]) for layout in self._layouts_at_no_cost(node.args[0]))
        return wanted | {results[0] for results in moved if not isinstance(results, str)}

    def _warn_cut(self, node: fx.Node, have: Layout, want: Layout, spec: Spec) -> None:
        """Warns of a view whose operand has to be gathered because an axis does not divide the sizes of the view's
        result.

        Args:
            have, want: layout of the operand, and the layout that the view needs.
            spec: the view's factors.
        """
        # `project` drops the axes that cross the border of two factors of the view: their sizes do not divide.
        carried = {d.axis for digits in project(spec, spec.operands[0], have).values() for d in digits}
        lost = [axis for axis in have.bound if axis not in carried and axis in self.mesh and axis not in want.bound]
        moved = redistribute.wire_bytes(have, want, ir.value(node).itemsize, self.cost)
        if not lost or not moved:
            return
        source, axes = node.args[0], ", ".join(lost)
        shape = ",".join(map(str, ir.value(node).shape))
        text = (
            f"a view turns {ir.info(source).name} {have} into [{shape}], whose sizes axis {axes} does not divide: "
            f"it is gathered, {moved} bytes a rank"
        )
        fix = (
            f"use sizes that {axes} divides, or leave {axes} off where they are split; of queries, keys and values in "
            f"one weight, split each: shardc.Plan(params={{'*.qkv.weight': '(3 _@{lost[0]}), _'}})"
        )
        error = LayoutError(text, source=ir.info(node).origin.source or None, fix=fix)
        warnings.warn(str(error), ShardcWarning, stacklevel=2)

    def _warn_whole(self, node: fx.Node, axes: Collection[str] | None = None) -> None:
        """Warns that an op has no rule and is computed whole on every rank (``axes`` is None), or that its functions
        cannot be split over ``axes``; raises RuleError instead if ``strict``. If nothing is gathered for the op, there
        is no warning.
        """
        record = ir.info(node)
        gathered = [
            x for x in operands_of(node) if (ir.layout(x).axes if axes is None else set(axes) & {*ir.layout(x).bound})
        ]
        moved = sum(ir.value(x).itemsize * ir.layout(x).numel for x in gathered)
        over = f" along {', '.join(sorted(axes, key=self.mesh.order))}" if axes else ""
        why = f"no rule for {written_op(node.target) or node.target} ({record.name})"
        if axes is not None:
            why = f"{record.name} cannot be split{over}, as its functions need the values of all ranks at once"
        text = f"{why}: computed whole on every rank{over}, {moved} bytes gathered"
        if self.problem.strict and (moved or axes is None):
            fix = "shardc.register_rule(op, ...) or strict=False" if axes is None else "strict=False"
            raise RuleError(text, source=record.origin.source, fix=fix)
        if moved:
            fix = "\n  fix: write one expert as a function under @shardc.experts" if "grouped_mm" in text else ""
            warnings.warn(ShardcWarning(f"{text}\n  source: {record.origin.source}{fix}"), stacklevel=2)

    # --- layouts at the graph's boundary

    def _forward_outputs(self) -> dict[fx.Node, Layout]:
        """Returns forward output -> the layout in which it leaves the graph. Also writes the layouts of the tangents,
        which follow from these.

        It runs after all of the forward's ops and before the first of the backward, which reads the tangents. An output
        stays split over batch axes only, unless the plan says otherwise.
        """
        split: set[str] = set()  # axes that split any output
        layouts: dict[int, Layout] = {}  # by index of the output
        wanted: dict[fx.Node, Layout] = {}
        for role, node in ir.outputs(self.graph):
            if not isinstance(node, fx.Node) or role.kind == "grad":
                continue
            natural = ir.layout(node).without_partial()  # pending reductions are done before an output leaves
            if role.kind == "output":
                keep = natural.unbind(a for a in natural.bound if a not in self.problem.batch_axes)
                layout, _ = self.problem.output_layout(role.index, role.name, keep)
                layouts[role.index] = layout
                split.update(layout.bound)
            else:  # not a result of the model, such as a buffer's new value: each rank gets all of it
                layout = Layout.whole(self.mesh, ir.value(node).shape)
            wanted[node] = layout
        # Along an axis that splits only other outputs, the tangent of an output is one term on each rank. Not along the
        # axis of time (microbatches), over which a rank adds up by itself.
        summed = [a for a in self.problem.batch_axes if a in split and a != self.mesh.time]
        op = "avg" if self.problem.reduce == "mean" else "sum"
        for node in ir.placeholders(self.graph, "tangent"):
            base = layouts[ir.role(node).index]
            pending = [(axis, op) for axis in summed if axis not in base.bound]
            ir.set_info(node, ir.info(node).at(base.replace(partial=pending)))
        return wanted

    def _grad_outputs(self) -> dict[fx.Node, Layout]:
        """Returns gradient -> the layout in which it leaves the graph, after all ops are decided.

        A parameter's gradient gets the layout that the parameter is stored in, without the reductions that ``deferred``
        postpones; an input's gradient gets the layout of the input.
        """
        tensors = [n for n in ir.placeholders(self.graph, "input") if ir.is_tensor(n)]
        inputs = {ir.role(node).index: ir.layout(node) for node in tensors}
        wanted: dict[fx.Node, Layout] = {}
        for role, node in ir.outputs(self.graph):
            if role.kind != "grad" or not isinstance(node, fx.Node):
                continue
            stored = self.problem.grad_layouts.get(role.name)
            if stored is None:  # the gradient of an input
                wanted[node] = inputs[role.index]
            else:
                wanted[node] = self.problem.deferred.layout(role.name, stored, ir.layout(node)) or stored
        return wanted

    # --- backward sweep

    def _sweep_back(self) -> None:
        """Sweeps back from the outputs: if all users of a value want the same slice of it, lets its op compute only
        that slice, unless the step becomes slower.
        """
        for node in reversed(self.graph.nodes):
            needs = ir.info(node).needs if node.op == "call_function" else None
            if needs is None or node.target is ops.pad or not ir.is_tensor(node):
                continue
            target = self._wanted_slice(node)  # the layout of the slice
            call = call_of(node)
            spec, work = spec_of(call), Work.of(call)
            if target is None or spec is None:
                continue
            sliced = from_results(spec, target)
            if sliced is None:
                continue
            operands, itemsize = operands_of(node), ir.value(node).itemsize
            now = Strategy(needs, (ir.layout(node),))
            # Seconds that the step becomes shorter: in reshards of operands, in those of the result, in compute.
            saved = self._reshard_seconds(operands, needs) - self._reshard_seconds(operands, sliced.operands)
            saved += redistribute.seconds(ir.layout(node), target, itemsize, self.cost)  # its uses do not reshard
            saved += compute_seconds(spec, now, work, self.cost)
            saved -= compute_seconds(spec, sliced, work, self.cost)
            user_changes = self._changes_of_users(node, target)
            if user_changes is not None and sum(price for _, _, price in user_changes) <= saved:
                self._decide(node, sliced)
                for user, strategy, _ in user_changes:
                    self._decide(user, strategy)

    def _wanted_slice(self, node: fx.Node) -> Layout | None:
        """Returns the layout that users of ``node`` want instead of its own, if it is the same for all and is reached
        by local slices only; else None.
        """
        current = ir.layout(node)
        wants = set()
        for user in node.users:
            if user.op == "output":
                wants.add(self.wanted[node])
                continue
            if user.target is ops.reshard:  # a tag, pinned by the plan
                wants.add(ir.layout(user))
                continue
            needs = ir.info(user).needs
            if needs is None:
                return None
            wants.update(w for x, w in zip(operands_of(user), needs, strict=True) if x is node)
        # Users of the present layout do not prevent a slice: `_changes_of_users` finds them another strategy.
        wants.discard(current)
        if len(wants) != 1 or current.partial:
            return None
        (want,) = wants
        # An output that leaves in the present layout has to be computed whole anyway.
        if want.partial or (self.wanted.get(node) == current):
            return None
        steps = redistribute.steps(current, want, ir.value(node).itemsize, self.cost)
        return want if all(step.kind == "shard" for step in steps) else None

    def _changes_of_users(self, node: fx.Node, target: Layout) -> list[tuple[fx.Node, Strategy, float]] | None:
        """Returns what users of ``node`` must change if it gets layout ``target``: (user, new strategy, extra seconds)
        for each user that does not read it in this layout yet. Returns None if one of them cannot.
        """
        out = []
        for user in node.users:
            if user.target is ops.reshard and ir.layout(user) != target:  # a tag, pinned to another layout
                return None
            needs = None if user.op == "output" else ir.info(user).needs
            if needs is None or target in [w for x, w in zip(operands_of(user), needs, strict=True) if x is node]:
                continue
            spec = spec_of(call_of(user)) if hasattr(user.target, "_schema") else None
            if spec is None or not ir.is_tensor(user):
                return None
            operands = operands_of(user)
            layouts = tuple(target if x is node else want for x, want in zip(operands, needs, strict=True))
            fitting = [s for s in strategies(spec, layouts) if s.operands == layouts]
            if not fitting:
                return None
            # The user's result changes, too; at most, it is resharded to the layout that it has now.
            current, itemsize = ir.layout(user), ir.value(user).itemsize
            price = redistribute.seconds(fitting[0].results[0], current, itemsize, self.cost)
            out.append((user, fitting[0], price))
        return out

    def _reshard_seconds(self, operands: Sequence[fx.Node], needs: Sequence[Layout]) -> float:
        """Returns the seconds to reshard ``operands`` to the layouts ``needs``."""
        return sum(
            redistribute.seconds(ir.layout(x), want, ir.value(x).itemsize, self.cost)
            for x, want in zip(operands, needs, strict=True)
        )


def _last_before_output(node: fx.Node) -> fx.Node:
    """Follows ``node`` to its only user, and so on; returns the last node, which the output reads."""
    (user,) = node.users
    return node if user.op == "output" else _last_before_output(user)


def _checked_spec(node: fx.Node, call: Call) -> Spec | None:
    """Returns the `Spec` of the op ``node`` by its rule, None if it has no rule. If the rule does not fit the op's
    shapes, the error names the op's source line.
    """
    try:
        return spec_of(call)
    except RuleError as error:
        source = ir.info(node).origin.source or None
        raise RuleError(error.what, source=source, fix=error.fix) from error


def _grad_targets(graph: fx.Graph, compute: Mapping[str, Layout]) -> dict[fx.Node, Layout | None]:
    """Finds the nodes that linear ops carry to the gradient of one parameter and to nothing else. Returns node -> the
    layout from which that gradient gets the parameter's compute layout without a reshard; None if it cannot be derived.

    Args:
        compute: parameter -> its compute layout.
    """
    grads = {
        node: compute.get(role.name)
        for role, node in ir.outputs(graph)
        if role.kind == "grad" and isinstance(node, fx.Node)
    }
    targets: dict[fx.Node, Layout | None] = {}
    # From the outputs back: a node is in ``targets`` if its only user is.
    for node in reversed(graph.nodes):
        if node.op != "call_function" or len(node.users) != 1 or not ir.is_tensor(node):
            continue
        (user,) = node.users
        if user.op == "output":
            if node in grads:
                target = grads[node]
                targets[node] = target if target is not None and target.shape == ir.value(node).shape else None
        elif user.target is ops.pad and user in targets:
            # The compute layout has the parameter's own shape, as the gradient has before it is padded.
            targets[node] = grads[_last_before_output(user)]
        elif user in targets and hasattr(user.target, "_schema"):
            spec = spec_of(call_of(user))
            positions = frozenset(i for i, x in enumerate(operands_of(user)) if x is node)
            # Only a linear op passes on a partial sum, so that the reduction can wait until the gradient is complete.
            if spec is None or not (any(positions <= s for s in spec.linear) or carries(spec, "sum", positions)):
                continue
            target = targets[user]
            back = None if target is None else from_results(spec, target)
            targets[node] = None if back is None else back.operands[min(positions)]
    return targets
