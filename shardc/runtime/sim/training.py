"""`Simulation`: training steps of all ranks of a small mesh in one process, without a process group."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cache, partial
from typing import Any, cast

import torch
import torch.utils._pytree as pytree
from torch import Tensor, nn

from shardc._compat import PyTree
from shardc.custom_ops.expert_ops import noting
from shardc.custom_ops.random import draw_key
from shardc.errors import InputError, LayoutError
from shardc.ir.executable import BACKWARD, FORWARD, Executable, Half, Port
from shardc.ir.layout import Layout
from shardc.ir.mesh import Mesh
from shardc.runtime.border import counter_of, modified
from shardc.runtime.inputs import check_kinds, targets_last
from shardc.runtime.loops import Argument, Loops, Microstep, Results
from shardc.runtime.routing import Loads, check_loads, loads_of
from shardc.runtime.shards import flat_index, same
from shardc.runtime.sim.lockstep import Lockstep, PerRank
from shardc.runtime.sim.pipeline_ranks import run_pipeline_step
from shardc.runtime.stage_loops import StageLoops
from shardc.runtime.storage import cut, shard_tensor


class Simulation:
    """Runs all ranks of an abstract mesh in this process, collectives included; takes *global* inputs.

    Args:
        module: result of `shardc.compile` for an abstract `Mesh`, with real parameters.

    Attributes:
        params: name -> padded local tensor of each rank.
        grads: name -> padded local gradient of each rank, after `backward`.
        buffers: name -> buffer of each rank.
        module, state: the module, and its ``module.shardc``.
        ranks: runs graphs on all ranks of ``mesh``.
        storages: name of a parameter -> its storage layout.

    Raises:
        InputError: the module is not compiled.
        LayoutError: a parameter is on ``meta``.
    """

    def __init__(self, module: nn.Module) -> None:
        if not hasattr(module, "shardc"):
            what = f"{type(module).__name__} is not from shardc.compile"
            raise InputError(what, fix="compile it for an abstract shardc.Mesh first")
        if (empty := next((name for name, p in module.named_parameters() if p.is_meta), None)) is not None:
            raise LayoutError(
                f"parameter {empty!r} is on meta and has no values",
                fix="build the model on the CPU, or give it values before shardc.compile: model.to_empty(device='cpu')",
            )
        self.module = module
        self.state = cast(Any, module.shardc)
        self.mesh: Mesh = self.state.spec.mesh
        self.ranks = Lockstep(self.mesh)
        self.storages: dict[str, Layout] = self.state.spec.storages
        # Global shapes without padding; a dim that the axes do not divide is padded in its layout.
        self._shapes = {name: p.shape for name, p in module.named_parameters()}
        self.params: dict[str, list[Tensor]] = {
            name: [shard_tensor(p, self.storages[name], rank).clone() for rank in range(self.mesh.ranks)]
            for name, p in module.named_parameters()
        }
        self.buffers: dict[str, list[Tensor]] = {
            name: [b.clone() for _ in range(self.mesh.ranks)] for name, b in module.named_buffers()
        }
        self.grads: dict[str, list[Tensor]] = {}
        # Of the last forward: program, and what its backward takes. None if no backward can follow.
        self._saved: tuple[Executable, dict[str, PerRank] | Microstep] | None = None
        self._loads: Loads = []  # rows that layers of experts got, not checked against their capacity yet
        # (index, tensor with its version counter, version) of each output that a backward reads.
        self._changes: list[tuple[int, Tensor, int]] = []

    def __call__(self, *args: PyTree, grad: bool = True, **kwargs: PyTree) -> PyTree:
        """Runs the model on global inputs, and returns global outputs. A `backward` may follow if the call has
        ``grad=True``.
        """
        if self.state.around is not None:  # a function around the module's forward
            raise InputError(
                "the module's forward was wrapped after compile, and a simulation runs programs alone",
                fix="wrap the model's forward before shardc.compile",
            )
        # The loss's targets may be passed by name; programs take them behind the other inputs.
        args, kwargs = targets_last(self.state.params.view, args, kwargs, self.state.spec.targets or ())
        check_kinds(self.state.cache.input_names(args, kwargs), pytree.tree_leaves((args, kwargs)), values=True)
        with torch.set_grad_enabled(grad and torch.is_grad_enabled()):
            program: Executable = self.state.cache.program_for(args, kwargs)
        leaves = [x for x in pytree.tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
        fed = {name: self.ranks.shard(x, layout) for (name, layout), x in zip(program.inputs, leaves, strict=True)}
        if program.microbatches > 1:
            # Forward and backward of each microbatch in turn: with a loss, its gradients are computed here already.
            step = self._run_microbatches(program, fed, grad)
            self._check_loads()
            results = [step.output(role) for role in program.outputs]
            self._saved = (program, step) if step.trains else None
        else:
            half, argument = program.step(training=grad)[0], self._arguments(program, fed)
            results = self._run(half, [argument(port, 0) for port in half.takes])
            # In training, the backward checks the loads, as on real ranks; a call without a backward does it here.
            if half.phase != FORWARD:
                self._check_loads()
            # The forward gives the program's outputs, then the values that the backward takes.
            saved = {r.name: x for r, x in zip(half.gives, results, strict=True) if r.kind == "saved" and x is not None}
            self._saved = (program, saved) if half.phase == FORWARD else None
        return self._outputs(program, results[: len(program.outputs)])

    def _outputs(self, program: Executable, results: Sequence[Any]) -> PyTree:
        """Returns the global outputs of a call, and updates the buffers. ``results`` has the value of each of the
        program's outputs on every rank; None for those that are no tensors.
        """
        out: list[object] = []
        for role, constant, result in zip(program.outputs, program.output_values, results, strict=True):
            if role.kind == "buffer":  # its new value, which the caller does not get
                self.buffers[role.name] = list(result)
            elif result is None:
                out.append(constant)
            else:
                assert role.layout is not None
                out.append(self.ranks.assemble(result, role.layout))
        # An output that the model returns twice is one tensor object, as on one device.
        for at, output in enumerate(program.returned):
            out[at] = out[at] if output.same is None else out[output.same]
        # Outputs whose values a backward reads, with their versions of now: `backward` refuses changed ones.
        read = [(at, out[at]) for at, output in enumerate(program.returned) if output.read_by]
        self._changes = [(at, counter_of(x), x._version) for at, x in read if isinstance(x, Tensor)]
        return pytree.tree_unflatten(out, program.output_spec)

    def backward(self, *tangents: Tensor | None) -> None:
        """Runs the backward of the last forward, and adds the gradients of parameters to `grads`.

        Args:
            tangents: gradients of the loss, at global shapes, one for each output that needs one; None for an output
                that the loss does not use. Without any, the loss is the one scalar output. If no output is a scalar,
                it is the sum of all elements of all outputs.

        Raises:
            BackwardError: an output that this backward reads was changed in place.
            InputError: there was no forward, or the number of gradients is wrong, or none are given and several
                outputs are scalars.
        """
        if self._saved is None:
            raise InputError("there is no forward to go backward from", fix="call the simulation with grad=True first")
        for name, param in self.module.named_parameters():
            if param._backward_hooks or param._post_accumulate_grad_hooks:
                raise InputError(
                    f"parameter {name!r} has a hook, which a simulation does not run",
                    fix="remove it, or step the module on the ranks of a DeviceMesh",
                )
        program, saved = self._saved
        # Index of each output that has gradients -> their dtype.
        if isinstance(saved, Microstep):
            dtypes = program.tangents
        else:
            takes = program.half(BACKWARD).takes
            dtypes = {port.role.index: port.example.dtype for port in takes if port.role.kind == "tangent"}
        shards = self._tangent_shards(program, dtypes, tangents)  # index of an output -> gradient on every rank
        # Autograd on one device refuses outputs that were changed in place, if a used output's backward reads them.
        for at, counter, version in self._changes:
            if counter._version != version and not shards.keys().isdisjoint(program.returned[at].read_by):
                raise modified(at, counter, version)
        if isinstance(saved, Microstep):
            grads = saved.grads(shards)
        else:
            # If only some outputs have gradients, the backward is a graph of its own.
            half = program.half(frozenset(shards) if len(shards) < len(dtypes) else BACKWARD)
            feed: list[Any] = [
                shards[port.role.index] if port.role.kind == "tangent" else saved[port.name] for port in half.takes
            ]
            results = self._run(half, feed)
            self._check_loads()
            grads = {(role.kind, role.name): x for role, x in zip(half.gives, results, strict=True)}
        # Gradients of inputs are left out.
        for (kind, name), grad in grads.items():
            if kind == "grad" and grad is not None and name in self.params:
                before = self.grads.get(name)
                self.grads[name] = list(grad) if before is None else [a + b for a, b in zip(before, grad, strict=True)]

    def _tangent_shards(
        self, program: Executable, dtypes: Mapping[int, torch.dtype], tangents: Sequence[Tensor | None]
    ) -> dict[int, PerRank]:
        """Returns the gradients of outputs that `backward` was given, or those of its default loss: index of an output
        -> shard per rank. Outputs that the loss does not use are left out.

        Args:
            dtypes: index of each output that has a gradient -> dtype of the gradient.
            tangents: the arguments of `backward`.
        """
        if tangents and len(tangents) < len(dtypes):
            raise InputError(
                f"{len(dtypes)} outputs have gradients, but {len(tangents)} were given",
                fix="pass one for each, None for an output that the loss does not use",
            )
        # A gradient is split as its output.
        layouts = {role.index: role.layout for role in program.outputs if role.kind == "output" and role.layout}
        scalars = [index for index in dtypes if layouts[index].ndim == 0]
        if not tangents and len(scalars) > 1:
            raise InputError(
                f"{len(scalars)} of the outputs are scalars, and any of them may be the loss",
                fix="pass a gradient for each output that has one: torch.tensor(1.0) for the loss, None for the others",
            )
        if tangents:
            gradients = dict(zip(dtypes, tangents, strict=False))
        else:  # the derivative of the default loss: 1 for the one scalar, or for all elements of all outputs
            gradients = {at: torch.ones(layouts[at].shape, dtype=dtypes[at]) for at in scalars or dtypes}
        return {index: self.ranks.shard(x, layouts[index]) for index, x in gradients.items() if x is not None}

    def _run_microbatches(self, program: Executable, inputs: dict[str, PerRank], grad: bool) -> Microstep:
        """Runs a step of ``program`` in microbatches, on shards of the inputs by name. Returns outputs and gradients
        as a `Microstep`. ``grad``: whether a backward may follow.
        """
        argument = self._arguments(program, inputs)

        def map_ranks(function: Callable[..., Tensor], *values: PerRank) -> PerRank:
            """Applies ``function`` rank by rank to values that have a tensor per rank."""
            return PerRank(function(*tensors) for tensors in zip(*values, strict=True))

        def run_step(program: Executable, training: bool, tangents: Mapping[int, Any]) -> Results:
            """Runs the graphs of all microbatches, as `Loops.run_step`. A `Microstep` may call it again."""
            if program.stage_ranks:  # a pipeline: the ranks of stages run different graphs, in turn
                loops = partial(StageLoops, program, self._run, argument, inputs, map_ranks)
                return run_pipeline_step(program, loops, training, tangents)
            return Loops(program, self._run, argument, inputs, map_ranks).run_step(training, tangents)

        return Microstep(program, run_step, grad, map_ranks, lambda x: PerRank([x] * self.mesh.ranks))

    def _arguments(self, program: Executable, inputs: dict[str, PerRank]) -> Argument:
        """Returns a function (port, microbatch) -> argument of the graphs of ``program``, as a value per rank. It is
        for one call on ``inputs`` (by name), and also serves a repeated run of that call.
        """
        # Buffers of now: a repeated run must not read those that the call has changed.
        ranks, buffers = range(self.mesh.ranks), dict(self.buffers)
        timed = self.mesh.timed(program.microbatches)  # the mesh with an axis of microbatches
        key = cache(draw_key)  # drawn once: the same for all ranks, microbatches and repeats

        def argument(port: Port, microbatch: int) -> PerRank:
            role = port.role
            if role.kind == "coordinate":  # index along the axes in its name
                # The axis of microbatches is the last, the fastest one of the mesh `timed`.
                places = (rank * program.microbatches + microbatch for rank in ranks)
                return PerRank(torch.tensor([flat_index(timed, tuple(role.name.split(",")), at)]) for at in places)
            if role.kind == "key":
                return PerRank(key() for _ in ranks)
            if role.kind == "input":  # one that is no tensor has the value that was traced
                return inputs.get(role.name, PerRank([port.example] * self.mesh.ranks))
            return PerRank((self.params if role.kind == "param" else buffers)[role.name])

        return argument

    def _run(self, half: Half, feed: list[Any]) -> list[PerRank | None]:
        """Runs the graph ``half`` on all ranks. Arguments (``feed``) and results have one value per rank."""
        with noting() as noted:
            results = self.ranks.run(half.gm, feed)
        if half.is_forward:  # other graphs may run the layers again, as loops before the forward do
            self._loads += loads_of(half.graph, noted, self.mesh.ranks)
        return results

    def _check_loads(self) -> None:
        """Raises InputError if a layer of experts had more rows than its capacity has room for."""
        loads, self._loads = self._loads, []
        check_loads(loads)

    def param(self, name: str) -> Tensor:
        """Returns parameter ``name``, unsharded and without padding. Checks that replicas are equal."""
        return self._whole(self.params[name], name)

    def grad(self, name: str) -> Tensor:
        """Returns the gradient of parameter ``name``, unsharded and without padding. Checks that replicas are equal."""
        return self._whole(self.grads[name], name)

    def buffer(self, name: str) -> Tensor:
        """Returns the buffer ``name``; checks that it is equal on all ranks."""
        first, *rest = self.buffers[name]
        assert all(same(first, other) for other in rest), f"ranks' buffers {name} differ"
        return first

    def optimizers(self, make: Callable[[list[Tensor]], torch.optim.Optimizer]) -> Callable[[], None]:
        """Makes one optimizer per rank, from the rank's local shards of parameters. Returns a function that steps all
        optimizers with the gradients in `grads`, then clears `grads`.
        """
        per_rank = [make([self.params[name][rank] for name in self.params]) for rank in range(self.mesh.ranks)]

        def step() -> None:
            for rank, optimizer in enumerate(per_rank):
                for name, shards in self.params.items():
                    shards[rank].grad = self.grads[name][rank] if name in self.grads else None
                optimizer.step()
            self.grads.clear()

        return step

    def _whole(self, shards: Sequence[Tensor], name: str) -> Tensor:
        """Returns the unsharded tensor, without padding, of the ``shards`` of parameter ``name`` or of its gradient."""
        return cut(self.ranks.assemble(shards, self.storages[name]), self._shapes[name])
