"""The decoders of the forms `flex` and `float8`, and the plain models that they are compared with."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from unittest.mock import patch

import torch
import torch.nn.attention.flex_attention as flex
from torch import nn

from benchmarks.documents import documents, packed
from examples.models import llama
from tests.precision.float8 import on_one_device

LENGTH = 64  # of a sequence with documents of 5 to 24 tokens


def with_documents(device: torch.device) -> nn.Module:
    """The decoder with `flex_attention` under a mask of documents."""
    torch.manual_seed(0)
    config = llama.LlamaConfig(heads=4, kv_heads=2)  # 16 features a head, the fewest that the kernel takes
    return packed(llama.Llama(config).to(device), documents(LENGTH, 5, 24).to(device))


@contextmanager
def eager_flex() -> Iterator[None]:
    """Lets the plain model's eager `flex_attention` take gradients on a CPU too, where only torch's check refuses."""
    with patch.object(flex, "_validate_device", lambda *_: None), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="flex_attention called without torch.compile")
        yield


def in_float8(source: nn.Module, scaling: str) -> nn.Module:
    """A copy of ``source`` on one device, of which the blocks' products are of float8 numbers, in torch's plain ops."""
    return on_one_device(source, scaling, lambda name: name.startswith("layers."))
