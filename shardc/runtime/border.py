"""Outputs of a compiled forward, and values saved for backward. In-place changes of outputs are as safe as on one
device.

On one device, changing an output in place is harmless if no backward reads it; otherwise autograd's version counter
makes the backward raise. A compiled backward may read other tensors: for example, it may recompute a value from an
output. Such an output is copied. An output that only one device's backward reads is checked by its version counter.
`as_dtensors` wraps outputs as DTensors, which have the same version counters and hooks.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import Node
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor._dtensor_spec import DTensorSpec

from shardc.errors import BackwardError
from shardc.ir import graph as ir
from shardc.ir.executable import BACKWARD, FORWARD, Executable, Half, outputs_text
from shardc.ir.graph import Role
from shardc.ir.returned import Returned
from shardc.runtime.inputs import local_part
from shardc.runtime.read_only import ReadOnly, Shared
from shardc.runtime.storage import GradHooks, parameter_spec
from shardc.runtime.views import Views, memory_of, of_constant, views_of

Changes = list[tuple[int, Tensor, int]]  # (position of an output, its version counter, its version)
Listened = tuple[int, GradHooks, weakref.ref[Tensor]]  # (position of an output, its gradient hooks, the output)


@dataclass(frozen=True)
class SameMemory:
    """Records which tensors share memory with one output in a run on this rank. It is false as a bool if none does.

    Args:
        feed_index: position of an input of the forward.
        first: position of an earlier output.
        saved: names of saved values.
        constant: whether it is a constant of the program.
    """

    feed_index: int | None
    first: int | None
    saved: frozenset[str]
    constant: bool

    def __bool__(self) -> bool:
        return self.feed_index is not None or self.first is not None or bool(self.saved) or self.constant


class Border:
    """Splits the results of one program's graph into outputs and values saved for backward. Makes outputs alias, count
    versions and take hooks as on one device.

    Attributes:
        half: returns a graph of the program by its phase.
        count: number of a forward's outputs (new values of buffers among them). Values saved for backward follow.
        dtensors: whether outputs become DTensors.
    """

    dtensors = False

    def __init__(self, program: Executable) -> None:
        self.program, self.half, self.count = program, program.half, len(program.outputs)
        # Computed at the first run of each graph, as all its runs alias alike.
        self._reads: dict[Half, list[tuple[Role, int]]] = {}  # results of `reads`
        self._shared: dict[Half, dict[int, SameMemory]] = {}  # results of `_same_memory`
        self._views: dict[Half, Views] = {}  # results of `views`
        self._aliasing: dict[Half, dict[int, Returned]] = {}  # half -> position of an output or base -> how it aliases

    @cached_property
    def places(self) -> dict[str, int]:
        """Maps the name of each value saved for backward to its position among the saved values."""
        return {role.name: at for at, role in enumerate(self.half(FORWARD).gives[self.count :])}

    @cached_property
    def needed(self) -> tuple[bool, ...]:
        """One bool per argument of the forward graph: whether autograd's node keeps it for the backward. It keeps
        parameters, whose layout their gradients get, and what the backward graph reads.
        """
        read = {at for _, at in self.reads(self.half(BACKWARD))}
        takes = self.half(FORWARD).takes
        return tuple(port.role.kind == "param" or at in read for at, port in enumerate(takes))

    @cached_property
    def differentiable(self) -> frozenset[int]:
        """Positions, among the forward graph's results, of the outputs that have gradients."""
        if not self.program.trains:
            return frozenset()
        takes = self.half(BACKWARD).takes
        with_tangent = {port.role.index for port in takes if port.role.kind == "tangent"}
        roles = enumerate(self.program.outputs)
        return frozenset(at for at, role in roles if role.kind == "output" and role.index in with_tangent)

    @cached_property
    def _returned(self) -> dict[int, Returned]:
        """Maps the position of each model output among the graph's results to what it aliases on one device
        (`Returned`).
        """
        roles, returned = self.program.outputs, self.program.returned
        return {at: returned[role.index] for at, role in enumerate(roles) if role.kind == "output"}

    def views(self, half: Half, outputs: Sequence[Any], feed: Sequence[Any]) -> Views:
        """Returns which outputs of graph ``half`` are views if the model runs on one device (`Views`). After each run,
        `hand_out` makes them again, as views of the same sources. Cached per graph.
        """
        if half not in self._views:
            views = views_of(self.program, half, self.differentiable, outputs, feed, self.dtensors)
            # A base is in the memory of the outputs that are its views, so the first of them says what it aliases.
            bases = {self.count + at: self._returned[base.of[0]] for at, base in enumerate(views.bases)}
            self._views[half], self._aliasing[half] = views, self._returned | bases
        return self._views[half]

    def without_views(self, half: Half, results: Sequence[Any], feed: Sequence[Any]) -> list[Any]:
        """Prepares the results of an inference graph for `hand_out`: an output that is a view becomes None, and the
        base tensors of views are appended.

        Outputs that share memory here and not on one device are copied.
        """
        outputs = list(results[: self.count])
        outputs = self.views(half, outputs, feed).to_bases(outputs)
        for at, shared in self._same_memory(half, outputs, saved=[], feed=feed).items():
            if self._aliased_tensor(half, at, shared, outputs, feed) is None:
                outputs[at] = outputs[at].clone()
        return self._read_only(half, outputs, feed)

    def hand_out(self, half: Half, outputs: list[Any], feed: Sequence[Any], node: Node | None) -> None:
        """Completes the outputs of a forward graph for the user, in place: makes the outputs that are views (None so
        far), drops the base tensors, and attaches gradient hooks.

        Args:
            half: the forward that has run.
            outputs: its outputs and base tensors (`split_results`), changed in place.
            feed: the arguments of the forward.
            node: autograd node of the step, which keeps the hooks to check; None without gradients.
        """
        views = self._views[half]
        # From now on they raise on reads if the tensor that they are copies of is changed.
        for at in views.read_only:
            if isinstance(outputs[at], ReadOnly):
                outputs[at].shared.note()  # records the version of that tensor
        views.make(outputs, feed)
        if node is not None:
            self._listen(outputs, node)

    def _read_only(self, half: Half, outputs: list[Any], feed: Sequence[Any]) -> list[Any]:
        """Wraps as `ReadOnly` each output that shares memory with another tensor on one device, but not here: a write
        would not reach that tensor. Changes the list ``outputs`` in place, and returns it.
        """
        position_of = {port.role.name: position for position, port in enumerate(half.takes)}
        for at in self._views[half].read_only:
            if not isinstance(outputs[at], Tensor):
                continue
            aliasing = self._aliasing[half][at]
            # The tensor in whose memory it is on one device; None if that is another output, or a constant.
            source = feed[position_of[aliasing.of]] if aliasing.of in position_of else None
            # The error of a write names the output by its index, and other outputs in that memory.
            index, all_outputs = self._index_of(half, at), self.program.returned
            outputs[at] = read_only(outputs[at], aliasing, index, all_outputs, source)
        return outputs

    def _index_of(self, half: Half, at: int) -> int:
        """Returns the index of the user's output at position ``at``; of a base tensor, that of its first view."""
        return self._aliasing[half][at].first if at >= self.count else self.program.outputs[at].index

    def reads(self, half: Half) -> list[tuple[Role, int]]:
        """Returns which arguments of forward the backward graph ``half`` reads, as (role, position in forward's
        arguments): parameters, buffers and inputs.

        Buffers that the program changes are left out: the backward reads a saved copy of them.
        """
        if half not in self._reads:
            takes = self.half(FORWARD).takes
            position = {(port.role.kind, port.role.name): at for at, port in enumerate(takes)}
            read = {(role.kind, role.name): role for role in half.reads.values()}  # each once
            overwritten = self.overwritten.values()
            self._reads[half] = [(role, position[key]) for key, role in read.items() if role.name not in overwritten]
        return self._reads[half]

    @cached_property
    def overwritten(self) -> dict[str, str]:
        """Maps name of a saved value -> name of a buffer, for each buffer that forward changes and backward reads.
        Backward reads the saved value instead.
        """
        changed = {role.name for role in self.program.outputs if role.kind == "buffer"}
        read = self.half(BACKWARD).reads
        return {name: role.name for name, role in read.items() if role.kind == "buffer" and role.name in changed}

    def split_results(self, results: Sequence[Any], feed: Sequence[Any]) -> tuple[list[Any], list[Any]]:
        """Splits the results of a forward graph into (outputs and base tensors, values saved for backward). Outputs
        that are views become None, and are made later from base tensors.

        Saved values hold no output: an output whose graph holds it would never be freed.
        """
        outputs, saved = list(results[: self.count]), list(results[self.count :])
        views = self.views(self.half(FORWARD), outputs, feed)
        outputs = views.to_bases(outputs)
        for name in self.overwritten:  # values in the memory of a buffer, to which its new value is written later
            saved[self.places[name]] = saved[self.places[name]].clone()
        same_memory = self._same_memory(self.half(FORWARD), outputs, saved, feed)
        for at, shared in same_memory.items():
            for name in shared.saved:
                # Another tensor object than the output, which autograd's node must not hold.
                saved[self.places[name]] = saved[self.places[name]].detach()
            outputs[at] = self._aliased_output(at, shared, outputs, feed)
        for at, x in enumerate(outputs):
            if at in self._returned and self._returned[at].same is not None:
                outputs[at] = None  # the same tensor object as an earlier output, which the call then returns twice
            elif at not in same_memory and isinstance(x, Tensor) and x._is_view():
                outputs[at] = x.detach()  # torch refuses in-place changes of views that an autograd function returns
        # A view would hold its base tensor, too.
        saved = [x.detach() if isinstance(x, Tensor) and x._is_view() else x for x in saved]
        return self._read_only(self.half(FORWARD), outputs, feed), saved

    def without_gradients(self, outputs: Sequence[object]) -> list[Tensor]:
        """Returns the tensors in ``outputs`` (of `split_results`) that autograd should mark non-differentiable."""
        # The base tensors follow the outputs. A base has a gradient if an output that is a view of it has one.
        bases = enumerate(self._views[self.half(FORWARD)].bases, self.count)
        with_gradient = self.differentiable.union(at for at, base in bases if base.differentiable)
        return [x for at, x in enumerate(outputs) if isinstance(x, Tensor) and at not in with_gradient]

    def gradients(self, tangents: Sequence[Tensor | None]) -> dict[int, Tensor | None]:
        """Maps the index of each model output to its gradient or None. ``tangents`` has, by position, the gradients of
        the outputs and base tensors that forward returned. The gradient of a base tensor is split among the outputs
        that are its views.
        """
        by_output = {role.index: tangents[at] for at, role in enumerate(self.program.outputs) if role.kind == "output"}
        # A call in microbatches makes no views.
        bases = self._views[self.half(FORWARD)].bases if self._views else ()
        for base, grad in zip(bases, tangents[self.count :], strict=True):
            if grad is not None:
                by_output |= {self.program.outputs[at].index: x for at, x in base.gradients(grad)}
        return by_output

    def watch(self, outputs: Sequence[Any]) -> Changes:
        """Returns (position, version counter, version) of each output that a backward reads, here or on one device, so
        that `check` detects in-place changes.

        The counter is an empty tensor, which does not keep the output's memory alive.
        """
        shared = self._shared[self.half(FORWARD)]
        aliasing = self._aliasing[self.half(FORWARD)].items()
        # One device's backward reads it (`read_by`), or this one does, as it reads a saved value in its memory.
        read = [at for at, alias in aliasing if alias.read_by or (at in shared and shared[at].saved)]
        # A `ReadOnly` output raises on writes itself.
        writable = [at for at in read if isinstance(outputs[at], Tensor) and not isinstance(outputs[at], ReadOnly)]
        return [(at, counter_of(outputs[at]), outputs[at]._version) for at in writable]

    def _listen(self, outputs: Sequence[Any], node: Any) -> None:
        """If several outputs have gradients, gives each of them new gradient hooks (`GradHooks`), which are not called
        with gradient None.

        Those of outputs from which other outputs are computed are appended to ``node.listened``, for `check`.
        """
        # A single output always has a gradient in its backward.
        for at in self.differentiable if len(self.differentiable) > 1 else ():
            if self._returned[at].same is None and outputs[at].grad_fn is not None:
                hooks = _give_hooks(outputs[at])
                if self._returned[at].leads_to:
                    node.listened.append((at, hooks, weakref.ref(outputs[at])))

    def check(self, half: Half, used: frozenset[int], changes: Changes, listened: Sequence[Listened]) -> None:
        """Raises BackwardError if the user changed an output in place, or hooked it, in a way that would give other
        gradients than on one device.

        Args:
            half: the backward graph.
            used: indices of the outputs that have gradients.
            changes: result of `watch` at the forward: (position, tensor with the version counter, version).
            listened: outputs with gradient hooks of their own.

        Raises:
            BackwardError: an output that this backward reads was changed in place, or a hook would see a part of a
                gradient.
        """
        for at, hooks, output in listened:
            # On one device, the gradients of these outputs flow through output `at`, and its hooks see them.
            others = used.intersection(self._returned[at].leads_to)
            if others and (hooks or ((x := output()) is not None and x.retains_grad)):
                raise BackwardError(
                    f"output {self.program.outputs[at].index} of the module has a hook or retains its gradient, and "
                    f"{outputs_text(others)} of this backward are made of it: the gradient inside of a compiled module "
                    "is not computed by itself",
                    fix="register a backward hook on the module that computes it, or return what the loss needs of it "
                    "from another call",
                )
        for at, counter, before in changes:
            if counter._version == before:
                continue
            forward = self.half(FORWARD)
            read_on_one_device = used.intersection(self._aliasing[forward][at].read_by)
            shared = self._shared[forward].get(at)
            saved = shared.saved if shared is not None else frozenset()  # values in the memory of the output
            read_here = saved.intersection(x.name for x in half.takes)
            if read_on_one_device or read_here:
                raise modified(self._index_of(forward, at), counter, before)

    def _same_memory(
        self, half: Half, outputs: Sequence[Any], saved: Sequence[Any], feed: Sequence[Any]
    ) -> dict[int, SameMemory]:
        """Finds the outputs and base tensors that share memory with an input, an earlier output, a saved value or a
        constant. Returns position -> what shares its memory (`SameMemory`), as found in the first run of graph
        ``half``; cached.
        """
        if half in self._shared:
            return self._shared[half]
        # Memory (address of a storage) -> what is in it. Of several inputs in one memory, the first counts.
        input_at = {memory_of(x): at for at, x in reversed(list(enumerate(feed)))}
        saved_names: dict[int, set[str]] = {}
        for name, at in self.places.items() if saved else ():
            saved_names.setdefault(memory_of(saved[at]), set()).add(name)
        first_output: dict[int, int] = {}
        nodes = [node for _, node in ir.outputs(half.graph)][: self.count]
        aliases = self._shared[half] = {}
        for at, output in self._aliasing[half].items():
            # An output that repeats an earlier one (`same`) is returned as that tensor, so it needs no copy.
            memory = 0 if output.same is not None else memory_of(outputs[at])
            if not memory:  # no tensor, an empty one, or a view that is made later (None)
                continue
            first = first_output.setdefault(memory, at)
            saved_of = frozenset(saved_names.get(memory, ()))
            constant = at < self.count and of_constant(nodes[at])  # a base tensor (from `count` on) has no node
            earlier = first if first < at else None
            shared = SameMemory(feed_index=input_at.get(memory), first=earlier, saved=saved_of, constant=constant)
            if shared:
                aliases[at] = shared
        return aliases

    def _aliased_tensor(
        self, half: Half, at: int, shared: SameMemory, outputs: Sequence[Any], feed: Sequence[Any]
    ) -> Tensor | None:
        """Returns the tensor whose memory output ``at`` shares here and also on one device: the input or earlier output
        that ``shared`` names. None if the two share memory only here.
        """
        aliasing = self._aliasing[half][at]
        if shared.feed_index is not None and aliasing.of is not None:  # `of`: an argument owns its memory on one device
            return local_part(feed[shared.feed_index])
        # `first`: equal for outputs that are in one memory on one device.
        if shared.first is not None and self._aliasing[half][shared.first].first == aliasing.first:
            x: Tensor = outputs[shared.first]
            return x
        return None

    def _aliased_output(self, at: int, shared: SameMemory, outputs: Sequence[Any], feed: Sequence[Any]) -> Tensor:
        """Returns output ``at`` such that the user may change it in place as on one device. The graph returned it in
        the memory of another tensor (``shared``).

        It becomes a view of that tensor if it shares its memory on one device too, else a copy. No copy is needed where
        only saved values share its memory and one device's backward reads it: a change is refused here as there.
        """
        half = self.half(FORWARD)
        out, base = outputs[at], self._aliased_tensor(half, at, shared, outputs, feed)
        if base is not None:
            base_was_copied = memory_of(base) != memory_of(out)  # meanwhile, as an earlier output
            stays = out._is_view() or base_was_copied or base.dtype != out.dtype  # strides keep the dtype
            return out if stays else base.as_strided(out.shape, out.stride(), out.storage_offset())
        # Detached, it has a version counter that `check` reads: a change, which reaches the saved values, is refused.
        shares_saved_only = shared.feed_index is None and shared.first is None and not shared.constant
        one_device_refuses = bool(self._aliasing[half][at].read_by)
        return out.detach() if shares_saved_only and one_device_refuses else out.clone()


