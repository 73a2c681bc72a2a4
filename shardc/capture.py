"""Capture: an ordinary module (and its loss) as one joint forward-backward FX graph at global shapes.

Dynamo traces the module whole, AOTAutograd differentiates it, under fake tensors: nothing is
materialised, and the model may live on ``meta``. The graph's placeholders are parameters, buffers and
inputs by name, then one tangent an output that needs a gradient.
"""

from __future__ import annotations

import contextlib
import inspect
import os
import re
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from operator import getitem
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import Tensor, fx, nn
from torch._decomp import get_decompositions
from torch._dynamo.exc import TorchDynamoException
from torch._dynamo.functional_export import dynamo_graph_capture_for_export
from torch._functorch import aot_autograd
from torch._functorch._aot_autograd import descriptors as aot
from torch._subclasses.fake_tensor import FakeTensorMode

from shardc.errors import CaptureError
from shardc.ir import graph as ir
from shardc.ir import ops
from shardc.ir.graph import Info, NameScope, Origin, Role, Value
from shardc.rules.decompositions import FROM_TORCH, OWN

Loss = Callable[..., Any]
_WITH_EFFECTS = torch.ops.higher_order.with_effects
PREFIX = "model."  # of what the traced module holds
_TORCH_ROOT = os.path.dirname(torch.__file__)
_HERE = os.path.dirname(os.path.abspath(__file__))


@dataclass(frozen=True)
class Captured:
    """A captured model.

    Args:
        graph: the joint graph; every node has its `Info`, the output node its roles.
        inputs: dotted name of each flat tensor input, in placeholder order.
        input_spec: pytree spec of ``(args, kwargs)``.
        constants: the non-tensor leaves of ``(args, kwargs)`` by flat position.
        output_spec: pytree spec of what the model returns.
            fake_mode: the mode of the graph's fake values.
    """

    graph: fx.GraphModule
    inputs: tuple[str, ...]
    input_spec: pytree.TreeSpec
    constants: tuple[tuple[int, Any], ...]
    output_spec: pytree.TreeSpec
    fake_mode: FakeTensorMode


@dataclass(frozen=True)
class Tag:
    """Where to put an `ops.tag` in the trace: on a module's input or output, tensor ``index`` of it."""

    module: str
    where: str
    index: int

    @property
    def name(self) -> str:
        return f"{self.module}.{self.where}.{self.index}"


@torch.library.custom_op("shardc::tag", mutates_args=())
def _tag(x: Tensor, name: str) -> Tensor:
    return x.clone()


_tag.register_fake(lambda x, name: torch.empty_like(x))
_tag.register_autograd(
    lambda ctx, grad: (_tag(grad, ctx.name), None),
    setup_context=lambda ctx, inputs, output: setattr(ctx, "name", inputs[1]),
)


class _Root(nn.Module):
    """What is traced: ``model``, then ``loss(output, *extra)`` if there is one, as a function of tensors alone.

    The other leaves of the arguments are bound to their values. The loss's own tensors are constants.
    """

    def __init__(self, model: nn.Module, flat: Sequence[Any], spec: pytree.TreeSpec, loss: Loss | None) -> None:
        super().__init__()
        self.model, self._flat, self._spec = model, [None if isinstance(x, Tensor) else x for x in flat], spec
        self._places = [at for at, x in enumerate(flat) if isinstance(x, Tensor)]
        self._loss = None if loss is None else (loss,)  # in a tuple: its tensors are not the model's
        self._extra = 0 if loss is None else loss_arity(loss)

    def forward(self, *tensors: Tensor) -> Any:
        flat = list(self._flat)
        for at, x in zip(self._places, tensors, strict=True):
            flat[at] = x
        args, kwargs = pytree.tree_unflatten(flat, self._spec)
        if self._loss is None:
            return self.model(*args, **kwargs)
        at = len(args) - self._extra
        return self._loss[0](self.model(*args[:at], **kwargs), *args[at:])


