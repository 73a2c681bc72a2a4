"""`train_step` and `value_and_grad`: a training step, or its loss and gradients, as one call."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Any

import torch
from torch import Tensor, nn

from shardc._compat import PyTree, pytree
from shardc.errors import BackwardError, InputError
from shardc.runtime.module import ShardedModule
from shardc.validate import Range, typed


@typed()
def train_step(
    module: nn.Module, optimizer: torch.optim.Optimizer, *, max_norm: Annotated[float, Range(0)] | None = None
) -> Callable[..., Tensor]:
    """Returns a function that takes the arguments of ``module``, runs one training step and returns the detached loss.

    It runs forward and backward, clips, updates, and frees the gradients. With `shardc.optim.wrap` the update is one
    fused call on this rank's shards. Under ``module.no_sync()`` (or ``set_requires_grad_sync(False)``) a call only
    accumulates gradients for the next step.

    Args:
        module: from `shardc.compile`, with a ``loss``, or of a model that returns its loss.
        optimizer: of the module's parameters: torch's own, or from `shardc.optim.wrap`.
        max_norm: global norm to clip the gradients to before the update.

    Raises:
        InputError: ``module`` or ``optimizer`` is something else; when the function runs, the loss is no scalar.
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

    def step(*args: PyTree, **kwargs: PyTree) -> Tensor:
        with sharded.shardc.tells():
            return unshared_step(*args, **kwargs)

    def unshared_step(*args: PyTree, **kwargs: PyTree) -> Tensor:
        with torch.enable_grad():
            loss = module(*args, **kwargs)
        _check_loss(loss, "the module")
        loss.backward()
        if not sharded.shardc.params.sync.unreduced():
            if max_norm is not None:
                sharded.shardc.clip_grad_norm_(max_norm)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        return loss.detach()

    return step


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