def read_only(
    x: Tensor, aliasing: Returned, index: int, all_outputs: Sequence[Returned], source: Tensor | None
) -> ReadOnly:
    """Wraps output ``x`` so that writes to it raise. On one device a write would also change another tensor in the
    same memory; here ``x`` is a copy.

    Args:
        aliasing: how it aliases on one device.
        index: its index.
        all_outputs: how each output aliases there.
        source: the parameter, buffer or input that owns this memory; None if there is none, or it is a constant.
    """
    if aliasing.of is None:
        others = {at for at, other in enumerate(all_outputs) if other.first == aliasing.first} - {index}
        shared = Shared(index, outputs_text(others))
    elif source is None:
        shared = Shared(index, repr(aliasing.of), constant=True)
    else:
        shared = Shared(index, repr(aliasing.of), source=weakref.ref(source), itself=aliasing.itself)
    return ReadOnly.of(x.detach(), shared)


def modified(index: int, counter: Tensor, before: int) -> BackwardError:
    """Returns the error for output ``index`` that was changed in place before its backward. ``counter`` has the
    output's present version, ``before`` is its version when it was returned.
    """
    return BackwardError(
        f"output {index} of the module was modified in place by an inplace operation, and this backward needs the "
        f"values that it was returned with: it is at version {counter._version}; expected version {before}",
        fix="change a copy (out = out * 2 instead of out.mul_(2)), or change it after the backward",
    )


