"""Training steps on real ranks beside one device."""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

import shardc
from tests.models.alike import relative


def loss_of(out: Any) -> Tensor:
    return sum((x.square().mean() for x in (out if isinstance(out, tuple) else (out,))), torch.zeros(()))


class Reasons(logging.Handler):
    """Collects what the log says of programs."""

    def __init__(self) -> None:
        super().__init__()
        self.messages: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.messages.append(record.getMessage())


def equal_one_device(
    models: Iterable[Callable[[], nn.Module]], inputs: tuple[Any, ...], backends: Iterable[str], found: bool,
    plan: shardc.Plan | None = None,
) -> None:  # fmt: skip
    """Compares loss and gradients of a step on two ranks, under FSDP or ``plan``, with those of one device.

    Args:
        models: each makes a model, in float64.
        inputs: global inputs of all models.
        found: whether programs must come from the store.
    """
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
    reasons = Reasons()
    logging.getLogger("shardc.cache").addHandler(reasons)
    logging.getLogger("shardc.cache").setLevel(logging.INFO)
    for model_of in models:
        for backend in backends:
            torch.manual_seed(3)
            model = model_of().double()
            module = shardc.compile(
                copy.deepcopy(model), mesh, plan or shardc.fsdp("dp"), loss=loss_of, backend=backend,
                options=shardc.Options(program_cache=True),
            )  # fmt: skip
            shards = module.shard_inputs(*inputs)
            shards = shards if len(inputs) > 1 else (shards,)
            reference, value = loss_of(model(*inputs)), module(*shards)
            reference.backward()
            value.backward()
            name = f"{getattr(model_of, '__name__', model_of)} by {backend}"
            assert relative(value.detach(), reference.detach()) < 1e-9, name
            for key, param in module.named_parameters():
                grad = model.get_parameter(key).grad
                assert (param.grad is None) == (grad is None), f"{name}: {key}"
                if grad is not None:
                    assert relative(param.grad.full_tensor(), grad) < 1e-9, f"{name}: {key}"
            stored = all(program.from_store for program in module.shardc.programs.values())
            assert stored or not found, f"{name}: {reasons.messages}"
