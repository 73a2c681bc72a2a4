"""`CaptureError` for code that cannot be captured: the reason, the user's line (``file:line``) and a fix.

`REFUSALS` is the table of Dynamo's messages. The ``check_`` and ``refuse_`` functions look at values and traced graphs.
"""

from __future__ import annotations

import inspect
import re
import traceback
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from enum import Enum
from itertools import chain

import numpy as np
import torch
import torch.utils._pytree as pytree
from torch import Tensor, fx, nn
from torch._dynamo.exc import TorchDynamoException

from shardc._compat import PyTree
from shardc.errors import CaptureError
from shardc.ir.code import calling_line, versioned_path
from shardc.ir.graph import info, placeholders, role
from shardc.validate import torch_name


def frames(trace: str) -> list[str]:
    """Return ``file:line`` of each frame in a traceback's text, the innermost last."""
    return [f"{file}:{line}" for file, line in re.findall(r'File "([^"]+)", line (\d+)', trace)]


def line_of(node: fx.Node) -> str:
    """Return the user's line, ``file:line``, that a traced node comes from; "" if there is none."""
    return user_frame(frames(node.meta.get("stack_trace") or ""))


def user_frame(frames: Iterable[str]) -> str:
    """Return the innermost of ``frames`` (``file:line``) outside of torch, shardc and Python's library, or ""."""
    user_frames = [frame for frame in frames if versioned_path(frame.rpartition(":")[0]) is None]
    return user_frames[-1] if user_frames else ""


def defined_at(function: Callable[..., object]) -> str:
    """Return ``file:line`` of the definition of a function; "" for one without Python code."""
    code = getattr(inspect.unwrap(function), "__code__", None)
    return f"{code.co_filename}:{code.co_firstlineno}" if code else ""


