"""ShardedModule: the user's module class, with parameters in storage layout, that runs compiled programs."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
import torch.utils._pytree as pytree
from torch import Tensor, fx, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from shardc.errors import InputError, MeshError
from shardc.ir import graph as ir
from shardc.ir.graph import Role
from shardc.ir.layout import Layout
from shardc.ir.mesh import Mesh
from shardc.ir.tally import group_axes
from shardc.runtime.groups import Groups
from shardc.runtime.initialize import init_weights
from shardc.runtime.inputs import check_inputs, local_input, shard_input
from shardc.runtime.storage import grad_from_padded, padded_local

Lower = Callable[..., Callable[[list[Tensor]], Sequence[Any]]]


class Program(Protocol):
    """A compiled program, as the runtime sees it."""

    mesh: Mesh
    inputs: tuple[tuple[str, Layout], ...]
    outputs: tuple[Role, ...]
    output_values: tuple[Any, ...]
    output_spec: Any
    forward: fx.GraphModule | None
    backward: fx.GraphModule | None
    inference: fx.GraphModule | None


@dataclass
class State:
    """What a `ShardedModule` needs besides its parameters.

    Args:
        mesh: the abstract mesh.
        device_mesh: None for a module that is only analysed or simulated.
        groups: this rank's process groups; None without a device mesh.
        template: the user's module with ``meta`` parameters at global shapes, for capture.
        storages: storage layout of each parameter.
        build: (template, args, kwargs, with_loss) at global shapes -> Program.
        global_shapes: local shapes of the inputs by name -> global shapes, by the plan.
        loss_args: how many arguments the loss takes after the model's own; None without a loss.
        lower: makes a local graph callable.
    """

    mesh: Mesh
    device_mesh: DeviceMesh | None
    groups: Groups | None
    template: nn.Module
    storages: dict[str, Layout]
    build: Callable[..., Program]
    global_shapes: Callable[[Sequence[tuple[str, tuple[int, ...]]]], list[tuple[int, ...]]]
    names: Callable[..., list[str]]
    loss_args: int | None
    lower: Lower
    programs: dict[Any, Program] = field(default_factory=dict)
    explicit: bool = False
    _runners: dict[int, _Runner] = field(default_factory=dict)
    owner: Any = None

    @property
    def rank(self) -> int:
        return self.groups.rank if self.groups is not None else 0

    def with_loss(self, args: Sequence[Any], kwargs: dict[str, Any]) -> bool:
        """Whether a call passes the loss its arguments: its last positional ones, if the model does without them."""
        if not self.loss_args:
            return self.loss_args is not None
        if len(args) < self.loss_args:
            return False
        return _accepts(self.template, args[: -self.loss_args], kwargs)

    def program_for(self, args: Sequence[Any], kwargs: dict[str, Any]) -> Program:
        """The program for global (example) inputs, built if there is none yet."""
        self._sync_template()
        key = self._key(args, kwargs, lambda x: tuple(x.shape))
        if key not in self.programs:
            self.programs[key] = self.build(self.template, args, kwargs, self.with_loss(args, kwargs))
        return self.programs[key]

    def _key(self, args: Sequence[Any], kwargs: dict[str, Any], shape: Callable[[Tensor], tuple[int, ...]]) -> Any:
        leaves, spec = pytree.tree_flatten((tuple(args), dict(kwargs)))
        modes = tuple(m.training for m in self.template.modules())
        grads = tuple(p.requires_grad for p in self.template.parameters())
        flat = tuple((shape(x), x.dtype, x.requires_grad) if isinstance(x, Tensor) else x for x in leaves)
        return flat, spec, modes, grads, self.with_loss(args, kwargs)

    def _sync_template(self) -> None:
        """Carries train and eval mode and ``requires_grad`` over to the template."""
        for mine, theirs in zip(self.owner.modules(), self.template.modules(), strict=True):
            theirs.training = mine.training
        for mine, theirs in zip(self.owner.parameters(), self.template.parameters(), strict=True):
            theirs.requires_grad_(mine.requires_grad)

    def runner(self, program: Program) -> _Runner:
        if id(program) not in self._runners:
            self._runners[id(program)] = _Runner(self, program)
        return self._runners[id(program)]


class ShardedModule(nn.Module):
    """Mixed into the user's class by `shardc.compile`; see there."""

    shardc: State

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """One step on this rank's local shards of the inputs.

        Returns:
            With a loss (and its arguments given), the global loss; else the model's outputs as local shards.

        Raises:
            MeshError: the module was compiled for an abstract mesh.
            InputError: an input whose local shape no program fits.
        """
        state = self.shardc
        if state.groups is None:
            raise MeshError(
                f"the module was compiled for the abstract mesh {state.mesh} and cannot run",
                fix="pass a DeviceMesh to shardc.compile, or step it with shardc.Simulation(module)",
            )
        leaves, spec = pytree.tree_flatten((args, kwargs))
        program = self._program(args, kwargs, leaves, spec)
        tensors = [x for x in leaves if isinstance(x, Tensor)]
        local = [local_input(x, layout, state.device_mesh) for x, (_, layout) in zip(tensors, program.inputs, strict=True)]
        return state.runner(program)(local)

    def lower(self, *args: Any, **kwargs: Any) -> Any:
        """Compiles for example inputs at *global* shapes (any device, ``meta`` too); returns the `Program`.

        After this the module takes inputs of the lowered signatures only.
        """
        self.shardc.explicit = True
        return self.shardc.program_for(args, kwargs)

    def shard_inputs(self, *args: Any, **kwargs: Any) -> Any:
        """Cuts global inputs (a tensor, or trees of them) into this rank's shards.

        Returns:
            The one shard for one argument, else a tuple; with keywords ``(args, kwargs)``.
        """
        state = self.shardc
        leaves, spec = pytree.tree_flatten((args, kwargs))
        named = zip(state.names(state.template, args, kwargs), leaves, strict=True)
        shapes = [(name, tuple(x.shape)) for name, x in named if isinstance(x, Tensor)]
        layouts = iter(state.build.input_layouts(shapes))  # type: ignore[attr-defined]
        cut = [shard_input(x, next(layouts), state.rank) if isinstance(x, Tensor) else x for x in leaves]
        out_args, out_kwargs = pytree.tree_unflatten(cut, spec)
        if out_kwargs:
            return out_args, out_kwargs
        return out_args[0] if len(out_args) == 1 else out_args

    def init_weights(self, fn: Callable[[nn.Module], Any] | None = None) -> None:
        """Initialises parameters and buffers shard by shard, equal to the same on one device with this seed.

        Args:
            fn: applied to every module as ``module.apply(fn)``; None calls ``reset_parameters()`` where there is one.
        """
        init_weights(self, self.shardc.template, fn)

    def _program(self, args: Any, kwargs: Any, leaves: list[Any], spec: Any) -> Program:
        state = self.shardc
        state._sync_template()
        names = state.names(state.template, args, kwargs)
        tensors = [(name, x) for name, x in zip(names, leaves, strict=True) if isinstance(x, Tensor)]
        if state.explicit:
            return _lowered(state, args, kwargs, tensors)
        local = [(n, tuple(x.shape)) for n, x in tensors if not isinstance(x, DTensor)]
        shapes = iter(state.global_shapes(local))
        whole = [tuple(x.shape) if isinstance(x, DTensor) else next(shapes) if isinstance(x, Tensor) else None for x in leaves]
        examples = [
            torch.empty(shape, dtype=x.dtype, device="meta").requires_grad_(x.requires_grad) if shape is not None else x
            for x, shape in zip(leaves, whole, strict=True)
        ]
        example_args, example_kwargs = pytree.tree_unflatten(examples, spec)
        return state.program_for(example_args, example_kwargs)


