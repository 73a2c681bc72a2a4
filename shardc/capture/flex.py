"""`flex_attention` written out as plain ops, so that its gradient, also of what its functions capture, is ordinary.

Dynamo traces the score and mask functions to graphs of scalars. Here they are mapped over all places, as in torch's own
reference. CPUs have no backward kernel.
"""

from __future__ import annotations

from torch import Tensor, fx
from torch._higher_order_ops.flex_attention import flex_attention, math_attention
from torch.nn.attention import flex_attention as api


def write_out(gm: fx.GraphModule) -> None:
    """Replaces calls of `flex_attention` by its reference in plain ops, in a graph of Dynamo's and its checkpoints."""
    for graph_module in gm.modules():
        if isinstance(graph_module, fx.GraphModule):
            for node in graph_module.graph.find_nodes(op="call_function", target=flex_attention):
                node.target = math_attention
            graph_module.recompile()


def _any_device(query: Tensor, key: Tensor, value: Tensor) -> None:
    """Allows gradients on CPUs, where torch's kernel has none."""


# (owner, attribute name, replacement)
OTHER_FORMS: tuple[tuple[object, str, object], ...] = ((api, "_validate_device", _any_device),)