def loss_arity(loss: Loss) -> int:
    """How many arguments after the model's output ``loss`` needs."""
    target = loss.forward if isinstance(loss, nn.Module) else loss
    parameters = inspect.signature(target).parameters.values()
    needed = [p for p in parameters if p.default is p.empty and p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    return max(len(needed) - 1, 0)


def capture(
    model: nn.Module,
    args: Sequence[Any],
    kwargs: dict[str, Any],
    *,
    device: torch.device,
    loss: Loss | None = None,
    tags: Sequence[Tag] = (),
) -> Captured:
    """Traces ``loss(model(*args), ...)`` to one joint graph; ``model`` is as before afterwards.

    Args:
        model: the module, on any device (``meta`` and fake included); its mode (train or eval) is traced.
        args, kwargs: example inputs at global shapes, on any device.
        device: the device that the program is for; it decides which kernels are traced.
        loss: called on the output and the last ``loss_arity(loss)`` of ``args``.
        tags: module inputs and outputs to mark.

    Raises:
        CaptureError: a graph break or an op that cannot be traced, with Dynamo's reason and the line.
    """
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    flat, input_spec = pytree.tree_flatten((tuple(args), dict(kwargs)))
    leaves = zip(input_names(model, args, kwargs), flat, strict=True)
    named = [(name, x) for name, x in leaves if isinstance(x, Tensor)]
    root = _Root(model, flat, input_spec, loss)
    with contextlib.ExitStack() as stack, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        stack.enter_context(_faked(root, mode, device))
        stack.enter_context(_tagged(root, tags))
        stack.enter_context(torch._dynamo.config.patch(specialize_float=True))
        with mode:
            fakes = [_fake(x, device) for _, x in named]
        try:
            traced = dynamo_graph_capture_for_export(root)(*fakes)
            joint = aot_autograd.aot_export_joint_with_descriptors(
                stack, traced, tuple(fakes), {}, decompositions=decompositions()
            )
        except RuntimeError as error:  # Dynamo's errors are such too
            raise _capture_error(model, error) from error
    _drop_effects(joint.graph_module.graph)
    _annotate(joint.graph_module, [name for name, _ in named])
    return Captured(
        graph=joint.graph_module,
        inputs=tuple(name for name, _ in named),
        input_spec=input_spec,
        constants=tuple((i, x) for i, x in enumerate(flat) if not isinstance(x, Tensor)),
        output_spec=joint.out_spec,
        fake_mode=mode,
    )


def decompositions() -> dict[Any, Callable[..., Any]]:
    """op overload -> decomposition, for AOTAutograd."""
    known = [getattr(torch.ops.aten, name) for name in FROM_TORCH if hasattr(torch.ops.aten, name)]
    return {**get_decompositions(known), **OWN}


def _fake(x: Tensor, device: torch.device) -> Tensor:
    fake = torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=device)
    return fake.requires_grad_(x.requires_grad)


@contextlib.contextmanager
def _faked(root: nn.Module, mode: FakeTensorMode, device: torch.device) -> Iterator[None]:
    """Every parameter and buffer of ``root`` fake on ``device``, a tied one registered once."""
    saved: list[tuple[dict[str, Any], dict[str, Any]]] = []
    shadows: list[tuple[nn.Module, str]] = []
    made: dict[int, Tensor] = {}
    try:
        for module in root.modules():
            for held in (module._parameters, module._buffers):
                saved.append((held, dict(held)))
                for name, tensor in list(held.items()):
                    if tensor is None:
                        continue
                    if id(tensor) in made:
                        # Dynamo names a parameter by where it is registered; a second place would shift the names.
                        del held[name]
                        module.__dict__[name] = made[id(tensor)]
                        shadows.append((module, name))
                        continue
                    with mode:
                        fake = _fake(tensor.detach(), device)
                        if isinstance(tensor, nn.Parameter):
                            fake = nn.Parameter(fake, requires_grad=tensor.requires_grad)
                    held[name] = made[id(tensor)] = fake
        yield
    finally:
        for module, name in shadows:
            module.__dict__.pop(name, None)
        for held, before in saved:
            held.clear()
            held.update(before)


@contextlib.contextmanager
def _tagged(root: nn.Module, tags: Sequence[Tag]) -> Iterator[None]:
    """Hooks that pass the tagged inputs and outputs through ``shardc::tag``."""
    handles = []
    modules = dict(root.named_modules())
    for tag in tags:
        module = modules[(PREFIX + tag.module).rstrip(".")]
        if tag.where == "input":
            handles.append(module.register_forward_pre_hook(lambda _m, args, tag=tag: _replace(args, tag)))
        else:
            handles.append(module.register_forward_hook(lambda _m, _args, output, tag=tag: _replace(output, tag)))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _replace(values: Any, tag: Tag) -> Any:
    """``values`` (a tensor, or a tuple or list of them) with tensor ``tag.index`` tagged."""
    if isinstance(values, Tensor):
        return _tag(values, tag.name) if tag.index == 0 else values
    if isinstance(values, (tuple, list)):
        items = list(values)
        tensors = [i for i, x in enumerate(items) if isinstance(x, Tensor)]
        if tag.index < len(tensors):
            items[tensors[tag.index]] = _tag(items[tensors[tag.index]], tag.name)
        return tuple(items) if isinstance(values, tuple) else items
    return values