def _lowered(state: State, args: Any, kwargs: Any, tensors: list[tuple[str, Tensor]]) -> Program:
    """The lowered program that fits local ``tensors``.

    Raises:
        InputError: none does.
    """
    wanted = state._key(args, kwargs, lambda x: ())
    last: InputError | None = None
    for key, program in reversed(state.programs.items()):
        flat = tuple(((), *k[1:]) if isinstance(k, tuple) else k for k in key[0])
        if (flat, *key[1:]) != wanted:
            continue
        try:
            check_inputs([n for n, _ in tensors], [x for _, x in tensors], [layout for _, layout in program.inputs])
            return program
        except InputError as error:
            last = last or error
    raise last or InputError(
        "no lowered program takes inputs of these kinds, dtypes and constants in this mode",
        fix="call module.lower(...) with examples like them, at global shapes",
    )


def _accepts(model: nn.Module, args: Sequence[Any], kwargs: dict[str, Any]) -> bool:
    try:
        inspect.signature(model.forward).bind(*args, **kwargs)
    except TypeError:
        return False
    return True


class _Runner:
    """Runs one program on this rank; graphs are lowered when first needed."""

    def __init__(self, state: State, program: Program) -> None:
        self.state, self.program = state, program
        self._compiled: dict[str, Callable[[list[Tensor]], Sequence[Any]]] = {}
        owner = state.owner
        self.params = dict(owner.named_parameters())
        self.buffers = dict(owner.named_buffers())

    def __call__(self, inputs: list[Tensor]) -> Any:
        train = torch.is_grad_enabled() and self.program.forward is not None
        if train:
            graph = self.program.forward
            assert graph is not None
            feed = self._feed(graph, inputs)
            results = list(_Step.apply(self, len(self.program.outputs), *feed))
        else:
            graph = self.program.inference
            assert graph is not None
            with torch.no_grad():
                results = list(self.compiled("inference")(self._local(graph, self._feed(graph, inputs))))
        out = []
        for role, constant, result in zip(self.program.outputs, self.program.output_values, results, strict=False):
            if role.kind == "buffer":
                with torch.no_grad():
                    self.buffers[role.name].copy_(result)
            elif role.kind == "output":
                out.append(result if isinstance(result, Tensor) else constant)
        return pytree.tree_unflatten(out, self.program.output_spec)

    def compiled(self, which: str) -> Callable[[list[Tensor]], Sequence[Any]]:
        if which not in self._compiled:
            graph = getattr(self.program, which)
            groups = self.state.groups
            assert groups is not None
            _use_groups(graph, groups)
            self._compiled[which] = self.state.lower(
                graph, backward=which == "backward", inference=which == "inference"
            )
        return self._compiled[which]

    def _feed(self, graph: fx.GraphModule, inputs: list[Tensor]) -> list[Any]:
        """What the graph takes, parameters as DTensors."""
        given = dict(zip((name for name, _ in self.program.inputs), inputs, strict=True))
        feed: list[Any] = []
        for node in ir.placeholders(graph.graph):
            role = ir.info(node).role
            assert role is not None
            if role.kind == "param":
                feed.append(self.params[role.name])
            elif role.kind == "buffer":
                feed.append(self.buffers[role.name])
            elif role.kind == "coordinate":
                assert self.state.groups is not None
                feed.append(self.state.groups.coordinate(tuple(role.name.split(","))))
            else:
                feed.append(given[role.name] if role.name in given else node.meta["val"])
        return feed

    def _local(self, graph: fx.GraphModule, feed: Sequence[Any]) -> list[Any]:
        """The same with each parameter's padded local tensor."""
        out = []
        for node, x in zip(ir.placeholders(graph.graph), feed, strict=True):
            role = ir.info(node).role
            is_param = role is not None and role.kind == "param"
            out.append(padded_local(x, self.state.storages[role.name]) if is_param and role is not None else x)
        return out


