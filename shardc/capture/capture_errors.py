"""Translates errors of Dynamo and AOTAutograd to a `CaptureError` with the user's line and a fix."""

from __future__ import annotations

import inspect
import re
from collections.abc import Sequence
from contextlib import suppress
from enum import Enum
from typing import Any

import numpy as np
import torch
import torch.utils._pytree as pytree
from torch import Tensor, fx, nn
from torch._dynamo.exc import TorchDynamoException

from shardc.capture.refusals import REFUSALS
from shardc.capture.source import defined_at, frames, line_of, user_frame
from shardc.errors import CaptureError
from shardc.ir.graph import info, placeholders, role
from shardc.ir.told import calling_line

# Dynamo's messages for an op that refuses its operands; groups: (op, reason).
_FAILED = (
    r"fake tensors: .*?<[^>]*?(?:function|method) '?(\w+).*?got \w+\(['\"](.*?)['\"]\)",
    r"Error <[^>]*?(?:function|method) '?(\w+)[^>]*>: ([^\n]*)",
)
# Ops that multiply operands of one dtype; fake tensors do not check that.
_aten = torch.ops.aten
_PRODUCTS = {
    _aten.mm.default, _aten.addmm.default, _aten.bmm.default, _aten.baddbmm.default, _aten.mv.default,
    _aten.addmv.default, _aten.dot.default, _aten.convolution.default,
}  # fmt: skip
LOSS_GAVE = "what is traced gave "


def capture_error(
    model: nn.Module,
    error: Exception,
    loss: Any = None,
    inputs: Sequence[tuple[str, Tensor]] = (),
    uncast: tuple[str, str] = ("", ""),
) -> CaptureError:
    """Return the `CaptureError` for ``error`` of a trace of ``model``; ``uncast`` is the result of `Dtypes.uncast`."""
    text = str(error)
    if gave := re.search(rf"{LOSS_GAVE}([^'\"\\]*)", text):
        if loss is None:
            return CaptureError(
                f"{type(model).__name__} returns no tensor",
                source=user_frame([defined_at(type(model).forward)]) or calling_line(),
                fix="return what a step computes",
            )
        name = getattr(loss, "__name__", type(loss).__name__)
        return CaptureError(
            f"the loss {name!r} gives {gave[1].strip()}, not one real number as a tensor",
            source=user_frame([defined_at(loss.forward if isinstance(loss, nn.Module) else loss)]) or calling_line(),
            fix="return a tensor of one element: a mean or a sum, and no .item()",
        )
    if unknown := re.search(r"Found <class '(?:.*\.)?(\w+)'> in output", text):
        return CaptureError(
            f"{type(model).__name__} returns a {unknown[1]}, a class that torch's pytrees do not know",
            source=user_frame([defined_at(type(model).forward)]) or calling_line(),
            fix=f"return tensors, numbers, strings and None, in tuples, lists and dicts; of a dataclass, call "
            f"torch.export.register_dataclass({unknown[1]}) once",
        )
    reason = next((line.strip() for line in text.splitlines() if line.strip()), type(error).__name__)
    if not isinstance(error, TorchDynamoException):
        reason = f"{type(error).__name__}: {reason}"
    stack = frames(text) or [f"{frame.filename}:{frame.lineno}" for frame in getattr(error, "real_stack", None) or ()]
    for form in _FAILED:
        if failed := re.search(form, text, re.DOTALL):
            cause, fix = uncast if "dtype" in failed[2] else ("", "")
            failure = f"{failed[1]} says: {failed[2]}{cause and '; '}{cause}"
            return CaptureError(
                f"{type(model).__name__} does not run on {_shown(inputs)}: {failure}",
                source=user_frame(stack) or calling_line(),
                fix=fix or "pass inputs that it runs on uncompiled, of the same shapes and dtypes",
            )
    stacked = any(param.dim() == 3 for param in model.parameters())  # as the weights of experts are
    for form, what, fix in REFUSALS:
        if re.search(form, text):
            fix += _ROWS if stacked and "_local_scalar_dense" in form else ""
            line = user_frame(stack) or ("requires_grad_" in form and line_with("requires_grad_(", model))
            return CaptureError(f"{type(model).__name__} {what}", source=line or calling_line(), fix=fix)
    if op := re.search(r"backward through (\S+) but no autograd formula was registered", text):
        return CaptureError(
            f"{op[1]}, which {type(model).__name__} calls, has no gradient",
            source=user_frame(stack) or calling_line(),
            fix="give it one with torch.library.register_autograd, or call it under torch.no_grad()",
        )
    if (drops := _layer_drops(model)) and "ata-dependent branching" in text:
        return CaptureError(
            f"{type(model).__name__} draws which layers to skip ({', '.join(drops)} of its config), and a program has "
            "all its layers in each step",
            source=user_frame(stack) or calling_line(),
            fix=f"make the model of a config with {', '.join(f'{name}=0.0' for name in drops)}",
        )
    raises = re.search(r"(raised exception .*)", text)
    why = raises or re.search(r"(?:Explanation|Developer debug context): (.*)", text)
    hint = re.search(r"Hint: (.*)", text)
    return CaptureError(
        f"{type(model).__name__} cannot be traced to one graph: {reason}" + (f" ({why[1].strip()})" if why else ""),
        source=user_frame(stack) or calling_line(),
        fix=_RAISES
        if raises
        else (_ELSEWHERE if re.search(_VAGUE, hint[1]) else hint[1].strip())
        if hint and "tolist()" not in reason
        else _ELSEWHERE
        if re.search("returned non-Tensor|shape_env should not be None|as_proxy", text)
        else _SIZES + (_ROWS if any(x in text for x in ("aten.nonzero", "tolist()")) and stacked else ""),
    )


