"""States of torch and of the process that forward asks for: each value has its program, or the line is refused."""

from __future__ import annotations

import contextvars
import inspect
import os
import random
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

import shardc
from shardc.errors import CaptureError, InputError

Around = Callable[[], AbstractContextManager[Any]]
NAME = "SHARDC_TESTS_STATE"
CONFIG: dict[str, float] = {}
CONTEXT = contextvars.ContextVar("CONTEXT", default=2.0)
LOCAL = threading.local()
LOCAL.scale = 2.0
matmul = torch.backends.cuda.matmul


@contextmanager
def having(get: Callable[[], Any], put: Callable[[Any], Any], value: Any) -> Iterator[None]:
    before = get()
    put(value)
    try:
        yield
    finally:
        put(before)


def attribute(owner: Any, name: str, value: Any) -> Around:
    return lambda: having(lambda: getattr(owner, name), lambda x: setattr(owner, name, x), value)


def _setting(name: str, value: Any) -> Around:
    """One of `torch.backends`, whose attributes torch's own tests lock for a whole process."""
    get, put = (getattr(torch._C, f"_{verb}_{name}") for verb in ("get", "set"))
    return lambda: having(get, put, value)


def item(owner: Any, key: str, value: Any) -> Around:
    """A key that is there within the block only."""
    return lambda: having(lambda: None, lambda x: owner.pop(key) if x is None else owner.update({key: x}), value)


def autocast_of(kind: str, **what: Any) -> AbstractContextManager[Any]:
    if "dtype" in what:
        set_to = torch.set_autocast_dtype
        return having(lambda: torch.get_autocast_dtype(kind), lambda x: set_to(kind, x), what["dtype"])
    return having(lambda: torch.is_autocast_enabled(kind), lambda x: torch.set_autocast_enabled(kind, x), True)


def looked_up() -> float:
    try:
        return CONFIG["scale"]
    except KeyError:
        return 2.0


class Scale:
    scale = 2.0


class State(NamedTuple):
    """What forward asks for, as a number, and a block in which it is another."""

    asks: Callable[[], Any]
    around: Around


FOLLOWED: dict[str, State] = {
    "autocast": State(torch.is_autocast_enabled, lambda: autocast_of("cuda")),
    "autocast of another device": State(lambda: torch.is_autocast_enabled("cuda"), lambda: autocast_of("cuda")),
    "any autocast": State(torch._C._is_any_autocast_enabled, lambda: autocast_of("cuda")),
    "dtype of an autocast that is off": State(
        lambda: torch.get_autocast_dtype("cpu") == torch.bfloat16, lambda: autocast_of("cpu", dtype=torch.float16)
    ),
    "dtype of another device's autocast": State(
        lambda: torch.get_autocast_dtype("cuda") == torch.float16, lambda: autocast_of("cuda", dtype=torch.bfloat16)
    ),
    "autocast cache": State(
        torch.is_autocast_cache_enabled,
        lambda: having(torch.is_autocast_cache_enabled, torch.set_autocast_cache_enabled, False),
    ),
    "tf32": State(lambda: matmul.allow_tf32, attribute(matmul, "allow_tf32", True)),
    "reduced precision": State(
        lambda: matmul.allow_fp16_reduced_precision_reduction,
        attribute(matmul, "allow_fp16_reduced_precision_reduction", False),
    ),
    "cudnn": State(lambda: torch.backends.cudnn.benchmark, _setting("cudnn_benchmark", True)),
    "mkldnn": State(lambda: torch.backends.mkldnn.enabled, _setting("mkldnn_enabled", False)),
    "torch functions": State(torch._C._is_torch_function_enabled, torch._C.DisableTorchFunctionSubclass),
    "default device": State(lambda: torch.empty(0).is_meta, lambda: torch.device("meta")),
    "recursion": State(
        lambda: sys.getrecursionlimit() / 1000, lambda: having(sys.getrecursionlimit, sys.setrecursionlimit, 3000)
    ),
    "a variable": State(lambda: float(os.environ.get(NAME, "2")), item(os.environ, NAME, "3")),
    "a variable of a computed name": State(
        lambda: float(os.getenv(NAME[:3] + NAME[3:], "2")), item(os.environ, NAME, "3")
    ),
    "variables": State(lambda: any(each == NAME for each in os.environ), item(os.environ, NAME, "3")),
    "a key that is not there": State(looked_up, item(CONFIG, "scale", 3.0)),
    "a local of the thread": State(lambda: LOCAL.scale, attribute(LOCAL, "scale", 3.0)),
    "an attribute of a class": State(lambda: Scale.scale, attribute(Scale, "scale", 3.0)),
    "arguments": State(lambda: len(sys.argv), attribute(sys, "argv", ["one", "two", "three"] * 5)),
}  # fmt: skip
REFUSED: dict[str, Callable[[], Any]] = {
    "inference mode": torch.is_inference_mode_enabled,
    "precision": lambda: torch.get_float32_matmul_precision() == "highest",
    "anomalies": torch.is_anomaly_enabled,
    "threads": torch.get_num_threads,
    "seed": torch.initial_seed,
    "generator": lambda: torch.get_rng_state()[0],
    "dispatch": lambda: torch.utils._python_dispatch._get_current_dispatch_mode() is None,
    "transforms": lambda: torch._C._functorch.peek_interpreter_stack() is None,
    "profiler": torch._C._autograd._profiler_enabled,
    "attention": torch.backends.cuda.flash_sdp_enabled,
    "default device": lambda: torch.get_default_device().type == "cpu",
    "time": time.time,
    "random": random.random,
    "process": os.getpid,
    "thread": threading.get_ident,
    "context": CONTEXT.get,
}


