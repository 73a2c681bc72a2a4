"""Captures a model by running it on fake tensors, if Dynamo refuses its code (for example gradients of gradients).

The model first runs once to be observed (`Run._observe`): which code runs, which Python values that code can read, what
it changes, and in which memory its outputs lie. AOTAutograd then runs it to trace forward and backward.
"""

from __future__ import annotations

import inspect
import pickle
import random
import re
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from contextvars import ContextVar
from functools import cache, partial
from itertools import count
from operator import attrgetter
from types import CodeType, FrameType, ModuleType
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
import torch.fx.traceback as fx_traceback
import torch.utils._pytree as pytree
from torch import Tensor, fx, nn
from torch._dynamo.exc import Unsupported
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.overrides import TorchFunctionMode
from torch.utils import checkpoint
from torch.utils.checkpoint import CheckpointFunction, CheckpointPolicy

from shardc._compat import PyTree
from shardc.capture.annotate import model_name
from shardc.capture.capture_errors import error_at, line_of
from shardc.capture.reachable_state import ReachableState
from shardc.capture.side_effects import (
    NOT_CHANGED,
    attributes_text,
    loaded_names,
    prints,
    reads_and_changes,
    replaced_buffers,
    restored,
)
from shardc.errors import CaptureError, ShardcWarning
from shardc.ir.code import calling_line, is_of_library, is_versioned, versioned_path
from shardc.ir.guards import GRAD_MODE, STATES, Read, Reads
from shardc.ir.returned import Memory

_TIMES = {name for name in vars(time) if name.startswith(("time", "perf_counter", "monotonic", "process_time"))}
# Functions -> Dynamo's message for them, which `REFUSALS` explains: of all tensors, of parameters and inputs.
_REFUSED: dict[object, str] = dict.fromkeys((Tensor.is_inference, torch.is_inference), "torch.is_inference")
_GRAD = Tensor.__dict__["grad"] if "grad" in Tensor.__dict__ else torch._C.TensorBase.__dict__["grad"]
_HOOKS = (Tensor.register_hook, Tensor.register_post_accumulate_grad_hook)
_OF_INPUTS: dict[object, str] = {
    **dict.fromkeys((_GRAD.__get__, _GRAD.__set__), "the gradient of a parameter or an input"),
    **dict.fromkeys(_HOOKS, "a hook of a parameter or an input"),
}
# Message about a draw of random numbers -> the state of their generator, in comparable form.
_GENERATORS: dict[str, Callable[[], object]] = {
    "a random number of Python's": random.getstate,
    "numpy.random": lambda: pickle.dumps(np.random.get_state(legacy=False)["state"]),
    "a state, that of torch's generator,": lambda: torch.get_rng_state().tolist(),
}