def input_names(model: nn.Module, args: Sequence[Any], kwargs: dict[str, Any]) -> list[str]:
    """A dotted name for every flat leaf of ``(args, kwargs)``; loss arguments are named ``target``."""
    parameters = [p.name for p in inspect.signature(model.forward).parameters.values() if p.kind != p.KEYWORD_ONLY]
    extra = len(args) - len(parameters)
    targets = ["target"] if extra == 1 else [f"target{i}" for i in range(extra)]
    named = dict(zip([*parameters, *targets], args, strict=False)) | kwargs
    paths, _ = pytree.tree_flatten_with_path((tuple(named[n] for n in list(named)[: len(args)]), dict(kwargs)))
    out = []
    for path, _ in paths:
        (_, first, *rest) = [getattr(key, "idx", getattr(key, "key", getattr(key, "name", key))) for key in path]
        out.append(".".join(map(str, [list(named)[first] if isinstance(first, int) else first, *rest])))
    return out


# --- what the graph's nodes are


def _annotate(gm: fx.GraphModule, inputs: Sequence[str]) -> None:
    """Gives every node its `Info` and the output node its roles; tags become `ops.tag`."""
    names = NameScope()
    backward_from = _first_backward(gm.graph)
    backward = False
    for node in gm.graph.nodes:
        backward = backward or node is backward_from
        if node.op == "output":
            roles = [_output_role(d, inputs) for d in node.meta["desc"]]
            kept = [at for at, role in enumerate(roles) if role is not None]
            node.args = (tuple(node.args[0][at] for at in kept),)
            node.meta[ir.ROLES] = tuple(roles[at] for at in kept)
            _check_changes(zip(node.meta[ir.ROLES], node.args[0], strict=True))
            continue
        if node.op == "placeholder":
            role = _input_role(node.meta["desc"], inputs)
            name = f"d.{role.name}" if role.kind == "tangent" else role.name
            phase = "backward" if role.kind == "tangent" else "forward"
            record = Info(names.fresh(name), _value(node), Origin(phase=phase), role)
        else:
            phase = "backward" if backward else "forward"
            if node.target is torch.ops.shardc.tag.default:
                node.target, node.kwargs, node.args = ops.tag, {"name": node.args[1]}, node.args[:1]
            module = _module_path(node)
            stem = _stem(node) if phase == "forward" else f"d.{_stem(node, module)}"
            name = ".".join(filter(None, [module if phase == "forward" else "", stem]))
            record = Info(names.fresh(name), _value(node), Origin(module, _source(node), phase))
        ir.set_info(node, record)


def _drop_effects(graph: fx.Graph) -> None:
    """Drops what ops do besides making results (checks, prints), and the tokens that keep it in order."""
    for node in reversed(list(graph.nodes)):
        token = isinstance(node.meta.get("desc"), aot.ForwardTokenAOTInput | aot.BackwardTokenAOTInput)
        picked = node.target is getitem and node.args[0].target is _WITH_EFFECTS
        if not node.users and (token or picked or node.target is _WITH_EFFECTS):
            graph.erase_node(node)


def _check_changes(outputs: Iterable[tuple[Role, Any]]) -> None:
    """Raises CaptureError where the model changes an input or a parameter; of what it holds only buffers may change."""
    for role, made in outputs:
        if role.kind in ("param", "input"):
            kind = "parameter" if role.kind == "param" else "input"
            raise CaptureError(
                f"the model changes its {kind} {role.name!r} in place",
                source=_source(made) if isinstance(made, fx.Node) else None,
                fix=f"compute a new tensor from it, {'or register it as a buffer' if role.kind == 'param' else 'and return it'}",
            )


