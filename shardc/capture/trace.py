"""Captures a module (and its loss) as one joint forward-backward FX graph at global shapes.

Dynamo traces the module without graph breaks and AOTAutograd differentiates it, under fake tensors: no tensor is
materialised, and the model may be on ``meta``. The graph's placeholders are parameters, buffers and inputs by name,
then one tangent for each output that requires a gradient.
"""

from __future__ import annotations

import contextlib
import inspect
import logging
import warnings
from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from enum import Enum
from functools import partial
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import Tensor, fx, nn
from torch._decomp import get_decompositions
from torch._dynamo.functional_export import dynamo_graph_capture_for_export
from torch._functorch import aot_autograd
from torch._subclasses.fake_tensor import FakeTensorMode

from shardc._compat import PyTree, dynamo_captures, traced_code
from shardc.capture.annotate import OUTPUT, PREFIX, SAME, annotate
from shardc.capture.capture_errors import (
    capture_error,
    check_dtypes,
    check_result,
    is_explained,
    may_run,
    refuse_higher_order,
    refuse_sparse,
)
from shardc.capture.causal_convolutions import pad_at_the_begin
from shardc.capture.decompositions import FROM_TORCH, OWN, eager_dropout, fake_like, numbers_as_tensors, without_strides
from shardc.capture.dtypes import UNCHANGED, Dtypes, ModuleDtypes
from shardc.capture.dynamo_reads import expressed, memories_of, reads_of, recorded
from shardc.capture.functions import functions_as_ops, loop_gradients
from shardc.capture.lookups import lookups_by_place
from shardc.capture.markers import Tag, mark, tagged
from shardc.capture.queried_states import recorded_states, value_numbers
from shardc.capture.raises import without_raising
from shardc.capture.randomness import random_decompositions, refuse_draws, without_random_numbers
from shardc.capture.replacements import traceable_functions, traceable_layers
from shardc.capture.running import Run, warn_of_unseen_reads
from shardc.capture.sequence_loops import scan_loops
from shardc.capture.side_effects import (
    assigned,
    changed_arguments,
    changed_reads,
    changes_recorded,
    prints,
    refuse_hooks,
    side_effects,
)
from shardc.capture.written_out import write_out
from shardc.errors import CaptureError, InputError, ShardcError, ShardcWarning
from shardc.ir.clone import clone_tree
from shardc.ir.code import is_plain
from shardc.ir.guards import GRAD_MODE, Constant, Read, Reads, argument_scope
from shardc.ir.inner import InnerTensors, first_places, unflatten
from shardc.ir.kinds import as_plain
from shardc.ir.returned import Memory, Returned, returned
from shardc.ir.text import leaf_paths
from shardc.logs import timed


def as_module(function: Callable[..., PyTree]) -> nn.Module:
    """Wrap ``function`` as a module that calls it; the module has its name and signature."""

    def forward(self: nn.Module, *args: PyTree, **kwargs: PyTree) -> PyTree:
        return function(*args, **kwargs)

    signature = inspect.signature(function)
    first = inspect.Parameter("self", inspect.Parameter.POSITIONAL_ONLY)
    forward.__signature__ = signature.replace(parameters=[first, *signature.parameters.values()])  # type: ignore[attr-defined]
    name = getattr(function, "__name__", type(function).__name__)
    cls: type[nn.Module] = type(name, (nn.Module,), {"forward": forward, "__module__": function.__module__})
    return cls()


Loss = Callable[..., PyTree]
Retrace = Callable[..., "Reads | None"]  # (constants, with_gradients=True) -> the reads, None for another graph


@dataclass(frozen=True)
class Captured:
    """The joint forward-backward graph of a captured model, and what is needed to call it.

    Args:
        graph: the joint graph; every node has its `Info`, the output node its roles.
        inputs: dotted name of each flat tensor input, in placeholder order.
        constants: the non-tensor leaves of ``(args, kwargs)`` by flat position.
        output_spec: pytree spec of the model's outputs.
        fake_mode: the mode of the graph's fake values.
        reads: the attributes and globals that the trace read, besides tensors.
        returned: for each output, its storage on one device and the backwards that read its values.
    """

    graph: fx.GraphModule
    inputs: tuple[str, ...]
    constants: tuple[tuple[int, object], ...]
    output_spec: pytree.TreeSpec
    fake_mode: FakeTensorMode
    reads: Reads
    returned: tuple[Returned, ...]