class Run:
    """Traces a root module by running it on fake tensors. After each run, all Python state that the run changed is
    restored.

    Args:
        root: the root module: a call returns outputs marked by `mark`; ``root.run(tensors)`` returns them unmarked.
        template: the user's model, of which ``root.model`` is a copy.
        loss: the loss.
        fakes: the fake tensor of each tensor input, in ``mode``.
        joint_of: traces a module by AOTAutograd.

    Attributes:
        joint: AOTAutograd's joint graph of the root module, with descriptors.
        memories: the `Memory` of each output.
        owners: storage id -> name of the tensor that owns the storage.
        warnings: warnings about side effects of forward.
    """

    def __init__(
        self, root: Any, template: nn.Module, loss: object, fakes: dict[str, Tensor], mode: FakeTensorMode,
        joint_of: Callable[[nn.Module], Any],
    ) -> None:  # fmt: skip
        self.root, self.mode, self._fakes = root, mode, fakes
        self._needed = [x.requires_grad for x in fakes.values()]
        self.codes: dict[CodeType, None] = {}  # code of the user's functions that ran, as an ordered set
        # Of the copy that runs, to restore; of the user's model, for guards.
        self._state, self._reads = (ReachableState(model, loss, root.objects) for model in (root.model, template))
        self._modules: list[str] = []  # paths of the modules that are running, the innermost last
        self._regions = count()  # numbers of checkpoint regions, from 0 in each run
        with self._recording_origins():
            self.memories, self.owners, self.warnings = self._observe()
            vars(root)["forward"] = self  # AOTAutograd's calls go through `__call__`
            self.joint = joint_of(root)
        self._refuse_foreign(self.joint.graph_module)

    def __call__(self, *tensors: Tensor) -> PyTree:
        """Run the root module and return its marked outputs. AOTAutograd calls this as the root module's forward."""
        self._regions = count()
        with restored(self.root.model):
            return self._run(partial(type(self.root).forward, self.root), tensors, {})

    def _run(self, run: Callable[..., PyTree], tensors: Sequence[Tensor], protected: dict[int, Any]) -> PyTree:
        """Call ``run(*tensors)`` and return its result. Afterwards restore the Python state that the call changed.

        Args:
            protected: id -> parameter or input on which `_Lines` refuses calls; {} for a run that is traced.
        """
        # An input without a gradient is passed as a new tensor: ``requires_grad_()`` in forward gives the step none.
        inputs = [x if needed else x.detach() for x, needed in zip(tensors, self._needed, strict=True)]
        try:
            with _Lines(protected):
                return run(*inputs)
        finally:
            self._state.restore()
            for key in ("nn_module_stack", "stack_trace", "recompute", "ac_graph_id"):
                fx_traceback.current_meta.pop(key, None)

    @contextmanager
    def _recording_origins(self) -> Iterator[None]:
        """Context manager in which each traced op gets the module, user line and checkpoint region that it comes from,
        in its node's meta.
        """
        with (
            ExitStack() as stack,
            # In a dict of its own, as a backward that runs modules again leaves notes after the forward.
            patch.object(fx_traceback, "current_meta", dict(fx_traceback.current_meta)),
            patch.object(checkpoint, "_checkpoint_without_reentrant_generator", self._region),
            patch.object(CheckpointFunction, "apply", self._reentrant),
            # Code that asks whether it is compiled gets the answer of Dynamo's trace.
            patch.object(torch.compiler, "_is_compiling_flag", True),
        ):
            for path, module in self.root.named_modules():
                stack.enter_context(module.register_forward_pre_hook(partial(self._enter, path), prepend=True))
                stack.enter_context(module.register_forward_hook(self._leave, always_call=True))
            yield

    def _enter(self, path: str, module: nn.Module, _: object) -> None:
        """Forward pre-hook that notes that the module at ``path`` runs, so that the ops that follow belong to it."""
        self._modules.append(path)
        fx_traceback.current_meta["nn_module_stack"] = {path: (path, type(module))}

    def _leave(self, *_: object) -> None:
        """Forward hook that notes that a module has ended, so that the ops that follow belong to the module around
        it.
        """
        self._modules.pop()
        path = self._modules[-1] if self._modules else ""
        fx_traceback.current_meta["nn_module_stack"] = {path: (path, nn.Module)}

    def _region(self, *_: object, **__: object) -> Iterator[None]:
        """Replaces torch's generator of a checkpoint: ops that run between its first and its second step are marked as
        one checkpoint region.
        """
        meta = fx_traceback.current_meta
        outer_region = {key: meta[key] for key in ("recompute", "ac_graph_id") if key in meta}
        # What lies in a region already keeps its number: `before` comes last.
        meta |= {"recompute": CheckpointPolicy.MUST_RECOMPUTE, "ac_graph_id": next(self._regions), **outer_region}
        yield
        for key in {"recompute", "ac_graph_id"} - outer_region.keys():
            fx_traceback.current_meta.pop(key, None)

    def _reentrant(self, function: Callable[..., PyTree], _: bool, *args: PyTree) -> PyTree:
        """Replaces ``CheckpointFunction.apply``: calls ``function`` as a checkpoint region and returns its result."""
        needs_grad = any(isinstance(x, Tensor) and x.requires_grad for x in args)
        region = self._region()
        next(region)  # enters the region
        out = function(*args)
        next(region, None)  # leaves it
        if torch.is_grad_enabled() and not needs_grad:
            if any(isinstance(x, Tensor) and x.requires_grad for x in pytree.tree_leaves(out)):
                raise Unsupported("a reentrant checkpoint of inputs without gradients")
        return out

    def _observe(self) -> tuple[tuple[Memory, ...], dict[int, str], list[ShardcWarning]]:
        """Runs the model once. Returns (the `Memory` of each output, storage id -> name of the tensor that owns the
        storage, warnings about side effects).

        Raises:
            CaptureError: forward replaces a buffer, or changes what it reads.
        """
        model = self.root.model
        named = {model_name(name): x for name, x in (*self.root.named_parameters(), *self.root.named_buffers())}
        named |= self._fakes
        # Of tensors that share a storage, the first one's name counts: it is set last.
        owners = {x.untyped_storage()._cdata: name for name, x in reversed(named.items())}
        required_grad = {name: x.requires_grad for name, x in named.items()}
        changed: list[tuple[str, str, object]] = []

        def run(*tensors: Tensor) -> PyTree:
            out = self.root.run(tensors)
            changed.extend(self._state.changes())
            return out

        generator_states = {message: state() for message, state in _GENERATORS.items()}
        outer_profile = sys.getprofile()
        with restored(model) as before, self.mode:
            sys.setprofile(self._profile)
            try:
                out = self._run(run, list(self._fakes.values()), {id(x): x for x in named.values()})
            finally:
                sys.setprofile(outer_profile)
            buffer_changes = replaced_buffers(before, self._line_of)
        # A random number drawn in forward would be a constant of the program.
        for message, state in _GENERATORS.items():
            if state() != generator_states[message]:
                raise Unsupported(message)
        self._refuse_acts(named, required_grad)
        memories = tuple(_memory(x) for x in pytree.tree_leaves(out) if isinstance(x, Tensor))
        return memories, owners, [*self._changes(changed, buffer_changes), *prints(self.codes)]

    def reads(self, _: object) -> Reads:
        """Return the `Reads`: guards on all Python values that the code that ran is known to read."""
        guards = {Read("model", "hooks"), Read(GRAD_MODE), *self._reads.reads, *self._reads.absent()}
        return Reads.of(guards, self._reads.scopes, self.codes, unseen=True)

    def _profile(self, frame: FrameType, event: str, called: Any) -> None:
        """Profile function (`sys.setprofile`) that records the user's functions that run. Raises Unsupported at a call
        that reads a state, such as the time or a random number.
        """
        # "call" is one of a Python function, whose frame is ``frame``; "c_call" one of ``called``, from ``frame``.
        code = frame.f_code
        if event == "call" and code not in self.codes and not is_versioned(code):
            self.codes[code] = None
            for state in (self._state, self._reads):
                state.add_globals(code, frame.f_globals)
        elif event == "call" and _is_state(code) and frame.f_back is not None and _is_user_code(frame.f_back):
            raise Unsupported(f"a state, {code.co_name}")
        elif event == "c_call":
            owner = getattr(called, "__self__", None)
            if isinstance(owner, random.Random):
                # Python's generator may be called by Dynamo, for a function that the model compiles itself.
                callers = (frame.f_code, frame.f_back.f_code) if frame.f_back is not None else (frame.f_code,)
                of_dynamo = any((versioned_path(x.co_filename) or "").startswith("torch/_dynamo/") for x in callers)
                raise Unsupported("a trace of Dynamo's" if of_dynamo else "a random number of Python's")
            if owner is time and called.__name__ in _TIMES and not is_versioned(code):
                raise Unsupported(f"builtin `time.{called.__name__}`")
            modules = {getattr(called, "__module__", ""), owner.__name__ if isinstance(owner, ModuleType) else ""}
            of_process = isinstance(owner, ContextVar) or not modules.isdisjoint(_STATE_MODULES)
            if of_process and called not in STATES.values() and _is_user_code(frame):
                raise Unsupported(f"a state, {called.__name__}")

    def _refuse_acts(self, named: dict[str, Tensor], needed: dict[str, bool]) -> None:
        """Raises Unsupported if forward did one of these to a parameter or input: changed its ``requires_grad``, gave
        it a gradient, or hooked it.

        Args:
            named: name -> parameter, buffer or input.
            needed: the same names -> whether it required a gradient before the run.
        """
        for name, x in named.items():
            if x.requires_grad != needed[name]:
                raise Unsupported("Unsupported Tensor.requires_grad_() call")
            if x.grad is not None:
                raise Unsupported("a backward within forward")
            if x._backward_hooks or getattr(x, "_post_accumulate_grad_hooks", None):
                raise Unsupported("a hook of a parameter or an input")

    def _changes(self, changed: list[tuple[str, str, object]], texts: list[str]) -> list[ShardcWarning]:
        """Return a warning for each global, and each attribute with a tensor in its new value, that forward changed.
        CaptureError if forward also reads a value that it changes.

        Args:
            changed: (expression, that of the changed object, new value) of each change.
            texts: warnings so far, extended.
        """
        names = loaded_names(self.codes)  # of attributes and globals that the code reads
        for expression, owner, value in changed:
            name = expression.rpartition(".")[2]
            if not name.isidentifier() or name in names:  # an item of a container has no name to look for
                raise reads_and_changes(expression, name, self._line_of(name))
            if not owner.startswith("model"):
                texts.append(f"the model changes {expression}")
            elif any(isinstance(x, Tensor) for x in pytree.tree_leaves(value)):
                path = ".".join(re.findall(r"_modules\['([^']+)'\]", owner))
                texts.append(attributes_text(path, [name]))
        return [ShardcWarning(f"{change} {NOT_CHANGED}") for change in dict.fromkeys(texts)]

    def _line_of(self, name: str) -> str | None:
        """Return ``file:line`` of the first line that changes ``name``, in the user's code that ran; None if no line is
        found.
        """
        # An assignment to it or an item of it, also augmented, or a call of a method of it.
        changes = re.compile(rf"\b{re.escape(name)}\b.*(?:[^=!<>]=[^=]|\.\w+\(|\]\s*=)")
        for code in self.codes:
            with suppress(OSError, TypeError):  # no source
                lines, first = inspect.getsourcelines(code)
                for at, line in enumerate(lines):
                    if changes.search(line):
                        return f"{code.co_filename}:{max(first, 1) + at}"
        return None

    def _refuse_foreign(self, gm: fx.GraphModule) -> None:
        """Raises CaptureError if the traced graph reads a tensor that needs a gradient and is no parameter of the
        model.
        """
        for node in gm.graph.find_nodes(op="get_attr"):
            x = attrgetter(str(node.target))(gm)
            if isinstance(x, Tensor) and x.requires_grad:
                raise error_at(
                    next(filter(None, map(line_of, node.users)), ""),
                    f"forward reads a tensor of shape {list(x.shape)} that needs a gradient and is no parameter of the "
                    "compiled model",
                    "reach it through self: register its module as an attribute",
                )