def follow(local: Tensor, x: DTensor, index: int) -> None:
    """Registers ``x``, the DTensor that wraps output ``index``: `Border.check` then detects in-place changes and
    hooks of ``x``, and not only of its local tensor.

    Args:
        local: the output's local tensor, which has the step's autograd node.
    """
    node: Any = local.grad_fn
    if not hasattr(node, "listened"):  # not the node of a `Step`
        return
    # Index of an output of the model -> its position among the program's, which also has new values of buffers.
    positions = [at for at, role in enumerate(node.runner.program.outputs) if role.kind == "output"]
    position = positions[index]
    # As the local tensor has been registered by `Border.watch` and `Border._listen`.
    if any(at == position for at, _, _ in node.changes):
        node.changes.append((position, counter_of(x), x._version))
    if any(at == position for at, _, _ in node.listened):
        node.listened.append((position, _give_hooks(x), weakref.ref(x)))


def _give_hooks(x: Any) -> GradHooks:
    """Replaces the gradient hooks of ``x``, a result of an autograd node, by an empty `GradHooks`; returns the new
    hooks.
    """
    x._backward_hooks = hooks = GradHooks()
    x.grad_fn._register_hook_dict(x)  # the node then reads this dict, into which later hooks go too
    return hooks


def counter_of(x: Tensor) -> Tensor:
    """Returns an empty tensor that shares the version counter of ``x``."""
    counter = x.detach()  # shares the counter; what follows replaces the memory only
    if isinstance(counter, DTensor):
        counter._local_tensor = counter._local_tensor.new_empty(0)
    else:
        counter.data = x.new_empty(0)
    return counter