class _Root(nn.Module):
    """Root module of a trace, a function of tensors: runs ``model``, then ``loss(output, *extra)`` if there is a loss.

    Non-tensor leaves of the arguments are constants. So are the loss's own tensors. Outputs are marked by the op
    `mark`.
    """

    def __init__(self, model: nn.Module, flat: Sequence[object], spec: pytree.TreeSpec, loss: Loss | None) -> None:
        super().__init__()
        # ``flat`` are the leaves of (args, kwargs), whose structure is ``spec``: constants here, tensors at `_places`.
        self.model, self._flat, self._spec = model, [None if isinstance(x, Tensor) else x for x in flat], spec
        self._places = [at for at, x in enumerate(flat) if isinstance(x, Tensor)]
        self._loss = None if loss is None else (loss,)  # in a tuple: its tensors are not the model's
        self._extra = 0 if loss is None else loss_arity(loss)  # how many of the last args are the loss's

    @property
    def objects(self) -> dict[str, object]:
        """The arguments with parts that may change (functions, objects, modules), by their `argument_scope`. Each call
        of the program has the same objects.
        """
        flat = enumerate(self._flat)
        return {argument_scope(at): x for at, x in flat if not is_plain(x) or isinstance(x, Enum)}

    def forward(self, *tensors: Tensor) -> PyTree:
        """Return the outputs of `run`, each tensor marked by a tag op. A tensor that is returned twice is detached the
        second time.
        """
        out = self.run(tensors)
        # Without a tag, an output that is a view of another, or of an input, would have no separate tangent.
        first: list[Tensor] = []

        def marked(x: Tensor) -> Tensor:
            """Return the output ``x`` passed through a tag op, which marks it."""
            if any(x is before for before in first):  # its gradients go to the first output
                return mark(x.detach(), name=SAME)
            first.append(x)
            return mark(x, name=OUTPUT)

        return pytree.tree_map_only(Tensor, marked, out)

    def run(self, tensors: Sequence[Tensor]) -> PyTree:
        """Run the model on ``tensors``. Return the loss if there is one, else what the model returns."""
        args, kwargs, extra = self.arguments(tensors)
        out = self.model(*args, **kwargs)
        if self._loss is not None:
            out = self._loss[0](out, *extra)
        check_result(out, self._loss is not None)
        return out

    def arguments(self, tensors: Sequence[Tensor]) -> tuple[Sequence[PyTree], dict[str, PyTree], Sequence[PyTree]]:
        """Make the arguments of the traced call from its constants and ``tensors``, its tensors in order. Return (args
        of the model, its kwargs, args of the loss after the model's output).
        """
        flat = list(self._flat)
        for at, x in zip(self._places, tensors, strict=True):
            flat[at] = x
        args, kwargs = pytree.tree_unflatten(flat, self._spec)
        at = len(args) - self._extra
        return args[:at], kwargs, args[at:]


def loss_arity(loss: Loss) -> int:
    """Return the number of arguments that ``loss`` needs after the model's output; see `target_names`."""
    return len(target_names(loss))