class _Step(torch.autograd.Function):
    """A forward that remembers what its backward needs."""

    @staticmethod
    def forward(ctx: Any, runner: _Runner, count: int, *feed: Any) -> tuple[Any, ...]:
        graph = runner.program.forward
        backward = runner.program.backward
        assert graph is not None and backward is not None
        local = runner._local(graph, feed)
        by_name = dict(zip((n.name for n in graph.graph.find_nodes(op="placeholder")), local, strict=True))
        results = runner.compiled("forward")(list(local))
        names = [n.name if isinstance(n, fx.Node) else "" for n in ir.output_node(graph.graph).args[0]]
        by_name.update(zip(names, results, strict=True))
        ctx.runner = runner
        ctx.saved = {n.name: by_name[n.name] for n in backward.graph.find_nodes(op="placeholder") if n.name in by_name}
        ctx.feed = feed
        outputs = tuple(results[:count])
        plain = [x for x, role in zip(outputs, runner.program.outputs, strict=True)
                 if isinstance(x, Tensor) and (role.kind == "buffer" or not x.is_floating_point())]  # fmt: skip
        ctx.mark_non_differentiable(*plain)
        return outputs

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *tangents: Any) -> tuple[Any, ...]:
        runner: _Runner = ctx.runner
        graph = runner.program.backward
        assert graph is not None
        if ctx.saved is None:
            raise RuntimeError("backward was already run for this step; what it needs is freed. Run the forward again")
        by_index = {r.index: t for r, t in zip(runner.program.outputs, tangents, strict=True) if r.kind == "output"}
        local = []
        for node in ir.placeholders(graph.graph):
            role = ir.info(node).role
            if role is not None and role.kind == "tangent":
                given, val = by_index[role.index], node.meta["val"]
                if given is None:
                    given = torch.zeros(val.shape, dtype=val.dtype, device=val.device)
                local.append(given.contiguous())
            else:
                local.append(ctx.saved[node.name])
        ctx.saved = None
        results = runner.compiled("backward")(local)
        grads = {(r.kind, r.name): g for (r, _), g in zip(ir.outputs(graph.graph), results, strict=True)}
        forward = runner.program.forward
        assert forward is not None
        out: list[Any] = [None, None]
        for node, x in zip(ir.placeholders(forward.graph), ctx.feed, strict=True):
            role = ir.info(node).role
            grad = grads.get(("grad", role.name)) if role is not None else None
            if role is not None and grad is not None and role.kind == "param":
                grad = grad_from_padded(grad, x)
            out.append(grad if role is not None and role.kind in ("param", "input") else None)
        return tuple(out)


def _use_groups(graph: fx.GraphModule, groups: Groups) -> None:
    """Makes the process groups that ``graph`` names and writes the registered names in."""
    mesh = groups.mesh
    named = {
        x: axes
        for node in graph.graph.nodes
        if node.op == "call_function"
        for x in (*node.args, *node.kwargs.values())
        if isinstance(x, str) and (axes := group_axes(x, mesh)) is not None
    }
    rename = groups.add(named.values())
    for node in graph.graph.nodes:
        if node.op == "call_function":
            node.args = tuple(rename[x] if isinstance(x, str) and x in named else x for x in node.args)
            node.kwargs = {k: rename[x] if isinstance(x, str) and x in named else x for k, x in node.kwargs.items()}
    graph.recompile()
