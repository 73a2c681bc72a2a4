"""Records which states of torch a trace reads, such as the default dtype or the grad mode. They become guards of the
capture.

If code reads a state by a call, Dynamo makes the result a constant. The grad mode may also be read from a computed
tensor, by ``requires_grad`` or ``is_leaf``. Reads that cannot become a guard are refused.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from operator import attrgetter
from typing import Any, NoReturn
from unittest.mock import patch

import torch
from torch import Tensor, fx
from torch._dynamo.exc import Unsupported
from torch._dynamo.side_effects import SideEffects
from torch._dynamo.symbolic_convert import InstructionTranslatorBase
from torch._dynamo.trace_rules import get_torch_obj_rule_map
from torch._dynamo.utils import np
from torch._dynamo.variables import ConstantVariable, PolyfilledFunctionVariable, TensorVariable, UserFunctionVariable
from torch._dynamo.variables.base import VariableTracker
from torch._dynamo.variables.ctx_manager import GradModeVariable, InferenceModeVariable
from torch._dynamo.variables.higher_order_ops import CheckpointHigherOrderVariable
from torch._dynamo.variables.misc import AutogradFunctionContextVariable, NumpyVariable
from torch._dynamo.variables.torch import TorchCtxManagerClassVariable, TorchInGraphFunctionVariable

from shardc._compat import FakeTensor
from shardc.capture.slices import memory_of
from shardc.ir.code import is_versioned
from shardc.ir.guards import GRAD_MODE, INFERENCE_MODE, STATES, Read, in_inference_mode

_NAMES = {function: name for name, function in STATES.items()}
_LITERALS = (bool, int, float, str, type(None))
# Functions that Dynamo evaluates in a trace and that depend on arguments, machine and process only, by their path in
# torch; not every version has all of them.
_PURE = {
    "_assert", "_utils._get_device_index", "accelerator.is_available", "cuda.is_available", "xpu.is_available",
    "distributed.is_available", "cuda.get_device_properties", "xpu.get_device_properties", "is_complex",
    "is_floating_point", "nn.functional._Reduction.get_enum", "promote_types", "_C._get_privateuse1_backend_name",
    "cuda.is_initialized", "xpu.is_initialized", "distributed.is_initialized", "distributed.get_rank",
    "distributed.get_world_size",
}  # fmt: skip
Args = list[VariableTracker]
Kwargs = dict[str, VariableTracker]
Traced = Callable[..., Any]  # a method by which Dynamo traces something; its first argument is the variable
Translator = InstructionTranslatorBase
_INTERPRETERS = torch._C._functorch.peek_interpreter_stack  # Dynamo answers as if no transform were active


@contextmanager
def recorded_states() -> Iterator[set[Read]]:
    """Context manager that yields a set. A trace in the block adds a `Read` for each state of torch or of the process
    that it reads, such as the default dtype.

    The grad mode counts if code outside of torch reads it: torch's own code computes the same in both modes.
    """
    # A trace without gradients serves calls without gradients only.
    reads = set() if torch.is_grad_enabled() else {Read(GRAD_MODE)}
    grad_mode = GradMode(reads)

    def note(name: str, args: Args, kwargs: Kwargs) -> None:
        constants = [x.as_python_constant() for x in (*args, *kwargs.values())]
        if not all(isinstance(x, _LITERALS) for x in constants):
            raise Unsupported(f"a state, {name}, of {constants}")
        reads.add(Read(f"{name}({', '.join(map(repr, constants))})"))

    def call_torch(original: Traced, this: Any, tx: Translator, args: Args, kwargs: Kwargs) -> VariableTracker:
        # A state with a name becomes a guard; another function that Dynamo would make a constant must be pure.
        name = _NAMES.get(this.value)
        if name == "torch.is_grad_enabled":
            grad_mode.note(tx)
        elif name is not None:
            note(name, args, kwargs)
        elif this.value is _INTERPRETERS and not is_versioned(tx.f_code):
            raise Unsupported("a state, whether it runs under a transform of torch.func,")
        elif this.can_constant_fold_through() and this.value not in _PURE_FUNCTIONS:
            raise Unsupported(f"a state, {getattr(this.value, '__name__', this.value)}")
        return original(this, tx, args, kwargs)

    def call_python(original: Traced, this: Any, tx: Translator, args: Args, kwargs: Kwargs) -> VariableTracker:
        # What Python's own code returns (`inspect.signature`) ignores the recursion limit, which Inductor raises.
        ignores_limit = this.fn is sys.getrecursionlimit and is_versioned(tx.f_code)
        if (name := _NAMES.get(this.fn)) is not None and not ignores_limit:
            note(name, args, kwargs)
        return original(this, tx, args, kwargs)

    with (
        _around(NumpyVariable, "call_function", _call_numpy),
        _around(TorchInGraphFunctionVariable, "call_function", call_torch),
        _around(UserFunctionVariable, "call_function", call_python),
        _around(PolyfilledFunctionVariable, "call_function", call_python),
        grad_mode.recorded_tensor_reads(),
    ):
        yield reads


def _around(owner: type, name: str, handler: Traced) -> AbstractContextManager[object]:
    """Return a context manager in which the method ``owner.name`` of Dynamo is replaced: a call with arguments ``args``
    is ``handler(original, *args)``.
    """
    original = getattr(owner, name, None)
    return patch.object(owner, name, lambda *args, **kwargs: handler(original, *args, **kwargs), create=True)


def _call_numpy(original: Traced, this: Any, tx: Translator, args: Args, kwargs: Kwargs) -> VariableTracker:
    """Traces a call of a NumPy function. One of constants that gives a number is evaluated: Dynamo would trace it to an
    array, which cannot be a size.
    """
    if _is_number_of_numpy(this.value) and all(x.is_python_constant() for x in (*args, *kwargs.values())):
        number = this.value(
            *(x.as_python_constant() for x in args),
            **{name: x.as_python_constant() for name, x in kwargs.items()},
        )
        if isinstance(number, np.generic):  # a scalar of NumPy's, and no array
            return ConstantVariable.create(number.item())
    return original(this, tx, args, kwargs)


def _of_torch(path: str) -> object:
    """Return the object at the dotted ``path`` in torch, or None."""
    x: object = torch
    for name in path.split("."):
        x = getattr(x, name, None)
    return x


# Depend on their arguments, machine and process only. By function: a user's function may have the same name.
_PURE_FUNCTIONS = {*filter(callable, vars(math).values()), *filter(callable, map(_of_torch, _PURE))}


def _is_number_of_numpy(function: object) -> bool:
    """Return whether ``function`` is a NumPy function that gives a number for numbers, such as ``np.prod`` and
    ``np.sqrt``.
    """
    return np is not None and (isinstance(function, np.ufunc) or function in (np.prod, np.sum, np.min, np.max, np.mean))


def value_numbers(gm: fx.GraphModule, numbers: dict[Hashable, int], with_gradients: bool = True) -> list[object]:
    """Return a text such as ``%3`` for each output of a joint graph: outputs that the same ops compute from equal
    operands have equal texts. Outputs of several graphs can be compared if these share ``numbers``.

    Args:
        numbers: value of a node (op and operands) -> its number; extended.
        with_gradients: whether the list has the gradient outputs too.
    """
    node_numbers: dict[fx.Node, int] = {}

    def numbered(x: fx.node.Argument) -> object:
        return fx.node.map_arg(x, lambda node: f"%{node_numbers[node]}")

    for at, node in enumerate(gm.graph.nodes):
        key: Hashable = (node.op, at)  # of a placeholder, its position
        if node.op == "get_attr":
            # By value, as each graph has constants of its own; a fake tensor has none.
            constant = attrgetter(str(node.target))(gm)
            key = (
                repr(constant.tolist())
                if isinstance(constant, Tensor) and not isinstance(constant, FakeTensor)
                else id(constant)
            )
        elif node.target is torch.ops.aten.detach.default:  # the same value
            node_numbers[node] = node_numbers[node.args[0]]
            continue
        elif node.op == "call_function":
            key = str(node.target), repr(numbered((node.args, node.kwargs)))
        node_numbers[node] = numbers.setdefault(key, len(numbers))
    outputs = gm.graph.output_node()
    described = zip(outputs.args[0], outputs.meta["desc"], strict=True)
    return [numbered(x) for x, desc in described if with_gradients or desc and type(desc).__name__ != "GradAOTOutput"]


# Attributes of a computed tensor if gradients are recorded; in inference mode the value is the opposite.
_RECORDED = {"requires_grad": True, "is_leaf": False}
# Context managers whose ``mode`` Dynamo takes by position only.
_BY_MODE = (torch.set_grad_enabled, torch.inference_mode)


class GradMode:
    """Notes reads of the grad mode and of inference mode during a trace, in the set ``reads``, so that they become
    guards.

    A computed tensor requires no gradient in inference mode, also under `torch.enable_grad`. A capture runs outside of
    that mode, so the answer is computed here. A read in a reentrant checkpoint is refused: one device runs its code
    twice, without gradients in forward and with them in backward.
    """

    def __init__(self, reads: set[Read]) -> None:
        self._reads = reads
        self._reentrant = 0  # how many reentrant checkpoints the trace is in
        self._inference: list[bool] = []  # modes of the inference_mode blocks that the trace is in
        self._left = False  # whether forward entered inference_mode(False)

    def note(self, tx: Translator) -> bool:
        """Notes that the code being traced reads the grad mode, and returns True. For torch's own code it notes nothing
        and returns False.

        Raises Unsupported in a reentrant checkpoint, whose code runs in both grad modes.
        """
        # A polyfill is Dynamo's code for a function that the user's code calls.
        of_torch = is_versioned(tx.f_code) and "polyfills" not in tx.f_code.co_filename
        if of_torch:
            return False
        if self._reentrant:
            raise Unsupported("the grad mode in a reentrant checkpoint")
        self._reads.add(Read(GRAD_MODE))
        return True

    @contextmanager
    def recorded_tensor_reads(self) -> Iterator[None]:
        """Context manager in which a trace notes reads of the grad mode through tensors (``requires_grad``,
        ``is_leaf``) and autograd contexts. Such a read has the result that it has in the user's call, also in inference
        mode.
        """
        with (
            # A function decorated with `set_grad_enabled` calls this method, which Dynamo is to inline.
            patch.dict(get_torch_obj_rule_map(), {torch.set_grad_enabled.clone: UserFunctionVariable}),
            _around(TorchCtxManagerClassVariable, "call_function", _call_context_manager),
            _around(TensorVariable, "var_getattr", self._tensor_attribute),
            _around(TensorVariable, "method_attr_grad", _grad_of_tensor),
            _around(TensorVariable, "method_backward", _refuse_backward),
            _around(TensorVariable, "_method_register_hook", _register_hook),
            _around(SideEffects, "store_attr", _store_attribute),
            _around(AutogradFunctionContextVariable, "var_getattr", self._context_attribute),
            _around(CheckpointHigherOrderVariable, "call_function", self._call_checkpoint),
            _around(InferenceModeVariable, "enter", self._enter_inference),
            _around(InferenceModeVariable, "exit", self._exit_inference),
            _around(GradModeVariable, "_call_func", self._set_grad_mode),
        ):
            yield

    def _tensor_attribute(self, original: Traced, this: Any, tx: Translator, name: str) -> VariableTracker:
        """Traces ``tensor.name``. ``requires_grad`` and ``is_leaf`` of a computed tensor depend on the grad mode and on
        inference mode: notes that these are read, and returns the value in the user's modes.
        """
        answer = original(this, tx, name)
        # Without a source, the tensor is computed in the trace.
        if this.source is None and name in _RECORDED and self.note(tx):
            return self._in_inference(name, answer, _is_view(this, tx))
        return answer

    def _context_attribute(self, original: Traced, this: Any, tx: Translator, name: str) -> VariableTracker:
        """Traces an attribute of the context of an autograd function. ``needs_input_grad`` reads the grad mode."""
        if name == "needs_input_grad" and not _in_backward(tx):
            self.note(tx)
        return original(this, tx, name)

    def _call_checkpoint(
        self, original: Traced, this: Any, tx: Translator, args: Args, kwargs: Kwargs
    ) -> VariableTracker:
        """Traces a checkpoint. Raises Unsupported for a reentrant one in which parameters would get no gradient."""
        flag = kwargs.get("use_reentrant")  # None stands for True, torch's default
        reentrant = torch.is_grad_enabled() and (flag is None or flag.as_python_constant() is not False)
        self._reentrant += reentrant
        try:
            result = original(this, tx, args, kwargs)
        finally:
            self._reentrant -= reentrant
        inputs = args[1:]  # behind the function
        if reentrant and _require_grad(getattr(result, "items", [result])) and not _require_grad(inputs):
            raise Unsupported("a reentrant checkpoint of inputs without gradients")
        return result

    def _enter_inference(self, original: Traced, this: Any, tx: Translator) -> VariableTracker:
        """Traces the entry of a block of `torch.inference_mode`."""
        self._inference.append(this.target_values[0])
        self._left |= not this.target_values[0]
        return original(this, tx)

    def _exit_inference(self, original: Traced, this: Any, tx: Translator, *args: VariableTracker) -> VariableTracker:
        """Traces the exit of a block of `torch.inference_mode`."""
        self._inference.pop()
        return original(this, tx, *args)

    def _set_grad_mode(self, original: Traced, this: Any, tx: Translator, values: Sequence[bool]) -> None:
        """Traces a change of the grad mode. Raises Unsupported if it enables gradients in inference mode."""
        if self._inference and self._inference[-1] and values[0]:
            raise Unsupported("gradients enabled in inference_mode()")
        original(this, tx, values)

    def _in_inference(self, name: str, answer: VariableTracker, view: bool) -> VariableTracker:
        """Correct ``answer``, Dynamo's value of a tensor's attribute ``name`` (``requires_grad``), for inference mode,
        and return it. ``view`` says whether the tensor is a view of a parameter, buffer or input.

        A view of a parameter requires a gradient there too, and what forward computes in ``inference_mode(False)`` may:
        such reads are refused.
        """
        # A tensor that records no gradient here records none in inference mode either, unless it is a view.
        records_gradient = answer.as_python_constant() is _RECORDED[name]
        if not (records_gradient or view):
            return answer
        self._reads.add(Read(INFERENCE_MODE))
        if not in_inference_mode():
            return answer
        if self._left or view:
            raise Unsupported("a tensor that is not of inference mode")
        return ConstantVariable.create(not _RECORDED[name])


def _call_context_manager(original: Traced, this: Any, tx: Translator, args: Args, kwargs: Kwargs) -> VariableTracker:
    """Traces the construction of a context manager of torch. A ``mode=`` of one in `_BY_MODE` is passed by position."""
    if this.value in _BY_MODE and kwargs.keys() == {"mode"}:
        args, kwargs = [*args, kwargs["mode"]], {}
    return original(this, tx, args, kwargs)


def _grad_of_tensor(original: Traced, this: Any, tx: Translator) -> VariableTracker:
    """Traces ``tensor.grad``: None for a computed tensor. Raises Unsupported for a parameter or an input."""
    if this.source is not None:
        raise Unsupported("the gradient of a parameter or an input")
    answer = original(this, tx)  # None if Dynamo does not know; a computed tensor keeps no gradient
    return ConstantVariable.create(None) if answer is None else answer


def _refuse_backward(*args: object, **kwargs: object) -> NoReturn:
    """Refuses ``tensor.backward()`` in forward."""
    raise Unsupported("a backward within forward")


def _register_hook(original: Traced, this: Any, *args: Any, **kwargs: Any) -> VariableTracker:
    """Traces ``tensor.register_hook``. Raises Unsupported for a parameter or an input."""
    if this.source is not None:
        raise Unsupported("a hook of a parameter or an input")
    return original(this, *args, **kwargs)


def _store_attribute(original: Traced, this: Any, item: VariableTracker, name: str, *how: Any) -> None:
    """Traces ``item.name = ...``. Raises Unsupported if it sets the gradient of a parameter or an input."""
    if name == "grad" and isinstance(item, TensorVariable) and item.source is not None:
        raise Unsupported("the gradient of a parameter or an input")
    original(this, item, name, *how)


def _is_view(this: TensorVariable, tx: Translator) -> bool:
    """Return whether ``this``, a tensor computed in a trace, is a view of a parameter, a buffer or an input."""
    nodes = [node for node in tx.output.graph.nodes if node.op in ("placeholder", "get_attr")]
    return memory_of(this.as_proxy().node) in {memory_of(node) for node in nodes}


def _require_grad(values: Sequence[object]) -> bool:
    """Return whether one of the traced ``values`` is a tensor that requires a gradient. As in autograd, tensors in
    lists do not count.
    """
    nodes = [x.as_proxy().node for x in values if isinstance(x, TensorVariable)]
    return any(node.meta["example_value"].requires_grad for node in nodes)


def _in_backward(translator: Translator) -> bool:
    """Return whether ``translator`` (Dynamo's tracer of a function) is inside of a backward that the user has
    written.
    """
    tx: Translator | None = translator
    while tx is not None and tx.f_code.co_name not in ("backward", "vjp"):
        tx = tx.parent
    return tx is not None