def _is_user_code(frame: FrameType) -> bool:
    """Return whether ``frame`` runs the user's code: not torch's, Python's, shardc's or an installed library's."""
    return not is_versioned(frame.f_code) and not is_of_library(str(frame.f_globals.get("__name__")))


_STATE_FILES = ("torch/random.py", "torch/backends/", "torch/utils/_python_dispatch.py", "torch/cuda/random.py")
# Of functions written in C.
_STATE_MODULES = ("posix", "nt", "_thread", "torch._C", "torch._C._autograd", "torch._C._functorch")


@cache
def _is_state(code: CodeType) -> bool:
    """Return whether ``code`` belongs to a function of torch that returns a global state, such as the random seed."""
    path = versioned_path(code.co_filename) or ""
    return path.startswith(_STATE_FILES) or path == "torch/__init__.py" and code.co_argcount == 0


def warn_of_unseen_reads(model: nn.Module, refused: CaptureError) -> ShardcWarning:
    """Return the warning for a model that was captured by running it, because Dynamo refused it for the reason in
    ``refused``.
    """
    return ShardcWarning(
        f"{refused.what} ({refused.source}): captured by running {type(model).__name__} on fake tensors. Attributes of "
        "its modules, and globals that its code names, are compared at each call. What it reads elsewhere keeps the "
        "value of the first call: globals of other modules, context variables, closures of functions that it makes, "
        "files, the environment. Such a program is not stored"
    )


