"""Defines custom ops in one call: schema, kernel, and the types of the results."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from shardc._compat import OpOverload


class OpLibrary:
    """Ops of one namespace of ``torch.ops``. They exist as long as the library, which a module has to hold."""

    def __init__(self, namespace: str) -> None:
        self._namespace = namespace
        self._library = torch.library.Library(namespace, "FRAGMENT")

    def define(
        self,
        schema: str,
        kernel: Callable[..., object],
        fake: Callable[..., object] | None = None,
        tags: Sequence[torch.Tag] = (),
    ) -> OpOverload[..., Any]:
        """Define an op and return its overload.

        Args:
            schema: the schema of the op, ``"name(Tensor x) -> Tensor"``.
            kernel: runs the op, on all devices.
            fake: returns results of the right types for fake tensors; by default ``kernel``.
        """
        name = schema.partition("(")[0]
        self._library.define(schema, tags=tags)
        self._library.impl(name, kernel, "CompositeExplicitAutograd")
        torch.library.register_fake(f"{self._namespace}::{name}", fake or kernel, lib=self._library)
        overload: OpOverload[..., Any] = getattr(getattr(torch.ops, self._namespace), name).default
        return overload