_REQUIRES_GRAD = r"source-less requires_grad_\(\)|returning intermediate with requires_grad_"
_CHANGES_GRAD = r"Unsupported Tensor\.requires_grad_\(\) call|setattr\(\) on Tensor\.requires_grad"
_GRAD_FN = r"Tensor with grad_fn\(\)"
_ENTERS = r"function `(?:no_grad|enable_grad|set_grad_enabled|inference_mode|autocast)\.__enter__`"
_SELECTS = r"^\s*aten\.(?:nonzero|masked_select)\.default\b"
_WITHIN_FUNC = r"an autograd\.Function within torch\.func"
# Pattern in Dynamo's message -> (what the model does, fix). The first pattern that matches counts.
REFUSALS = {
    _REQUIRES_GRAD: (
        "differentiates by a tensor that it calls requires_grad_() on itself, which Dynamo cannot trace",
        "write the gradient as a function, torch.func.grad(lambda x: self.energy(x).sum())(x), or pass that tensor as "
        "an input with requires_grad=True",
    ),
    _WITHIN_FUNC: (
        "calls an autograd.Function in a function of torch.func (vmap, grad), where Dynamo leaves its gradient out",
        "call it outside of that function, or write it with ops whose gradient torch has",
    ),
    r"`pack_padded_sequence`|data-dependent expression[\s\S]*rnn\.py\S+ line \d+, in check_hidden_size": (
        "packs a sequence, or runs a layer on a packed one, whose sizes depend on the values of lengths",
        "run the layer on the padded tensor, and take of each row what its length says",
    ),
    r"aten\.bincount\.": (
        "counts values (bincount), of which there may be any number",
        "pass minlength=n, for values below n: a greater one raises as the program runs",
    ),
    r"aten\.(?:_unique2?|unique_dim|unique_consecutive)\.": (
        "takes unique values, of which there may be any number",
        "count them by torch.bincount(x, minlength=n) > 0, or mark the first of each in a sorted x by x[1:] != x[:-1]",
    ),
    r"`aten\._ctc_loss|loss_ctc\.py": (
        "computes a CTC loss (ctc_loss), in which sizes depend on the values of lengths",
        "take it outside of the compiled module, of the outputs that this returns without loss= and without labels: "
        "each rank takes the mean of its rows",
    ),
    "wrap sparse Tensor|SparseCPU|SparseCUDA|[Ss]parse (?:CSR )?tensors": (
        "computes with a sparse tensor, which no rank can hold a shard of",
        "keep its indices and values as plain tensors (index_select, then index_add), or make it dense",
    ),
    r"a random number of Python's|\bRandom\.(?:random|choice|shuffle|sample|uniform|gauss|getrandbits)": (
        "draws a random number of Python's, which a program would keep as a constant",
        "draw it with torch (torch.rand(()), torch.randint) and keep it a tensor, or draw it outside and pass it as a "
        "tensor",
    ),
    r"the grad mode in a reentrant checkpoint": (
        "asks in a reentrant checkpoint whether gradients are recorded: one device runs this code twice, in forward "
        "without gradients and in backward with them",
        "pass use_reentrant=False to the checkpoint",
    ),
    "a reentrant checkpoint of inputs without gradients": (
        "runs parameters in a reentrant checkpoint none of whose arguments requires a gradient: one device gives these "
        "parameters none",
        "pass use_reentrant=False to the checkpoint",
    ),
    r"gradients enabled in inference_mode\(\)": (
        "enables gradients in a block of torch.inference_mode(), in which one device records none",
        "enter torch.no_grad() in the place of torch.inference_mode(), or leave out what enables gradients",
    ),
    "a tensor that is not of inference mode": (
        "is called in inference mode, and asks whether a view of a parameter, or a tensor that it computes after "
        "torch.inference_mode(False), requires a gradient",
        "call it under torch.no_grad() in the place of torch.inference_mode()",
    ),
    r"is_inference\(\) during tracing|torch\.is_inference\b": (
        "asks whether a tensor is one of inference mode, which a program does not know",
        "ask whether it requires a gradient, by h.requires_grad",
    ),
    r"a backward within forward|function `backward` in file \S+autograd": (
        "calls backward() in forward, and a program adds to no gradients",
        "take torch.autograd.grad(loss, params) there, or return the loss and call backward() on that",
    ),
    r"ignore_fresh_unbacked_symbols|all carried_inputs must be tensors": (
        "carries a number through a while_loop, which would be a size that depends on values",
        "carry it as a tensor: torch.zeros((), dtype=torch.int64)",
    ),
    r"shape_env must not be None|nested_tensor": (
        "makes a nested tensor, whose sizes depend on values",
        "pad its rows to one length, and mask what is padded",
    ),
    "the gradient of a parameter or an input": (
        "reads or sets the .grad of a parameter or an input in forward, where a program has none",
        "do that between steps, outside of forward",
    ),
    "a hook of a parameter or an input": (
        "registers a hook of a parameter or an input in forward, which each call would register again",
        "register it once, on the compiled module's parameter; of an input, register it on a tensor computed of it",
    ),
    _CHANGES_GRAD: (
        "changes in forward whether a tensor requires a gradient",
        "use h.detach() for what shall have none, or set requires_grad of parameters and inputs before the call",
    ),
    r"`Tensor\.retain_grad\(\)`": (
        "calls retain_grad() in forward, and a program keeps no gradients of what it computes within",
        "return the tensor, and call retain_grad() on that",
    ),
    "modified by an inplace operation": (
        "changes in place what its backward needs: one device refuses that backward",
        "write the change without the underscore, so that it makes a new tensor",
    ),
    r"builtin `time\.|function `time\.": (
        "asks for the time, which a program would keep as a constant",
        "take the time around the call of the module",
    ),
    r"numpy\.random|method `\w+` of class `(?:Generator|RandomState)`|numpy function.*default_rng": (
        "draws a random number of NumPy's, which a program would keep as a constant",
        "draw it with torch (torch.rand(()), torch.randint) and keep it a tensor, or draw it outside and pass it",
    ),
    r"Operator `aten\.(?:equal|allclose|is_nonzero)|aten\.(?:equal|allclose)\.default": (
        "asks whether tensors are equal, and a program looks at no values",
        "keep it a tensor: (a == b).all(), or torch.isclose(a, b).all(), with torch.where in the place of if",
    ),
    r"a set_ on a graph input": (
        "sets the .data of a buffer",
        "change its values in place, as by self.buffer.copy_(new)",
    ),
    _ENTERS: (
        "enters a block of torch by a call, as contextlib.ExitStack does",
        "write it as a with statement: with torch.no_grad(): ...",
    ),
    _GRAD_FN: (
        "reads the grad_fn of a tensor, and a program has no autograd graph within",
        "ask h.requires_grad, or not h.is_leaf, in the place of h.grad_fn is not None",
    ),
    r"CheckpointFunction\.": (
        "calls torch.utils.checkpoint.CheckpointFunction.apply, which cannot be traced",
        "call torch.utils.checkpoint.checkpoint(function, *args, use_reentrant=False)",
    ),
    r"\ba state, ": (
        "asks for a state of torch or of the process, which a program would keep as a constant",
        "ask for it outside, and pass it as an argument or set an attribute of the model",
    ),
    "might be aliasing the input or the output|Higher order ops do not support aliasing": (
        "has a scan, or another op with a function, whose function returns a view of its arguments or keeps one for "
        "backward, which torch.compile refuses too",
        "return clones (x.clone()), and compute carries by ops that make new tensors",
    ),
    "sorted order of strides of the two branches": (
        "has a torch.cond whose branches return values that lie in memory in different orders of dims, which torch "
        "refuses too",
        "let both branches return x.contiguous()",
    ),
    "outs_to_grad length": (
        "carries integers or booleans through a scan with gradients, which torch cannot differentiate",
        "scan over them (torch.arange(steps) among the sequences), or carry a floating-point tensor",
    ),
    "failed to bind arguments when attempting to inline": (
        "calls a function, or gets a loss, with arguments that it does not take",
        "pass those of its signature",
    ),
    "found at least two devices": (
        "computes with tensors on two devices: one of them is neither an input nor of the model, and lies elsewhere",
        "register that tensor as a buffer of a module, or make it on the device of those that it is used with",
    ),
    r"`disallow_in_graph`": (
        "calls torch.func.linearize, which keeps values of this call, without their gradients, for its linear function",
        "call torch.func.jvp(function, (x,), (tangent,)) for each tangent: with the same results, and all gradients",
    ),
    "maximum recursion depth exceeded": (
        "calls itself without end",
        "let a method that shardc.register_forward_method makes a program call parts of the module, and not the module",
    ),
    "Calling subclass default constructor": (
        "makes a tensor of a class with arguments of its own, such as torch.nn.attention.bias.CausalBias",
        "write it with a plain tensor: attention with is_causal=True, or with a mask of torch.ones(n, m).tril()",
    ),
    _SELECTS: (
        "selects elements by a mask, x[mask], or asks where it holds, nonzero(); how many there are depends on values",
        "keep the shape: torch.where(mask, x, 0), and a mean as (x * mask).sum() / mask.sum()",
    ),
    "_local_scalar_dense|data-dependent expression": (
        "takes a number out of a tensor, and a program looks at no values",
        "keep it a tensor: torch.where in the place of if, and no .item(), int(), float() or bool() of it",
    ),
}