_RAISES = "mend what raises there; if it does not raise uncompiled, write that line in another way"
_ELSEWHERE = "take this out of forward: do it before the call and pass the result, or write it with operations of torch"
# Dynamo's hints for its own developers, or for models in which graph breaks are allowed.
_VAGUE = (
    "write Dynamo tracing rules|file an issue|graph break is fundamental|set_stance|backtrace further above|"
    "custom operator|[Rr]eport an issue"
)
_SIZES = "write this line with tensor operations whose shapes do not depend on values"
_ROWS = "; if rows go to experts here, write one expert as a function under @shardc.experts"


def line_with(text: str, model: nn.Module) -> str | None:
    """Return the first line with ``text`` in the forward of one of the modules, as ``file:line``, or None."""
    for module in model.modules():
        with suppress(OSError, TypeError):  # no source
            lines, first = inspect.getsourcelines(type(module).forward)
            for at, line in enumerate(lines):
                if text in line:
                    return f"{inspect.getsourcefile(type(module).forward)}:{first + at}"
    return None


def _layer_drops(model: nn.Module) -> list[str]:
    """Return the names of the nonzero LayerDrop rates in the config of ``model``."""
    config = vars(model.config) if hasattr(model, "config") and model.training else {}
    return [name for name, rate in config.items() if "layerdrop" in name and rate]


def _shown(inputs: Sequence[tuple[str, Tensor]]) -> str:
    listed = [f"{name}: {str(x.dtype).removeprefix('torch.')}{list(x.shape)}" for name, x in inputs]
    return ", ".join(listed) or "no tensors"


def check_result(out: Any, is_loss: bool) -> None:
    """Checks, in the trace, that a loss is a scalar and a model returns a tensor; else ValueError."""
    if is_loss and not (isinstance(out, Tensor) and out.numel() == 1 and not out.is_complex()):
        kind = f"a tensor of {out.dtype}, {list(out.shape)}" if isinstance(out, Tensor) else f"a {type(out).__name__}"
        raise ValueError(f"{LOSS_GAVE}{kind}")
    leaves = pytree.tree_leaves(out)
    tensors = any(isinstance(x, Tensor) for x in leaves)
    for x in leaves:  # classes that AOTAutograd lets pass; all classes if there is no tensor
        if isinstance(x, Enum | np.ndarray) or not (tensors or isinstance(x, int | float | str | None)):
            raise ValueError(f"Found <class '{type(x).__name__}'> in output")
    if not tensors:
        raise ValueError(LOSS_GAVE)


def check_dtypes(graph: fx.Graph, uncast: tuple[str, str]) -> None:
    """Raises CaptureError for a product of mixed dtypes: fake tensors let it pass, but no kernel takes it."""
    for node in graph.nodes:
        if node.target in _PRODUCTS:
            dtypes = dict.fromkeys(x.meta["val"].dtype for x in node.all_input_nodes)
            if len(dtypes) > 1:
                cause, fix = uncast
                inputs = [(role(n).name, n.meta["val"]) for n in placeholders(graph, "input")]
                raise CaptureError(
                    f"{node.target} is given {' and '.join(str(x).removeprefix('torch.') for x in dtypes)}; the inputs "
                    f"are {_shown(inputs)}{cause and '; '}{cause}",
                    source=info(node).origin.source or calling_line(),
                    fix=fix or "pass inputs of the parameters' dtype, or cast where the model multiplies",
                )


def refuse_sparse(graph: fx.Graph) -> None:
    """Raises CaptureError if the graph has a sparse tensor, such as the gradient of a sparse embedding."""
    for node in graph.nodes:
        results = [x for x in pytree.tree_leaves(node.meta.get("val")) if isinstance(x, Tensor)]
        if any(x.layout is not torch.strided for x in results):
            raise CaptureError(
                f"{node.target} makes a sparse tensor, which no rank can hold a shard of",
                source=line_of(node) or calling_line(),
                fix="leave sparse=True out of the embedding (or set module.sparse = False before compile), and use an "
                "optimizer for dense gradients; keep other sparse tensors as plain indices and values",
            )


_IN_PLACE_OF = {
    "cond": "compute both branches and choose with torch.where, or branch on a constant that the caller passes",
    "flex_attention": "use torch.nn.functional.scaled_dot_product_attention, with attn_mask for the mask or the bias",
    "auto_functionalized": "register an op that returns its result instead, with shardc.register_rule for its rule",
    "triton_kernel_wrapper": "wrap the kernel in a torch.library.custom_op that returns its result, with "
    "shardc.register_rule for its rule",
}


def refuse_higher_order(graph: fx.Graph) -> None:
    """Raises CaptureError for a higher-order op, an op that writes to its arguments, or a collective."""
    for node in graph.nodes:
        if str(getattr(node.target, "namespace", "")).endswith("c10d_functional"):
            raise CaptureError(
                f"forward calls the collective {node.target}, and a model is written for one device: a program has its "
                "own collectives",
                source=line_of(node) or calling_line(),
                fix="leave it out: results are those of the whole batch; or write what each rank does with "
                "shardc.local_map",
            )
        if isinstance(node.target, torch._ops.HigherOrderOperator):
            name = node.target.name()
            written = node.args[0] if name.startswith("auto_functionalized") else None
            what = f"{written}, which writes to an argument," if written is not None else f"the higher-order op {name}"
            instead = next((fix for start, fix in _IN_PLACE_OF.items() if name.startswith(start)), None)
            raise CaptureError(
                f"{what} has no sharding rule",
                source=line_of(node) or calling_line(),
                fix=instead
                or "write it with ops of torch, such as a Python loop over tensors that are traced one by one",
            )
