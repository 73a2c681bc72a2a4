"""`CudaGraphs` records functions as CUDA graphs. `host_read` finds an op of a program that makes the host wait, so
that the program cannot be recorded.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, Protocol, TypeVar
from weakref import WeakSet

import torch
from torch import Tensor, fx

from shardc.custom_ops import expert_ops
from shardc.custom_ops.function_ops import OPS
from shardc.ir import graph as ir
from shardc.ir.comm import MOVES, SEND_ROWS
from shardc.ir.comm_volume import arguments_of
from shardc.ir.executable import Executable

T = TypeVar("T")


class Recorder(Protocol):
    """Interface: records the kernels of a function, which must use tensors at fixed addresses, and repeats them.

    Attributes:
        capturable: whether optimizers must keep their counts of steps on the device.
    """

    capturable: bool

    def warm(self, function: Callable[[], T]) -> T:
        """Runs ``function`` once as preparation for its recording, and returns its result."""

    def record(self, function: Callable[[], T]) -> Callable[[], T]:
        """Returns a function that repeats the kernels of ``function``, and returns the same result tensors each time.

        What Python computes in ``function`` is computed once, here. It takes effect at the first repeat at the latest.
        """


class CudaGraphs:
    """Records functions as CUDA graphs. These share one memory pool, as each replay ends before the next starts."""

    capturable = True

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._side: Any = None  # stream on which functions are prepared and captured
        self._pool: Any = None  # memory pool of the graphs
        self._graphs: WeakSet[Any] = WeakSet()  # graphs that still exist

    def warm(self, function: Callable[[], T]) -> T:
        """Runs ``function`` on a side stream, as torch requires before a capture; returns its result."""
        if self._side is None:
            self._side = torch.cuda.Stream(self._device)
        self._side.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._side):
            result = function()
        torch.cuda.current_stream(self._device).wait_stream(self._side)
        return result

    def record(self, function: Callable[[], T]) -> Callable[[], T]:
        """Captures ``function`` as a CUDA graph, without running its kernels; returns a function that replays it into
        the same result tensors each time.
        """
        if not self._graphs:  # the allocator refuses a pool whose graphs are all gone
            self._pool = torch.cuda.graph_pool_handle()
        graph = torch.cuda.CUDAGraph()
        # Other threads (NCCL's watchdog) may ask for events meanwhile.
        with torch.cuda.graph(graph, pool=self._pool, stream=self._side, capture_error_mode="thread_local"):
            result = function()
        self._graphs.add(graph)

        def replayed() -> T:
            graph.replay()
            return result

        return replayed


class HostRead(NamedTuple):
    """An op for which the host waits, so that no CUDA graph can contain it.

    Args:
        node: the op.
        why: what the host waits for, as text.
        fix: what the user can do, as text.
    """

    node: fx.Node
    why: str
    fix: str


def host_read(program: Executable) -> HostRead | None:
    """Finds the first op of a step for which the host waits; None if there is none."""
    nodes = (node for half in program.step(True) for node in half.graph.nodes if node.op == "call_function")
    return next(filter(None, map(_host_read_of, nodes)), None)


def _host_read_of(node: fx.Node) -> HostRead | None:
    """Returns why the host waits for the op ``node``, and what to do; None if it does not wait."""
    if node.target in MOVES:  # copies between device and host
        return HostRead(node, "the host waits for its copies", 'leave save(..., on="host") out of the plan')
    if node.target is SEND_ROWS:
        return HostRead(node, "the host reads how many rows each rank sends", _FIXED_ROWS)
    # A scan with `steps` runs a number of steps that the host reads from this tensor.
    if node.target in _LOOPS or (node.target is OPS["scan"] and arguments_of(node).get("steps") is not None):
        return HostRead(node, "the host reads which function runs next", "write it with torch.where")
    if node.target not in _EXPERTS:
        return None
    if arguments_of(node)["waits"]:
        return HostRead(node, "the host reads how many rows the experts have", _FIXED_ROWS)
    x: Any = ir.value(arguments_of(node)["x"])
    if x.dtype == torch.bfloat16:  # one grouped product for all experts, which reads numbers of rows on the device
        return None
    return HostRead(
        node,
        "experts outside of bfloat16 run one after another, and the host reads how many rows each has",
        "compute the experts in bfloat16, by shardc.precision(param=torch.bfloat16)",
    )


_FIXED_ROWS = 'give the experts room for a fixed number of rows, by shardc.ep(..., dispatch="bounded", capacity=1.5)'
_LOOPS = {OPS[name] for name in ("cond", "while_loop", "loop_gradient")}
_EXPERTS = {expert_ops.RUN, expert_ops.RUN_GRADIENT}


def hooked(parameters: Mapping[str, Tensor]) -> str | None:
    """Returns the name of the first of ``parameters`` with a hook on its gradient; None if there is none."""
    with torch._C.DisableTorchFunctionSubclass():  # reads the attributes directly
        return next(
            (name for name, x in parameters.items() if x._backward_hooks or x._post_accumulate_grad_hooks), None
        )


def address(x: Tensor) -> tuple[int, torch.dtype]:
    """Returns (address, dtype) of a tensor, or of the local tensor of a DTensor."""
    local: Tensor = getattr(x, "_local_tensor", x)
    return local.data_ptr(), local.dtype
