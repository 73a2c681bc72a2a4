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
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
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


class WithLoss(nn.Module):
    """``model`` followed by ``loss(output, *extra)``, as one module."""

    def __init__(self, model: nn.Module, loss: Callable[..., Any], extra: int) -> None:
        super().__init__()
        self.model, self._loss, self._extra = model, loss, extra

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        at = len(args) - self._extra
        return self._loss(self.model(*args[:at], **kwargs), *args[at:])


def loss_arity(loss: Callable[..., Any]) -> int:
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
    loss: Callable[..., Any] | None = None,
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
    root = model if loss is None else WithLoss(model, loss, loss_arity(loss))
    prefix = "" if loss is None else "model."
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    flat, input_spec = pytree.tree_flatten((tuple(args), dict(kwargs)))
    names = input_names(model, args, kwargs)
    with contextlib.ExitStack() as stack, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        stack.enter_context(_faked(root, mode, device))
        stack.enter_context(_tagged(root, tags, prefix))
        with mode:
            fakes = [_fake(x, device) if isinstance(x, Tensor) else x for x in flat]
        fake_args, fake_kwargs = pytree.tree_unflatten(fakes, input_spec)
        try:
            traced = dynamo_graph_capture_for_export(root)(*fake_args, **fake_kwargs)
            joint = aot_autograd.aot_export_joint_with_descriptors(
                stack, traced, fake_args, fake_kwargs, decompositions=decompositions()
            )
        except TorchDynamoException as error:
            raise _capture_error(model, error) from error
    graph = joint.graph_module
    _annotate(graph, dict(enumerate(names)), prefix)
    return Captured(
        graph=graph,
        inputs=tuple(name for name, x in zip(names, flat, strict=True) if isinstance(x, Tensor)),
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
def _tagged(root: nn.Module, tags: Sequence[Tag], prefix: str) -> Iterator[None]:
    """Hooks that pass the tagged inputs and outputs through ``shardc::tag``."""
    handles = []
    modules = dict(root.named_modules())
    for tag in tags:
        module = modules[(prefix + tag.module).rstrip(".")]
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


def _annotate(gm: fx.GraphModule, inputs: dict[int, str], prefix: str) -> None:
    """Gives every node its `Info` and the output node its roles; tags become `ops.tag`."""
    names = NameScope()
    backward_from = _first_backward(gm.graph)
    backward = False
    for node in gm.graph.nodes:
        backward = backward or node is backward_from
        if node.op == "output":
            roles = [_output_role(d, inputs, prefix) for d in node.meta["desc"]]
            kept = [at for at, role in enumerate(roles) if role is not None]
            node.args = (tuple(node.args[0][at] for at in kept),)
            node.meta[ir.ROLES] = tuple(roles[at] for at in kept)
            continue
        if node.op == "placeholder":
            role = _input_role(node.meta["desc"], inputs, prefix)
            name = f"d.{role.name}" if role.kind == "tangent" else role.name
            phase = "backward" if role.kind == "tangent" else "forward"
            record = Info(names.fresh(name), _value(node), Origin(phase=phase), role)
        else:
            phase = "backward" if backward else "forward"
            if node.target is torch.ops.shardc.tag.default:
                node.target, node.kwargs, node.args = ops.tag, {"name": node.args[1]}, node.args[:1]
            module = _module_path(node, prefix)
            stem = _stem(node) if phase == "forward" else f"d.{_stem(node, module)}"
            name = ".".join(filter(None, [module if phase == "forward" else "", stem]))
            record = Info(names.fresh(name), _value(node), Origin(module, _source(node), phase))
        ir.set_info(node, record)


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


def _input_role(desc: Any, inputs: dict[int, str], prefix: str) -> Role:
    if isinstance(desc, aot.ParamAOTInput):
        return Role("param", desc.target.removeprefix(prefix))
    if isinstance(desc, aot.BufferAOTInput):
        return Role("buffer", desc.target.removeprefix(prefix))
    if isinstance(desc, aot.TangentAOTInput):
        return Role("tangent", _output_name(desc.output), _output_index(desc.output))
    return Role("input", inputs[desc.idx], desc.idx)


def _output_role(desc: Any, inputs: dict[int, str], prefix: str) -> Role | None:
    """The role of an output; None for the gradient of what has none."""
    if isinstance(desc, aot.GradAOTOutput):
        target = _input_role(desc.grad_of, inputs, prefix)
        return Role("grad", target.name, target.index)
    if isinstance(desc, aot.InputMutationAOTOutput):
        target = _input_role(desc.mutated_input, inputs, prefix)
        return Role(target.kind, target.name, target.index)
    if isinstance(desc, aot.PlainAOTOutput):
        return Role("output", _output_name(desc), desc.idx)
    return None


def _output_index(desc: Any) -> int:
    return getattr(desc, "idx", 0)


def _output_name(desc: Any) -> str:
    return "out" if _output_index(desc) == 0 else f"out.{_output_index(desc)}"


def _module_path(node: fx.Node, prefix: str) -> str:
    stack = node.meta.get("nn_module_stack") or node.meta.get("fwd_nn_module_stack") or {}
    if not stack:
        return ""
    path = list(stack.values())[-1][0]
    path = re.sub(r"^L\['\w+'\]\.?", "", path)
    path = re.sub(r"\[['\"]?([^'\"\]]+)['\"]?\]", r".\1", path).replace("._modules", "")
    return (path + ".").removeprefix(prefix).strip(".")


def _stem(node: fx.Node, module: str = "") -> str:
    target = node.target
    name = getattr(target, "__name__", str(target)) if not hasattr(target, "overloadpacket") else ""
    name = name or target.overloadpacket.__name__
    return f"{module}.{name}" if module else name


def _source(node: fx.Node) -> str:
    """``file:line`` of the innermost frame that is not torch's."""
    frames = re.findall(r'File "([^"]+)", line (\d+)', node.meta.get("stack_trace") or "")
    for file, line in reversed(frames):
        if not file.startswith((_TORCH_ROOT, _HERE)):
            return f"{file}:{line}"
    return ""


def _capture_error(model: nn.Module, error: Exception) -> CaptureError:
    text = str(error)
    reason = next((line.strip() for line in text.splitlines() if line.strip()), type(error).__name__)
    frames = re.findall(r'File "([^"]+)", line (\d+)', text)
    own = [f"{file}:{line}" for file, line in frames if not file.startswith((_TORCH_ROOT, _HERE))]
    detail = re.search(r"(?:Explanation|Developer debug context): (.*)", text)
    hint = re.search(r"Hint: (.*)", text)
    return CaptureError(
        f"{type(model).__name__} cannot be traced to one graph: {reason}" + (f" ({detail[1].strip()})" if detail else ""),
        source=own[-1] if own else None,
        fix=hint[1].strip() if hint else "write this line with tensor operations, without a break in the graph",
    )