# Dynamo's messages for an op that refuses its operands; groups: (op, reason).
_KERNEL_ERRORS = (
    r"fake tensors: .*?<[^>]*?(?:function|method) '?(\w+).*?got \w+\(['\"](.*?)['\"]\)",
    r"Error <[^>]*?(?:function|method) '?(\w+)[^>]*>: ([^\n]*)",
)
# Ops that multiply operands of one dtype; fake tensors do not check that.
_aten = torch.ops.aten
_PRODUCTS = {
    _aten.mm.default, _aten.addmm.default, _aten.bmm.default, _aten.baddbmm.default, _aten.mv.default,
    _aten.addmv.default, _aten.dot.default, _aten.convolution.default,
}  # fmt: skip
_TRACED_GAVE = "what is traced gave "
# What Dynamo refuses although it can be traced by running it.
_RUNS = (_REQUIRES_GRAD, _CHANGES_GRAD, _GRAD_FN, _ENTERS, _WITHIN_FUNC, _SELECTS)


def is_explained(error: Exception) -> bool:
    """Return whether `REFUSALS`, the table of known messages, explains an ``error`` of a trace."""
    return any(re.search(form, str(error)) for form in REFUSALS)


def may_run(error: Exception) -> bool:
    """Return whether a model that Dynamo refuses with ``error`` may instead be captured by running it on fake
    tensors.
    """
    text = str(error)
    # Errors of the model itself, of its result, of values or of kernels would be the same in such a run.
    if not isinstance(error, TorchDynamoException) or re.search(rf"{_TRACED_GAVE}|Found <class", text):
        return False
    if "ata-dependent" in text or any(re.search(pattern, text, re.DOTALL) for pattern in _KERNEL_ERRORS):
        return False
    refusal = next((pattern for pattern in REFUSALS if re.search(pattern, text)), None)
    return refusal is None or refusal in _RUNS