class Net(nn.Module):
    def __init__(self, asks: Callable[[], Any]) -> None:
        super().__init__()
        self.linear, self.asks = nn.Linear(4, 4), asks

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x) * (1 + float(self.asks()))


def pair(asks: Callable[[], Any]) -> tuple[Any, Net]:
    torch.manual_seed(0)
    model = Net(asks)
    return shardc.compile(model, shardc.Mesh(dp=2), shardc.fsdp("dp"), backend="eager"), model


@pytest.mark.parametrize("what", FOLLOWED)
def test_each_value_has_its_program(what: str) -> None:
    module, model = pair(FOLLOWED[what].asks)
    x, seen = torch.ones(4, 4), []
    for around in (None, FOLLOWED[what].around, None):
        with warnings.catch_warnings() if around is None else around():
            ours, theirs = shardc.Simulation(module)(x), model(x)
        torch.testing.assert_close(ours, theirs.detach())
        seen.append(theirs.detach())
    assert torch.equal(seen[0], seen[2]) and not torch.equal(seen[0], seen[1])
    assert len(module.shardc.programs) == 2


def parameters_of_a_function() -> int:
    """Asks for a signature, which reads the recursion limit, as `torch.nn.attention.flex_attention` does of masks."""
    return len(inspect.signature(looked_up).parameters) + 1


def test_a_limit_of_python_that_its_own_code_reads_makes_no_difference() -> None:
    module, model = pair(parameters_of_a_function)
    x = torch.ones(4, 4)
    for limit in (sys.getrecursionlimit(), 3000):
        with having(sys.getrecursionlimit, sys.setrecursionlimit, limit):
            torch.testing.assert_close(shardc.Simulation(module)(x), model(x).detach())
    assert len(module.shardc.programs) == 1


@pytest.mark.parametrize("what", REFUSED)
def test_what_cannot_be_followed_is_refused(what: str) -> None:
    module, _ = pair(REFUSED[what])
    with pytest.raises(CaptureError) as raised:
        module.lower(torch.ones(4, 4))
    assert raised.value.source and raised.value.fix


def test_a_mode_that_sees_functions_of_torch_is_refused() -> None:
    class Doubles(TorchFunctionMode):
        def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            return function(*args, **(kwargs or {}))

    module, _ = pair(lambda: 2)
    shardc.Simulation(module)(torch.ones(4, 4))
    with Doubles(), pytest.raises(InputError, match="Doubles"):
        shardc.Simulation(module)(torch.ones(4, 4))
