"""Global states that a model queries by a call (`torch.is_grad_enabled()`): the answers are guards of a program."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from operator import attrgetter
from typing import Any

import torch

GRAD_MODE = "torch.is_grad_enabled()"
INFERENCE_MODE = "torch.is_inference_mode_enabled()"
_LEFT = ContextVar("_LEFT", default=False)  # whether `tracing` left inference mode
_NAMES = """
    is_grad_enabled
    is_autocast_enabled is_autocast_cpu_enabled is_autocast_cache_enabled get_autocast_dtype get_autocast_gpu_dtype
    get_default_dtype _C._is_any_autocast_enabled
    _C._get_cublas_allow_tf32 _C._get_cublas_allow_fp16_reduced_precision_reduction
    _C._get_cublas_allow_bf16_reduced_precision_reduction
    _C._is_torch_function_enabled _C._is_torch_function_all_disabled _C._is_torch_function_mode_enabled
    _C._functorch.get_dynamic_layer_stack_depth autograd._is_checkpoint_valid
    cuda.current_device cuda.is_initialized xpu.current_device xpu.is_initialized
    accelerator.current_device_index accelerator.current_accelerator
    __future__.get_overwrite_module_params_on_conversion
"""


def _states() -> Iterator[tuple[str, Callable[..., Any]]]:
    for name in _NAMES.split():
        try:
            yield f"torch.{name}", attrgetter(name)(torch)
        except AttributeError:  # this torch does not have it
            continue


def in_inference_mode() -> bool:
    """Return whether the user's call is in inference mode, even while its program is traced outside of that mode."""
    return torch.is_inference_mode_enabled() or _LEFT.get()


@contextmanager
def tracing(grad: bool) -> Iterator[None]:
    """Context without inference mode, whose tensors cannot be traced; ``grad``: whether gradients are recorded."""
    token = _LEFT.set(in_inference_mode())
    try:
        with torch.inference_mode(False), torch.set_grad_enabled(grad):
            yield
    finally:
        _LEFT.reset(token)


STATES: dict[str, Callable[..., Any]] = {
    **dict(_states()),
    INFERENCE_MODE.removesuffix("()"): in_inference_mode,
    "os.getenv": os.getenv,
    "sys.getrecursionlimit": sys.getrecursionlimit,
}


def state(name: str, *args: Any) -> Any:
    """Return the current state ``name``; raises KeyError if it does not exist, as for an absent device."""
    try:
        return STATES[name](*args)
    except (RuntimeError, AssertionError) as error:
        raise KeyError(name) from error