def capture_error(
    model: nn.Module,
    error: Exception,
    loss: Callable[..., object] | None = None,
    inputs: Sequence[tuple[str, Tensor]] = (),
    uncast: tuple[str, str] = ("", ""),
) -> CaptureError:
    """Return the `CaptureError` that explains an ``error`` from a trace of ``model``: the reason, the user's line and a
    fix.

    Args:
        inputs: (name, example) of each tensor input.
        uncast: the result of `Dtypes.uncast`.
    """
    text, name = str(error), type(model).__name__
    # The most specific explanation first; the last one quotes Dynamo's reason.
    if (of_result := _result_error(text, model, loss)) is not None:
        return of_result
    frames_of = getattr(error, "real_stack", None) or traceback.extract_tb(error.__traceback__)
    line = user_frame(frames(text) or [f"{frame.filename}:{frame.lineno}" for frame in frames_of])
    for pattern in _KERNEL_ERRORS:
        if kernel_error := re.search(pattern, text, re.DOTALL):
            cause, fix = uncast if "dtype" in kernel_error[2] else ("", "")  # groups: op, reason
            failure = f"{kernel_error[1]} says: {kernel_error[2]}{cause and '; '}{cause}"
            return error_at(line, f"{name} does not run on {_inputs_text(inputs)}: {failure}", fix or _FIX_INPUTS)
    stacked = any(param.dim() == 3 for param in model.parameters())  # as the weights of experts are: adds to the fix
    for pattern, (what, fix) in REFUSALS.items():
        if re.search(pattern, text):
            fix += _FIX_EXPERTS if stacked and ("_local_scalar_dense" in pattern or pattern == _SELECTS) else ""
            # Dynamo gives no line for requires_grad_(): it is looked for in the source.
            line = line or ("requires_grad_" in pattern and line_with("requires_grad_(", model)) or ""
            return error_at(line, f"{name} {what}", fix)
    if op := re.search(r"backward through (\S+) but no autograd formula was registered", text):
        fix = "give it one with torch.library.register_autograd, or call it under torch.no_grad()"
        return error_at(line, f"{op[1]}, which {name} calls, has no gradient", fix)
    if (drops := _layer_drops(model)) and "ata-dependent branching" in text:
        return error_at(
            line,
            f"{name} draws which layers to skip ({', '.join(drops)} of its config), and a program has all its layers "
            "in each step",
            f"make the model of a config with {', '.join(f'{drop}=0.0' for drop in drops)}",
        )
    reason = next((line.strip() for line in text.splitlines() if line.strip()), type(error).__name__)
    if not isinstance(error, TorchDynamoException):
        reason = f"{type(error).__name__}: {reason}"
    why = re.search(_RAISED, text) or re.search(r"(?:Explanation|Developer debug context): (.*)", text)
    what = f"{name} cannot be traced to one graph: {reason}" + (f" ({why[1].strip()})" if why else "")
    return error_at(line, what, _untraceable_fix(text, reason, loss, stacked))


def error_at(line: str, what: str, fix: str) -> CaptureError:
    """Return a CaptureError with the text ``what`` and the ``fix``, whose source is the user's ``line``
    (``file:line``). If that is "", the source is the line that calls shardc.
    """
    return CaptureError(what, source=line or calling_line(), fix=fix)


