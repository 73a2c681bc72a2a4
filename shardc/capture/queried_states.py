"""Records states of torch that traced code reads by a call, such as the default dtype: Dynamo makes them constants."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from operator import attrgetter
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, fx
from torch._dynamo.exc import Unsupported
from torch._dynamo.utils import np
from torch._dynamo.variables import ConstantVariable, PolyfilledFunctionVariable, UserFunctionVariable
from torch._dynamo.variables.misc import NumpyVariable
from torch._dynamo.variables.torch import TorchInGraphFunctionVariable

from shardc._compat import FakeTensor
from shardc.capture.grad_mode import GradMode
from shardc.ir.reads import Read
from shardc.ir.states import GRAD_MODE, STATES
from shardc.ir.told import is_told

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
_INTERPRETERS = torch._C._functorch.peek_interpreter_stack  # Dynamo answers as if no transform were active


@contextmanager
def recorded_states() -> Iterator[set[Read]]:
    """Collects the states of torch and of the process that a trace in the block reads.

    The grad mode counts if code outside of torch reads it: torch's own code computes the same in both modes.
    """
    reads = set() if torch.is_grad_enabled() else {Read(GRAD_MODE)}
    call, grad_mode = TorchInGraphFunctionVariable.call_function, GradMode(reads)

    def note(name: str, args: Any, kwargs: Any) -> None:
        constants = [x.as_python_constant() for x in (*args, *kwargs.values())]
        if not all(isinstance(x, _LITERALS) for x in constants):
            raise Unsupported(f"a state, {name}, of {constants}")
        reads.add(Read(f"{name}({', '.join(map(repr, constants))})"))

    def call_function(self: Any, tx: Any, args: Any, kwargs: Any) -> Any:
        name = _NAMES.get(self.value)
        if name == "torch.is_grad_enabled":
            grad_mode.note(tx)
        elif name is not None:
            note(name, args, kwargs)
        elif self.value is _INTERPRETERS and not is_told(tx.f_code):
            raise Unsupported("a state, whether it runs under a transform of torch.func,")
        elif self.can_constant_fold_through() and not _is_pure(self.value):
            raise Unsupported(f"a state, {getattr(self.value, '__name__', self.value)}")
        return call(self, tx, args, kwargs)

    def of_python(before: Callable[..., Any]) -> Callable[..., Any]:
        def call_function(self: Any, tx: Any, args: Any, kwargs: Any) -> Any:
            if (name := _NAMES.get(self.fn)) is not None:
                note(name, args, kwargs)
            return before(self, tx, args, kwargs)

        return call_function

    of_numpy = NumpyVariable.call_function

    def call_numpy(self: Any, tx: Any, args: Any, kwargs: Any) -> Any:
        operands = (*args, *kwargs.values())
        if _is_number_of_numpy(self.value) and all(x.is_python_constant() for x in operands):
            number = self.value(
                *(x.as_python_constant() for x in args),
                **{name: x.as_python_constant() for name, x in kwargs.items()},
            )
            if isinstance(number, np.generic):
                return ConstantVariable.create(number.item())
        return of_numpy(self, tx, args, kwargs)

    with (
        patch.object(NumpyVariable, "call_function", call_numpy),
        patch.object(TorchInGraphFunctionVariable, "call_function", call_function),
        patch.object(UserFunctionVariable, "call_function", of_python(UserFunctionVariable.call_function)),
        patch.object(PolyfilledFunctionVariable, "call_function", of_python(PolyfilledFunctionVariable.call_function)),
        grad_mode.recorded_tensor_reads(),
    ):
        yield reads


def _of_torch(path: str) -> Any:
    x: Any = torch
    for name in path.split("."):
        x = getattr(x, name, None)
    return x


# By function, not by name: a user's function may have the same name.
_PURE_FUNCTIONS = {*filter(callable, vars(math).values()), *filter(callable, map(_of_torch, _PURE))}


def _is_number_of_numpy(function: Any) -> bool:
    """Return whether a NumPy function maps numbers to a number, such as ``np.prod(x.shape)`` and ``np.sqrt(4)``."""
    return np is not None and (isinstance(function, np.ufunc) or function in (np.prod, np.sum, np.min, np.max, np.mean))


def _is_pure(function: Any) -> bool:
    return function in _PURE_FUNCTIONS


def value_numbers(gm: fx.GraphModule, numbers: dict[Any, int], with_gradients: bool = True) -> list[Any]:
    """Return a list with one value number per output of a joint graph: outputs computed by the same ops from equal
    operands have equal numbers, also in different graphs that share ``numbers``.

    Args:
        numbers: value of a node (op and operands) -> its number; extended.
        with_gradients: whether the list has the gradient outputs too.
    """
    node_numbers: dict[fx.Node, int] = {}

    def of(x: Any) -> Any:
        return fx.node.map_arg(x, lambda node: f"%{node_numbers[node]}")

    for at, node in enumerate(gm.graph.nodes):
        key: Any = (node.op, at)
        if node.op == "get_attr":
            constant = attrgetter(str(node.target))(gm)
            key = (
                repr(constant.tolist())
                if isinstance(constant, Tensor) and not isinstance(constant, FakeTensor)
                else id(constant)
            )
        elif node.target is torch.ops.aten.detach.default:
            node_numbers[node] = node_numbers[node.args[0]]
            continue
        elif node.op == "call_function":
            key = str(node.target), repr(of((node.args, node.kwargs)))
        node_numbers[node] = numbers.setdefault(key, len(numbers))
    outputs = gm.graph.output_node()
    described = zip(outputs.args[0], outputs.meta["desc"], strict=True)
    return [of(x) for x, desc in described if with_gradients or desc and type(desc).__name__ != "GradAOTOutput"]
