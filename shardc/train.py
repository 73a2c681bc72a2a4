"""`train_step` and `value_and_grad`: a training step, or its loss and gradients, as one call."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from math import prod
from time import perf_counter
from typing import Annotated, Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from shardc._compat import PyTree, pytree
from shardc.errors import BackwardError, InputError
from shardc.runtime.cuda_graphs import Recorder
from shardc.runtime.graphed_step import GraphedStep, recorder_of
from shardc.runtime.module import ShardedModule
from shardc.validate import Range, typed


class TrainStep:
    """A training step of a module, from `train_step`: a call takes the module's arguments and returns the loss.

    Attributes:
        norm: global norm of the gradients of the last update, before they were clipped: a scalar on the module's
            device, the same on every rank. None without ``max_norm``, and before the first update.
    """

    def __init__(
        self,
        module: ShardedModule,
        optimizer: torch.optim.Optimizer,
        max_norm: float | None,
        scheduler: LRScheduler | None,
        recorder: Recorder | None = None,
    ) -> None:
        self.norm: Tensor | None = None
        self._module, self._optimizer, self._max_norm, self._scheduler = module, optimizer, max_norm, scheduler
        # Tokens of the calls since a time of `perf_counter`, which is -1 before the first call.
        self._tokens, self._since = 0, -1.0
        self._graphed = None if recorder is None else GraphedStep(module, optimizer, self._update, recorder)

    def __call__(self, *args: PyTree, **kwargs: PyTree) -> Tensor:
        """Runs one training step and returns the detached loss."""
        with self._module.shardc.shares_errors():
            loss = self._step(*args, **kwargs)
        if self._since < 0:  # the first call compiles, and is not counted
            self._since = perf_counter()
        else:
            self._tokens += _tokens(self._module.shardc.cache.shapes, args, kwargs)
        return loss

    def tokens_per_second(self) -> float:
        """Returns the tokens per second of all ranks together, measured over the calls since this property was last
        read.

        The first call, which compiles, does not count. Tokens are the elements of a call's first tensor, if it holds
        integers in two dims or more; without tokens or calls the rate is 0. An accelerator runs behind its host: read
        the loss first (``loss.item()``).
        """
        now, tokens = perf_counter(), self._tokens
        seconds = now - self._since
        if tokens:
            self._tokens, self._since = 0, now
        return tokens / seconds if tokens else 0.0

    def _step(self, *args: PyTree, **kwargs: PyTree) -> Tensor:
        steps = not self._module.shardc.params.sync.unreduced()
        loss, norm = self._update(*args, **kwargs) if self._graphed is None else self._graphed(args, kwargs)
        if steps:
            self.norm = norm
            if self._scheduler is not None:
                self._scheduler.step()
        return loss

    def _update(self, *args: PyTree, **kwargs: PyTree) -> tuple[Tensor, Tensor | None]:
        """Runs a training step without the scheduler. Returns (detached loss, gradient norm); the norm is None without
        ``max_norm`` or an update.
        """
        with torch.enable_grad():
            loss = self._module(*args, **kwargs)
        _check_loss(loss, "the module")
        loss.backward()
        norm = None
        if not self._module.shardc.params.sync.unreduced():
            if self._max_norm is not None:
                norm = self._module.shardc.clip_grad_norm_(self._max_norm)
            self._optimizer.step()
            self._optimizer.zero_grad(set_to_none=True)
        return loss.detach(), norm


@typed()
def train_step(
    module: nn.Module,
    optimizer: torch.optim.Optimizer,
    *,
    max_norm: Annotated[float, Range(0)] | None = None,
    scheduler: LRScheduler | None = None,
    cuda_graph: bool = False,
) -> TrainStep:
    """Returns a function that takes the arguments of ``module``, runs one training step and returns the detached loss.

    It runs forward and backward, clips, updates, frees the gradients, and sets the next learning rate. With
    `shardc.optim.wrap` the update is one fused call on this rank's shards. Under ``module.no_sync()`` (or
    ``set_requires_grad_sync(False)``) a call only accumulates gradients for the next step.

    Args:
        module: from `shardc.compile`, with a ``loss``, or of a model that returns its loss.
        optimizer: of the module's parameters: torch's own, or from `shardc.optim.wrap`.
        max_norm: global norm to clip the gradients to before the update; the function's ``norm`` is then that of the
            last update. ``math.inf`` clips nothing.
        scheduler: sets the learning rates of ``optimizer``; it steps after each update.
        cuda_graph: the step is recorded as a CUDA graph, after some calls, and later calls replay it: the host then
            launches one kernel a step. Batches of other shapes get graphs of their own; a call that accumulates runs
            without one. Learning rates may change at any time; ``capturable`` of the optimizer is set to True.

    Raises:
        InputError: ``module``, ``optimizer`` or ``scheduler`` is something else, or the scheduler is of another
            optimizer or needs a metric; under ``cuda_graph``, the module is not on CUDA, or it or the optimizer does
            what a graph cannot; when the function runs, the loss is no scalar, or the program waits for the device.
    """
    sharded = _sharded(module)
    mine = {id(param) for param in module.parameters()}
    for group in optimizer.param_groups:
        for param in group["params"]:
            if id(param) not in mine:
                raise InputError(
                    f"the optimizer has a parameter of shape {list(param.shape)} that is none of the module's",
                    fix="make the optimizer of the compiled module's parameters: module.parameters()",
                )
    if isinstance(scheduler, ReduceLROnPlateau):
        raise InputError(
            "ReduceLROnPlateau steps on a metric, which a training step does not have",
            fix="leave scheduler out, and call scheduler.step(metric) in the loop",
        )
    if scheduler is not None and scheduler.optimizer is not optimizer:
        raise InputError("the scheduler is of another optimizer", fix="make the scheduler of the optimizer passed here")
    recorder = recorder_of(sharded, optimizer) if cuda_graph else None
    return TrainStep(sharded, optimizer, max_norm, scheduler, recorder)


@typed()
def value_and_grad(
    module: nn.Module, fn: Callable[..., Any] | None = None, *, has_aux: bool = False
) -> Callable[..., tuple[Any, dict[str, Tensor]]]:
    """Returns a function that returns ``(value, {name: gradient})`` and does not touch ``.grad``.

    Gradients are those that ``value.backward()`` would add to ``.grad``: DTensors with the parameters' layouts, for
    parameters that require a gradient; zeros for one that the value does not depend on.

    Args:
        module: from `shardc.compile`.
        fn: ``fn(module, *args, **kwargs)``, which calls ``module`` and returns a scalar. None calls ``module(*args,
            **kwargs)``, which returns its loss; forward, loss and backward are then one compiled step.
        has_aux: ``fn`` returns ``(scalar, anything)``; the value is then this pair, detached.

    Raises:
        InputError: ``module``, ``fn`` or ``has_aux`` is something else; when the function runs, the value is no scalar.
        BackwardError: when the function runs inside ``module.no_sync()``, or while gradients are unreduced.
    """
    sharded = _sharded(module)

    def call(*args: PyTree, **kwargs: PyTree) -> tuple[PyTree, dict[str, Tensor]]:
        sharded.shardc.params.sync.refuse("value_and_grad()")
        if sharded.shardc.params.sync.unreduced():
            raise BackwardError(
                "value_and_grad() while gradients are not to be reduced, by no_sync() or set_requires_grad_sync(False)",
                fix="call it outside of no_sync(), and add up the gradients that it returns",
            )
        with torch.enable_grad():
            out = module(*args, **kwargs) if fn is None else fn(module, *args, **kwargs)
        if has_aux and not (isinstance(out, tuple) and len(out) == 2):
            raise InputError("with has_aux=True, fn returns (value, aux)", fix="return a pair, or leave has_aux out")
        value = out[0] if has_aux else out
        _check_loss(value, "the module" if fn is None else "fn")
        params = {name: param for name, param in module.named_parameters() if param.requires_grad}
        param_grads = torch.autograd.grad(value, list(params.values()), allow_unused=True)
        grads = {
            name: torch.zeros_like(param, requires_grad=False) if grad is None else grad
            for (name, param), grad in zip(params.items(), param_grads, strict=True)
        }
        return pytree.tree_map_only(Tensor, Tensor.detach, out), grads

    return call


def _tokens(
    shapes: Mapping[tuple[str, tuple[int, ...]], tuple[int, ...]], args: tuple[PyTree, ...], kwargs: dict[str, PyTree]
) -> int:
    """Returns the number of tokens of the global batch of a call; see `TrainStep.tokens_per_second`.

    Args:
        shapes: (name, local shape) of an input -> its global shape.
    """
    first = next((x for x in pytree.tree_leaves((args, kwargs)) if isinstance(x, Tensor)), None)
    if first is None or first.ndim < 2 or first.is_floating_point() or first.dtype is torch.bool:
        return 0
    shape = tuple(first.shape)
    return prod(shape if isinstance(first, DTensor) else next((x for (_, y), x in shapes.items() if y == shape), shape))


def _sharded(module: nn.Module) -> ShardedModule:
    """Returns ``module``; InputError if it is not from `shardc.compile`."""
    if not isinstance(module, ShardedModule):
        raise InputError(
            "the module is not from shardc.compile", fix="pass what shardc.compile returned, or write the step by hand"
        )
    return module


def _check_loss(loss: object, source: str) -> None:
    """Raises InputError if ``loss``, returned by ``source``, is no scalar."""
    if not isinstance(loss, Tensor) or loss.numel() != 1:
        shown = f"a tensor of shape {list(loss.shape)}" if isinstance(loss, Tensor) else f"a {type(loss).__name__}"
        raise InputError(
            f"{source} returns {shown}, and a step needs a loss",
            fix="pass loss= to shardc.compile, and the targets to the step",
        )