def target_names(loss: Loss) -> tuple[str, ...]:
    """Return the names of the targets: the arguments that ``loss`` needs after the model's output. InputError if
    ``loss`` has no signature (a builtin).
    """
    target = loss.forward if isinstance(loss, nn.Module) else loss
    try:
        parameters = inspect.signature(target).parameters.values()
    except ValueError as error:
        fix = "pass a function of Python that calls it, such as lambda output: ..."
        raise InputError(
            f"the loss {getattr(loss, '__name__', loss)!r} has no signature that can be read", fix=fix
        ) from error
    needed = [p for p in parameters if p.default is p.empty and p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    return tuple(p.name for p in needed[1:])


@dataclass(frozen=True)
class Traced(Captured):
    """The joint graph as AOTAutograd returns it, before its nodes are annotated, and what `annotated` reads to finish
    the capture: names, dtypes and memory of the trace's tensors.

    Args:
        names: every name of each parameter and buffer -> the first name of that tensor.
        stored: storage dtype of each parameter and buffer.
        dynamo: the fake mode in which Dynamo ran the model.
        uncast: the result of `Dtypes.uncast`.
        memories, owners: the result of `memories_of`.
    """

    names: dict[str, str]
    stored: dict[str, torch.dtype]
    dynamo: FakeTensorMode
    uncast: tuple[str, str]
    memories: tuple[Memory, ...]
    owners: dict[int, str]

    def annotated(self) -> Captured:
        """Rewrite the graph's ops to those that have rules, annotate its nodes, and return the captured model.
        ``graph`` is changed in place.
        """
        # Functions first: their graphs leave the module, and the passes below see one op for each.
        refuse_sparse(self.graph.graph)
        functions_as_ops(self.graph)
        loop_gradients(self.graph, decompositions())
        without_strides(self.graph.graph, self.fake_mode)
        numbers_as_tensors(self.graph.graph)
        lookups_by_place(self.graph.graph, self.fake_mode)
        refuse_draws(self.graph.graph)
        annotate(self.graph, self.inputs, self.names, self.stored)
        refuse_higher_order(self.graph.graph)
        check_dtypes(self.graph.graph, self.uncast)
        captured = Captured(*(getattr(self, field.name) for field in fields(Captured)))  # without what `Traced` adds
        return replace(captured, returned=returned(self.graph.graph, self.memories, self.owners))


def capture(
    model: nn.Module,
    args: Sequence[PyTree],
    kwargs: dict[str, PyTree],
    *,
    device: torch.device,
    loss: Loss | None = None,
    tags: Sequence[Tag] = (),
    dtypes: Dtypes = UNCHANGED,
    lengths: Collection[int] = (),
) -> Captured:
    """Traces the model and its loss, forward and backward, to one joint graph at global shapes, and returns it as
    `Captured`. ``model`` is left unchanged.

    Args:
        model: the module, on any device (``meta`` and fake included); its mode (train or eval) is traced.
        args, kwargs: example inputs at global shapes, on any device.
        device: the device that the program will run on; it decides which kernels are traced.
        loss: called on the output and the last ``loss_arity(loss)`` of ``args``.
        tags: module inputs and outputs to mark.
        dtypes: dtypes of modules' parameters, buffers, inputs and outputs in the trace.
        lengths: numbers of places of sequences that the plan splits; loops over all of one are traced as scans.

    Raises:
        CaptureError: a graph break or an op that cannot be traced, with Dynamo's reason and the line; the model changes
            a parameter or an input, or replaces a buffer.
    """
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    with timed("capture"):
        return trace(
            model, args, kwargs, device, loss, tags, dtypes, mode, lambda _, x: fake_like(x, device), lengths
        ).annotated()


def trace(
    model: nn.Module,
    args: Sequence[PyTree],
    kwargs: dict[str, PyTree],
    device: torch.device,
    loss: Loss | None,
    tags: Sequence[Tag],
    dtypes: Dtypes,
    mode: FakeTensorMode,
    fake: Callable[[str, Tensor], Tensor],
    lengths: Collection[int] = (),
    retraces: bool = True,
) -> Traced:
    """Traces forward and backward to one joint graph, and returns it as a `Traced`, whose nodes are not annotated yet.
    Arguments are those of `capture`, besides ``mode``, ``fake`` and ``retraces``.

    Args:
        mode: the mode of the graph's fake values.
        fake: (name, example) -> fake tensor of an input, in ``mode``.
        retraces: trace a second time, with constants that forward sets and without gradients, to allow more calls.
    """
    trace_again = partial(trace, model, args, kwargs, device, loss, tags, dtypes, mode, fake, lengths)
    template = model  # the user's; what is traced is a copy of fake tensors
    flat, input_spec = pytree.tree_flatten((tuple(args), dict(kwargs)))
    names = input_names(model, args, kwargs, 0 if loss is None else loss_arity(loss))
    tensor_inputs = [(name, x) for name, x in zip(names, flat, strict=True) if isinstance(x, Tensor)]
    inputs = tuple(name for name, _ in tensor_inputs)
    refuse_hooks(model)
    stored = {PREFIX + name: x.dtype for name, x in (*model.named_parameters(), *model.named_buffers())}
    uncast = dtypes.uncast(model)  # for errors: (text about a buffer that keeps its dtype, fix)
    # Every name of a parameter or buffer -> the first name of that tensor.
    first_param_names = {PREFIX + name: PREFIX + first for name, first in first_places(model).items()}
    model = faked(model, mode, device, dtypes)
    root = _Root(model, flat, input_spec, loss)
    # Before the trace: torch leaves other tensors in modules of two names.
    first_names = _first_names(root) | first_param_names
    explain = partial(capture_error, model, loss=loss, inputs=tensor_inputs, uncast=uncast)
    with contextlib.ExitStack() as stack, warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for context in _contexts(root, tags, dtypes):  # they cast, tag and replace what cannot be traced
            stack.enter_context(context)
        with mode:
            fakes = [fake(name, x) for name, x in tensor_inputs]
        joint_of = partial(_joint_graph, stack, mode, fakes)
        traced: _ByDynamo | Run
        refused: CaptureError | None = None
        try:
            traced = _ByDynamo(root, loss, fakes, inputs, first_param_names, lengths, joint_of)
        except ShardcError:
            raise
        except Exception as error:  # from Dynamo, torch's fake kernels or the model
            if not may_run(error):
                raise explain(error) from error
            refused = explain(error)
        else:
            traced.check_side_effects([str(warning.message) for warning in caught], mode)
        # Outside of the handler: the model runs on fake tensors instead, new ones, as the failed trace may have changed
        # the first.
        if refused is not None:
            with mode:
                fakes = [fake(name, x) for name, x in tensor_inputs]
            try:
                traced = Run(root, template, loss, dict(zip(inputs, fakes, strict=True)), mode, joint_of)
            except ShardcError:
                raise
            except Exception as error:
                # An error without an explanation says less than the reason for which Dynamo refused the model.
                raise (explain(error) if is_explained(error) else refused) from error
            traced.warnings.insert(0, warn_of_unseen_reads(template, refused))
        # shardc's warnings from within the trace, which `catch_warnings` held back; torch's are dropped.
        of_trace = [warning.message for warning in caught if isinstance(warning.message, ShardcWarning)]
    graph = traced.joint.graph_module
    reads = traced.reads(partial(_retraced, trace_again, template, graph) if retraces else None)
    # Each text once, though code may run several times in a trace.
    for warning in (*traced.warnings, *{str(warning): warning for warning in of_trace}.values()):
        warnings.warn(warning, stacklevel=2)
    return Traced(
        graph=graph,
        inputs=inputs,
        constants=tuple((i, x) for i, x in enumerate(flat) if not isinstance(x, Tensor)),
        output_spec=traced.joint.out_spec,
        fake_mode=mode,
        reads=reads,
        returned=(),
        names=first_names,
        stored=stored,
        dynamo=traced.mode,
        uncast=uncast,
        memories=traced.memories,
        owners=traced.owners,
    )


def _contexts(root: _Root, tags: Sequence[Tag], dtypes: Dtypes) -> Sequence[contextlib.AbstractContextManager[object]]:
    """Return the context managers in which ``root`` is traced, in the order in which to enter them."""
    return (
        dtypes.cast(root.model),  # before the tags: the layout of a plan is that of the cast tensor
        tagged(root, tags),
        torch._dynamo.config.patch(_settings()),
        dynamo_captures(),
        traceable_layers(root),
        traceable_functions(),
        without_raising(),
        eager_dropout(),
        without_random_numbers(),
        # Backward runs outside of the autocast that forward runs in, as torch advises.
        torch._functorch.config.patch(backward_pass_autocast="off"),
        # The functions of Triton ops compute grids from shapes: they run on a rank, at its own.
        torch._functorch.config.patch(decompose_custom_triton_ops=False),
    )


def _joint_graph(stack: contextlib.ExitStack, mode: FakeTensorMode, fakes: Sequence[Tensor], module: nn.Module) -> Any:
    """Trace ``module``, a function of ``fakes``, by AOTAutograd; return its joint graph with descriptors. AOTAutograd
    enters contexts on ``stack``.
    """
    with mode:  # AOTAutograd looks for a fake mode among the tensors, of which there may be none
        return aot_autograd.aot_export_joint_with_descriptors(
            stack, module, tuple(fakes), {}, decompositions=decompositions()
        )


class _ByDynamo:
    """A root module as Dynamo and AOTAutograd trace it.

    Attributes:
        joint: AOTAutograd's joint graph, with descriptors.
        mode: the fake mode in which Dynamo ran the model.
        memories, owners: the result of `memories_of`.
        warnings: warnings about side effects of forward.
    """

    def __init__(
        self, root: _Root, loss: Loss | None, fakes: Sequence[Tensor], inputs: Sequence[str],
        first_names: dict[str, str], lengths: Collection[int], joint_of: Callable[[nn.Module], Any],
    ) -> None:  # fmt: skip
        self._root, self._loss, self._fakes = root, loss, fakes
        # Noted during the trace: Dynamo's output, what forward changes, what it asks of torch's global state.
        with recorded() as outputs, changes_recorded() as self._changes, recorded_states() as self._states:
            traced = dynamo_graph_capture_for_export(root)(*fakes)
        self._output = outputs[-1]  # Dynamo's `CaptureOutput`, with its guards
        self._codes = traced_code(self._output.graph_capture_output)
        # Ids of all tensors that the graph takes: parameters and buffers, too.
        self._graph_inputs = set(map(id, traced._dynamo_bytecode_flatten(*fakes)))
        self.memories, self.owners = memories_of(traced, root, first_names, fakes, inputs)
        self.warnings: list[ShardcWarning] = []
        # Rewrites of Dynamo's graph, in which memory, loops and calls are still those of the model's code.
        write_out(traced, lengths)
        pad_at_the_begin(traced)
        undo = scan_loops(traced, lengths, decompositions())
        try:
            self.joint = joint_of(traced)
        except Exception:  # from the gradient of a scan, which refuses some steps
            if undo is None:  # no loop was rewritten as a scan
                raise
            undo()
            self.joint = joint_of(traced)
        self.mode: FakeTensorMode = traced.meta["fake_mode"]

    def check_side_effects(self, messages: Sequence[str], mode: FakeTensorMode) -> None:
        """Fills `warnings` with the side effects of forward: changed attributes (from Dynamo's warnings ``messages``),
        changed arguments (from runs of the model on fake tensors of ``mode``) and prints (from its code).

        Raises:
            CaptureError: forward replaces a buffer.
        """
        model = self._root.model
        with mode:
            # `_changes`: what forward sets, as noted in the trace.
            self.warnings += side_effects(messages, model, lambda: self._root(*self._fakes), self._changes)
            args, kwargs, _ = self._root.arguments(self._fakes)
            self.warnings += changed_arguments(model, args, kwargs)
        self.warnings += prints(self._codes)

    def reads(self, retrace: Retrace | None) -> Reads:
        """Return the `Reads` of the trace. To allow more calls, ``retrace`` traces again: with constants that forward
        sets, and without gradients; None leaves that out.
        """
        model, loss = self._root.model, self._loss
        reads = reads_of(self._output, model, loss, self._states, self._graph_inputs, self._root.objects)
        # What forward both reads and changes must compute the same in later calls.
        changes = expressed(self._output, self._changes, reads)
        reads = changed_reads(changes, reads, model, loss, self._codes, retrace or (lambda _: None))
        if retrace is None or not torch.is_grad_enabled() or not reads.grad_mode:
            return reads
        without_grad = retrace({}, False)
        joined = None if without_grad is None else reads.joined(without_grad)
        if joined is None:
            return reads
        # The graph is the same without gradients: one program is enough.
        return replace(joined, entries=tuple(read for read in joined.entries if read != Read(GRAD_MODE)))


def _retraced(
    trace_again: Callable[..., Traced], template: nn.Module, graph: fx.GraphModule, constants: dict[str, Constant],
    with_gradients: bool = True,
) -> Reads | None:  # fmt: skip
    """Trace ``template`` by ``trace_again``, with ``constants`` set in it. Return the reads; None if it cannot
    be traced or gives another graph than ``graph``.

    Args:
        with_gradients: False to trace in the grad mode that records none, if the first trace was in the other.
    """
    enabled = torch.is_grad_enabled()
    same_mode = with_gradients or not enabled  # whether this trace is in the grad mode of the first
    with assigned(template, constants), torch.set_grad_enabled(enabled and with_gradients), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the first trace has issued these warnings
        try:
            # A trace in the other grad mode may need one more, with constants set. That one needs no further.
            again = trace_again(retraces=not same_mode)
        except ShardcError:
            return None
    # Traces in different grad modes are compared by their forwards.
    numbers: dict[Hashable, int] = {}
    again_values, first_values = (value_numbers(gm, numbers, same_mode) for gm in (again.graph, graph))
    return again.reads if again_values == first_values else None


def _first_names(root: nn.Module) -> dict[str, str]:
    """Return every name of each parameter and buffer -> the first name of that tensor."""
    first: dict[int, str] = {}
    both = (root.named_parameters(remove_duplicate=False), root.named_buffers(remove_duplicate=False))
    return {name: first.setdefault(id(x), name) for named in both for name, x in named}


def _settings() -> dict[str, object]:
    """Return the settings of Dynamo's config for a capture, as name -> value. Settings that this version of torch lacks
    are left out.

    Numbers and sizes are constants, also after captures at other sizes. Recurrent layers, and gradients that the model
    itself computes, are traced through.
    """
    wanted = {"specialize_float": True, "automatic_dynamic_shapes": False, "ignore_logging_functions": _logging()}
    wanted |= {"allow_rnn": True, "trace_autograd_ops": True}  # nn.LSTM and the like; torch.autograd.grad in forward
    # Side effects in a checkpoint region happen once: a program does not rerun its Python in backward.
    wanted |= {"skip_fwd_side_effects_in_bwd_under_checkpoint": True}
    return {name: value for name, value in wanted.items() if hasattr(torch._dynamo.config, name)}


def _logging() -> set[Callable[..., object]]:
    """Return the functions that a trace skips because they log or warn. Methods that libraries added to Python's
    loggers are among them.
    """
    levels = ("debug", "info", "warn", "error", "exception", "critical", "fatal", "log")
    added = {method for name, method in vars(logging.Logger).items() if name.startswith(levels)}
    return added | {warnings.warn} | set(torch._dynamo.config.ignore_logging_functions)


def decompositions() -> dict[Any, Callable[..., object]]:
    """Return op overload -> decomposition, the table with which AOTAutograd traces."""
    ops = [getattr(torch.ops.aten, name) for name in FROM_TORCH if hasattr(torch.ops.aten, name)]
    return {**get_decompositions(ops), **OWN, **random_decompositions()}


def faked(model: nn.Module, mode: FakeTensorMode, device: torch.device, dtypes: Dtypes) -> nn.Module:
    """Return a copy of ``model`` whose parameters and buffers are fake tensors on ``device``, in the dtypes that
    ``dtypes`` gives their modules.
    """
    by_path = dict(dtypes.modules)

    def fake(name: str, tensor: Tensor) -> Tensor:
        # ``name`` without its last part is the path of the tensor's module.
        module_dtypes, is_param = by_path.get(name.rpartition(".")[0], ModuleDtypes()), isinstance(tensor, nn.Parameter)
        like = tensor.detach()
        with mode:
            fake_tensor = fake_like(like, device, module_dtypes.param if is_param else module_dtypes.buffers)
            return nn.Parameter(fake_tensor, requires_grad=tensor.requires_grad) if is_param else fake_tensor

    copy = clone_tree(model, fake)

    # Wrapper tensors are made again, around inner tensors that are fake by now.
    def outer(path: str, inner: InnerTensors) -> Tensor:
        module_dtypes = by_path.get(path, ModuleDtypes())
        with mode:
            return inner.outer(dtype=module_dtypes.param if inner.is_param else module_dtypes.buffers)

    unflatten(copy, outer)
    # Tensors that are attributes of modules.
    for module in copy.modules():
        for key, value in vars(module).items():
            if isinstance(value, Tensor):
                vars(module)[key] = as_plain(value)
    return copy


def input_names(model: nn.Module, args: Sequence[PyTree], kwargs: Mapping[str, PyTree], extra: int = 0) -> list[str]:
    """Return a dotted name for each flat leaf of ``(args, kwargs)``, such as ``batch.tokens``. A name that a parameter
    or buffer has too gets the suffix ``.input``.

    Args:
        extra: the number of ``args``, at the end, for the loss: they are named ``target``, or ``target0`` and so on.
    """
    model_args = len(args) - extra  # arguments of the model by position
    names: list[str] = []  # of these arguments
    for parameter in inspect.signature(model.forward).parameters.values():
        if parameter.kind is parameter.VAR_POSITIONAL:
            names += [f"{parameter.name}.{at}" for at in range(model_args - len(names))]
        elif parameter.kind in (parameter.POSITIONAL_ONLY, parameter.POSITIONAL_OR_KEYWORD):
            names.append(parameter.name)
    names = [*names[:model_args], *(["target"] if extra == 1 else [f"target{at}" for at in range(extra)])]
    out = []
    for group, first, *rest in leaf_paths((tuple(args), dict(kwargs))):  # group 0: args, by index; 1: kwargs, by name
        out.append(".".join(map(str, [names[first] if group == 0 else first, *rest])))
    tensor_names = {name for name, _ in (*model.named_parameters(), *model.named_buffers())}
    return [f"{name}.input" if name in tensor_names else name for name in out]