class _Lines(TorchFunctionMode):
    """Notes the user's line of each call of a torch function. Refuses the functions in `_REFUSED`, and those in
    `_OF_INPUTS` if they are called on a parameter or input.

    Args:
        inputs: id -> parameter or input of the run to observe; {} for a run that is traced.
    """

    def __init__(self, inputs: dict[int, Tensor]) -> None:
        super().__init__()
        self._inputs = inputs

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        file, _, line = (calling_line() or "").rpartition(":")
        fx_traceback.current_meta["stack_trace"] = f'File "{file}", line {line}'
        message = _REFUSED.get(function) or (args and id(args[0]) in self._inputs and _OF_INPUTS.get(function))
        if message and not is_versioned(sys._getframe(1).f_code):
            raise Unsupported(message)
        # Only a call that changes ``requires_grad`` is refused.
        before = args and id(args[0]) in self._inputs and args[0].requires_grad
        out = function(*args, **(kwargs or {}))
        if function is Tensor.requires_grad_ and id(args[0]) in self._inputs and args[0].requires_grad != before:
            raise Unsupported("Unsupported Tensor.requires_grad_() call")
        return out


def _memory(x: Tensor) -> Memory:
    """Return the `Memory` of the output ``x``: an id of its storage, whether it is a view made by ``as_strided``, and
    whether torch refuses to change it in place.
    """
    # The autograd node tells by its name which op made a view; torch refuses writes to views of custom functions.
    kind = type(x.grad_fn).__name__ if x._is_view() else ""
    return Memory(
        x.untyped_storage()._cdata,
        "AsStrided" in kind,
        isinstance(x.grad_fn, torch.autograd.function.BackwardCFunction) and x._is_view(),
    )