def _first_backward(graph: fx.Graph) -> fx.Node | None:
    """The first node that depends on a tangent, or that autograd made."""
    dependent: set[fx.Node] = set()
    for node in graph.nodes:
        if node.op == "placeholder":
            if isinstance(node.meta.get("desc"), aot.TangentAOTInput):
                dependent.add(node)
            continue
        if node.op == "output":
            return None
        if any(n in dependent for n in node.all_input_nodes) or node.meta.get("autograd_backward"):
            return node
    return None


def _value(node: fx.Node) -> Value | tuple[Value | None, ...] | None:
    val = node.meta.get("val")
    if isinstance(val, Tensor):
        return Value(val.dtype, tuple(val.shape))
    if isinstance(val, (tuple, list)):
        return tuple(Value(v.dtype, tuple(v.shape)) if isinstance(v, Tensor) else None for v in val)
    return None


def _input_role(desc: Any, inputs: Sequence[str]) -> Role:
    if isinstance(desc, aot.ParamAOTInput):
        return Role("param", desc.target.removeprefix(PREFIX))
    if isinstance(desc, aot.BufferAOTInput):
        return Role("buffer", desc.target.removeprefix(PREFIX))
    if isinstance(desc, aot.TangentAOTInput):
        return Role("tangent", _output_name(desc.output), _output_index(desc.output))
    return Role("input", inputs[desc.idx], desc.idx)


def _output_role(desc: Any, inputs: Sequence[str]) -> Role | None:
    """The role of an output; None for the gradient of what has none."""
    if isinstance(desc, aot.GradAOTOutput):
        target = _input_role(desc.grad_of, inputs)
        return Role("grad", target.name, target.index)
    if isinstance(desc, aot.InputMutationAOTOutput):
        target = _input_role(desc.mutated_input, inputs)
        return Role(target.kind, target.name, target.index)
    if isinstance(desc, aot.PlainAOTOutput):
        return Role("output", _output_name(desc), desc.idx)
    return None


def _output_index(desc: Any) -> int:
    return getattr(desc, "idx", 0)


def _output_name(desc: Any) -> str:
    return "out" if _output_index(desc) == 0 else f"out.{_output_index(desc)}"


def _module_path(node: fx.Node) -> str:
    stack = node.meta.get("nn_module_stack") or node.meta.get("fwd_nn_module_stack") or {}
    if not stack:
        return ""
    path = list(stack.values())[-1][0]
    path = re.sub(r"^L\['\w+'\]\.?", "", path)
    path = re.sub(r"\[['\"]?([^'\"\]]+)['\"]?\]", r".\1", path).replace("._modules", "")
    return (path + ".").removeprefix(PREFIX).strip(".")


def _stem(node: fx.Node, module: str = "") -> str:
    target = node.target
    name = getattr(target, "__name__", str(target)) if not hasattr(target, "overloadpacket") else ""
    name = name or target.overloadpacket.__name__
    return f"{module}.{name}" if module else name


def _source(node: fx.Node) -> str:
    """``file:line`` of the innermost frame that is not torch's."""
    for file, line in reversed(_frames(node.meta.get("stack_trace") or "")):
        if not file.startswith((_TORCH_ROOT, _HERE)):
            return f"{file}:{line}"
    return ""


def _capture_error(model: nn.Module, error: RuntimeError) -> CaptureError:
    text = str(error)
    reason = next((line.strip() for line in text.splitlines() if line.strip()), type(error).__name__)
    if not isinstance(error, TorchDynamoException):
        reason = f"{type(error).__name__}: {reason}"
    frames = [f"{file}:{line}" for file, line in _frames(text)]
    frames = frames or [f"{frame.filename}:{frame.lineno}" for frame in getattr(error, "real_stack", None) or ()]
    own = [frame for frame in frames if not frame.startswith((_TORCH_ROOT, _HERE))]
    detail = re.search(r"(?:Explanation|Developer debug context): (.*)", text)
    hint = re.search(r"Hint: (.*)", text)
    return CaptureError(
        f"{type(model).__name__} cannot be traced to one graph: {reason}" + (f" ({detail[1].strip()})" if detail else ""),
        source=own[-1] if own else None,
        fix=hint[1].strip() if hint else "write this line with tensor operations whose shapes do not depend on values",
    )


def _frames(trace: str) -> list[tuple[str, str]]:
    """(file, line) of each frame in a traceback's text, the innermost last."""
    return re.findall(r'File "([^"]+)", line (\d+)', trace)