def _result_error(text: str, model: nn.Module, loss: Callable[..., object] | None) -> CaptureError | None:
    """Return the error for a result of ``model`` or ``loss`` that a program cannot have. None if ``text``, the message
    of the error in the trace, is about something else.
    """
    # _TRACED_GAVE and "Found <class" are the texts of `check_result` and AOTAutograd.
    name, model_line = type(model).__name__, user_frame([defined_at(type(model).forward)])
    if gave := re.search(rf"{_TRACED_GAVE}([^'\"\\]*)", text):
        if loss is None:
            return error_at(model_line, f"{name} returns no tensor", "return what a step computes")
        return error_at(
            user_frame([defined_at(loss.forward if isinstance(loss, nn.Module) else loss)]),
            f"the loss {getattr(loss, '__name__', type(loss).__name__)!r} gives {gave[1].strip()}, not one real number "
            "as a tensor",
            "return a tensor of one element: a mean or a sum, and no .item()",
        )
    if unknown := re.search(r"Found <class '(?:.*\.)?(\w+)'> in output", text):
        return error_at(
            model_line,
            f"{name} returns a {unknown[1]}, a class that torch's pytrees do not know",
            "return tensors, numbers, strings and None, in tuples, lists and dicts; of a dataclass, call "
            f"torch.export.register_dataclass({unknown[1]}) once",
        )
    return None


def _untraceable_fix(text: str, reason: str, loss: Callable[..., object] | None, stacked: bool) -> str:
    """Return the fix for code that Dynamo refuses with the message ``text``, whose first line is ``reason``.

    Args:
        stacked: whether the model has parameters of three dims, as experts have.
    """
    hint = re.search(r"Hint: (.*)", text) if "tolist()" not in reason else None  # Dynamo's own advice
    if re.search(_RAISED, text):
        return "mend what raises there; if it does not raise uncompiled, write that line in another way"
    if "ata-dependent branching" in text:
        return "compute both and choose, by torch.where(condition, a, b), or write torch.cond(condition, f, g, (x,))"
    if loss is not None and "as_proxy" in text:
        return (
            "pass tensors to functions of torch: if the model returns an object, take the tensor out of it in the "
            "loss, as in loss=lambda output, target: cross_entropy(output.logits, target)"
        )
    if hint and not re.search(_VAGUE_HINTS, hint[1]):
        return hint[1].strip()
    if hint or re.search("returned non-Tensor|shape_env should not be None|as_proxy", text):
        return (
            "take this out of forward: do it before the call and pass the result, or write it with operations of torch"
        )
    experts = _FIX_EXPERTS if "tolist()" in text and stacked else ""
    return f"write this line with tensor operations whose shapes do not depend on values{experts}"


_RAISED = r"(raised exception .*)"
# Dynamo's hints for its own developers, or for models in which graph breaks are allowed.
_VAGUE_HINTS = (
    "write Dynamo tracing rules|file an issue|graph break is fundamental|set_stance|backtrace further above|"
    "custom operator|[Rr]eport an issue"
)
_FIX_EXPERTS = "; if rows go to experts here, write one expert as a function under @shardc.experts"
_FIX_INPUTS = (
    "pass inputs that it runs on uncompiled, of the same shapes and dtypes; shapes are those of the parts of all ranks "
    "together: of an input that every rank passes whole (a mask, say), write shardc.Plan(inputs={'mask': '...'})"
)


def line_with(text: str, model: nn.Module) -> str | None:
    """Return ``file:line`` of the first line with ``text`` in a module's forward, over all modules of ``model``; None
    if there is none.
    """
    for module in model.modules():
        with suppress(OSError, TypeError):  # no source
            lines, first = inspect.getsourcelines(type(module).forward)
            for at, line in enumerate(lines):
                if text in line:
                    return f"{inspect.getsourcefile(type(module).forward)}:{first + at}"
    return None


def _layer_drops(model: nn.Module) -> list[str]:
    """Return the names of the config entries for LayerDrop (random skipping of layers) that are not 0, in the configs
    of ``model`` and its modules. None are returned in evaluation.
    """
    configs = [vars(module).get("config") for module in model.modules()] if model.training else []
    rates = chain.from_iterable(getattr(config, "__dict__", {}).items() for config in configs)
    return list(dict.fromkeys(name for name, rate in rates if "layerdrop" in name and rate))