def as_dtensors(outputs: Sequence[object], roles: Sequence[Role], device_mesh: DeviceMesh) -> list[object]:
    """Wraps the tensors among ``outputs`` as DTensors in the layouts of ``roles``; other values are returned as they
    are.

    A DTensor gradient is brought to the output's layout in the backward, pending sums reduced. It is the gradient of
    one global loss, so the plan's ``reduce`` (for losses that each rank computes) does not apply.

    Args:
        outputs: flat outputs of a call, at the local shapes of ``roles``, which are of kind "output".

    Raises:
        LayoutError: DTensor placements cannot express a layout.
    """
    out: list[object] = []
    wrapped: dict[int, DTensor] = {}  # id of an output -> its DTensor
    for value, role in zip(outputs, roles, strict=True):
        # An output that is returned twice becomes one DTensor.
        if isinstance(value, Tensor) and id(value) not in wrapped:
            assert role.layout is not None
            spec = parameter_spec(role.layout, role.layout.shape, value.dtype, device_mesh)
            wrapped[id(value)] = _ToDTensor.apply(value, spec)
            follow(value, wrapped[id(value)], role.index)
        out.append(wrapped.get(id(value), value))
    return out


class _ToDTensor(torch.autograd.Function):
    """Autograd function that wraps a local tensor as a DTensor. Backward returns the local tensor of the DTensor's
    gradient.
    """

    @staticmethod
    def forward(ctx: Any, local: Tensor, spec: DTensorSpec) -> Tensor:
        """Wraps a view of ``local``. Integers get no gradient."""
        ctx.spec = spec
        if not (local.is_floating_point() or local.is_complex()):
            out = DTensor(local.view_as(local), spec, requires_grad=False)
            ctx.mark_non_differentiable(out)
            return out
        out = DTensor(local.view_as(local), spec, requires_grad=local.requires_grad)
        # A view, which torch refuses to change in place: that would not change the tensor that `local` is a view of.
        return out.view_as(out) if local._is_view() else out

    @staticmethod
    def backward(ctx: Any, grad: DTensor) -> tuple[Tensor, None]:
        # The gradient of a term of a pending sum is that of the sum, which every rank needs whole.
        placements = [Replicate() if p.is_partial() else p for p in ctx.spec.placements]
        return grad.redistribute(placements=placements).to_local(), None
