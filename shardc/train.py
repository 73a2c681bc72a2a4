"""`train_step`: loss, gradients and update of one step behind one call."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from shardc.errors import InputError
from shardc.runtime.module import ShardedModule


def train_step(
    module: nn.Module, optimizer: torch.optim.Optimizer, *, max_norm: float | None = None
) -> Callable[..., Tensor]:
    """A function that takes the arguments of ``module``, does one training step, and returns the loss, detached.

    It runs the compiled forward and backward, clips, updates, and drops the gradients, so that none of their memory is
    held between steps. The update is the optimizer's own kernel. With `shardc.optim.wrap` it is one fused call on this
    rank's shards. Under ``module.no_sync()`` (or with ``set_requires_grad_sync(False)``) a call only adds its gradients
    to those of the next step.

    Args:
        module: from `shardc.compile`, with a ``loss``, or a model that returns its loss.
        optimizer: of the module's parameters: torch's own, or from `shardc.optim.wrap`.
        max_norm: clip the gradients to this global norm before the update.

    Raises:
        InputError: ``module`` or ``optimizer`` is something else; when the function runs, a loss that is no scalar.
    """
    if not isinstance(module, ShardedModule):
        raise InputError(
            "the module is not from shardc.compile", fix="pass what shardc.compile returned, or write the step by hand"
        )
    mine = {id(param) for param in module.parameters()}
    for group in optimizer.param_groups:
        for param in group["params"]:
            if id(param) not in mine:
                raise InputError(
                    f"the optimizer has a parameter of shape {list(param.shape)} that is none of the module's",
                    fix="make the optimizer of the compiled module's parameters: module.parameters()",
                )

    def step(*args: Any, **kwargs: Any) -> Tensor:
        with torch.enable_grad():
            loss = module(*args, **kwargs)
        if not isinstance(loss, Tensor) or loss.numel() != 1:
            made = f"a tensor of shape {list(loss.shape)}" if isinstance(loss, Tensor) else f"a {type(loss).__name__}"
            raise InputError(
                f"the module returns {made}, and a step needs a loss",
                fix="pass loss= to shardc.compile, and the targets to the step",
            )
        loss.backward()
        if not module.shardc.sync.held():
            if max_norm is not None:
                module.clip_grad_norm_(max_norm)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        return loss.detach()

    return step