def _inputs_text(inputs: Sequence[tuple[str, Tensor]]) -> str:
    """Return the dtypes and shapes of ``inputs`` (name, example) as text."""
    listed = [f"{name}: {torch_name(x.dtype)}{list(x.shape)}" for name, x in inputs]
    return ", ".join(listed) or "no tensors"


def check_result(out: PyTree, is_loss: bool) -> None:
    """Raises ValueError if a model cannot be traced with the result ``out``: a loss must be a real tensor of one
    element, and a result must have a tensor and only values of known classes.

    It runs inside the trace. By the texts of its errors, `_result_error` makes the error that the user sees.
    """
    if is_loss and not (isinstance(out, Tensor) and out.numel() == 1 and not out.is_complex()):
        kind = f"a tensor of {out.dtype}, {list(out.shape)}" if isinstance(out, Tensor) else f"a {type(out).__name__}"
        raise ValueError(f"{_TRACED_GAVE}{kind}")
    leaves = pytree.tree_leaves(out)
    has_tensor = any(isinstance(x, Tensor) for x in leaves)
    for x in leaves:  # where there is a tensor, AOTAutograd refuses all other unknown classes
        if isinstance(x, Enum | np.ndarray) or not (has_tensor or isinstance(x, int | float | str | None)):
            raise ValueError(f"Found <class '{type(x).__name__}'> in output")  # as AOTAutograd says it
    if not has_tensor:
        raise ValueError(f"{_TRACED_GAVE}no tensor")


def check_dtypes(graph: fx.Graph, uncast: tuple[str, str]) -> None:
    """Raises CaptureError if a matrix product or convolution has operands of different dtypes, which fake tensors
    accept and kernels do not. ``uncast`` is the result of `Dtypes.uncast`: (further cause, fix).
    """
    for node in graph.nodes:
        if node.target in _PRODUCTS:
            dtypes = dict.fromkeys(x.meta["val"].dtype for x in node.all_input_nodes)  # a set in order
            if len(dtypes) > 1:
                cause, fix = uncast
                inputs = [(role(n).name, n.meta["val"]) for n in placeholders(graph, "input")]
                raise error_at(
                    info(node).origin.source,
                    f"{node.target} is given {' and '.join(torch_name(x) for x in dtypes)}; the inputs "
                    f"are {_inputs_text(inputs)}{cause and '; '}{cause}",
                    fix or "pass inputs of the parameters' dtype, or cast where the model multiplies",
                )


def refuse_sparse(graph: fx.Graph) -> None:
    """Raises CaptureError if the graph has a sparse tensor, such as the gradient of a sparse embedding."""
    for node in graph.nodes:
        results = [x for x in pytree.tree_leaves(node.meta.get("val")) if isinstance(x, Tensor)]
        if any(x.layout is not torch.strided for x in results):
            raise error_at(
                line_of(node),
                f"{node.target} makes a sparse tensor, which no rank can hold a shard of",
                "leave sparse=True out of the embedding (or set module.sparse = False before compile), and use an "
                "optimizer for dense gradients; keep other sparse tensors as plain indices and values",
            )


COLLECTIVES = ("c10d_functional", "_c10d_functional")  # namespaces of collectives


def refuse_higher_order(graph: fx.Graph) -> None:
    """Raises CaptureError if the traced graph has a higher-order op or calls a collective."""
    for node in graph.nodes:
        if getattr(node.target, "namespace", "") in COLLECTIVES:
            raise error_at(
                line_of(node),
                f"forward calls the collective {node.target}, and a model is written for one device: a program has its "
                "own collectives",
                "leave it out: results are those of the whole batch; or write what each rank does with "
                "shardc.local_map",
            )
        if isinstance(node.target, torch._ops.HigherOrderOperator):
            name = node.target.name()
            fix = "write it with ops of torch, such as a Python loop over tensors that are traced one by one"
            if name.startswith("triton_kernel_wrapper"):
                fix = (
                    "launch the kernel in an op of torch.library.triton_op or custom_op, which runs on each rank at "
                    "the shapes of its shards, with shardc.register_rule for its rule"
                )
            raise error_at(line_of(node), f"the higher-order op {name} has no sharding rule", fix)
