"""Ops that look at the strides of what they are given, of which a shard has others than the tensor that was traced."""

from __future__ import annotations

from typing import Any

# Kernels of torch that refuse what is not contiguous, or are wrong then; tests/semantics/test_strides.py found them.
_LOOK = frozenset(
    {
        "aten.view.dtype",
        "aten.view_as_complex.default",
        "aten.view_as_complex_copy.default",
        "aten._pdist_forward.default",
        "aten._pdist_backward.default",
        "aten.adaptive_max_pool3d.default",
        "aten.adaptive_max_pool3d_backward.default",
    }
)
_KNOWN = frozenset(
    {
        "aten", "prims", "_c10d_functional", "c10d_functional", "shardc", "shardc_random", "shardc_region",
        "shardc_attention",
    }
)  # fmt: skip


def looks(target: Any) -> bool:
    """Whether ``target`` may read memory rather than elements: those above, and ops of users."""
    namespace = getattr(target, "namespace", None)
    return str(target) in _LOOK or (namespace is not None and namespace not in _KNOWN)
