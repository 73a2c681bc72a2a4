"""Keep part: keeps parameters sharded over fewer axes between forward and backward than in storage."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from torch import fx

from shardc.custom_ops.float8_ops import QUANTISE
from shardc.ir import graph as ir
from shardc.ir import ops
from shardc.ir.layout import Layout
from shardc.ir.op_traits import CAST
from shardc.ir.rewriter import GraphRewriter


@dataclass(frozen=True)
class KeepPart:
    """Regathers a parameter for backward from a larger slice that each rank keeps (``reshard_after_forward=n``).

        %w.full = all_gather(%w)            %w.full = all_gather(%w)
        %y = mm(%x, %w.full)            ->  %w.full.kept = shard(%w.full)
                                            %w.full.regathered = all_gather(%w.full.kept)
                                            %y = mm(%x, %w.full.regathered)

    `Partition` saves the slice and gathers it in backward; in forward `SkipRegather` reads ``w.full`` itself.

    *Requires:* reshards are steps (`Collectives`). *Ensures:* values are the same; a parameter whose slice would be no
    larger than its shard stays as it is.

    Args:
        axes: parameter -> the axes, and parts of axes, over which its kept slice is split.
    """

    axes: Mapping[str, tuple[str, ...]]
    name = "keep_part"
    requires = ("collectives",)

    def __call__(self, gm: fx.GraphModule) -> fx.GraphModule:
        rewriter = GraphRewriter(gm.graph)
        for param in ir.placeholders(gm.graph, "param"):
            param_axes = self.axes.get(ir.info(param).name, ())
            for whole in _last_gathers(param) if param_axes else ():
                layout = _split(ir.layout(whole), ir.layout(param), param_axes)
                # A part as small as the shard saves nothing: the shard is there anyway.
                if layout is not None and layout.local_numel > ir.layout(param).local_numel:
                    axis = ",".join(param_axes)
                    value, at = ir.value(whole), rewriter.after(whole, suffix="kept")
                    part = at.typed(replace(value, layout=layout), ops.shard, whole, axis=axis)
                    at = rewriter.after(part, like=whole, suffix="regathered")
                    regathered = at.typed(value, ops.all_gather, part, axis=axis)
                    # By these marks `Partition` saves the part, and `SkipRegather` drops the second gather.
                    ir.update(part, is_kept_part=True)
                    ir.update(regathered, regathers=ir.info(whole).name)
                    rewriter.redirect(whole, regathered)  # all users but the part itself
        gm.recompile()
        return gm


def _last_gathers(param: fx.Node) -> list[fx.Node]:
    """Returns the last all-gather of each chain of all-gathers that starts at ``param``, or at its cast, in forward. A
    parameter that several axes split may be gathered over one after another.
    """
    last_gathers: list[fx.Node] = []
    work = [param]
    while work:
        node = work.pop()
        users = [user for user in node.users if user.op == "call_function" and ir.info(user).origin.phase == "forward"]
        gathers = [user for user in users if user.target is ops.all_gather]
        work += gathers + [user for user in users if user.target in (CAST, QUANTISE) and node is param]
        if node.target is ops.all_gather and not gathers:
            last_gathers.append(node)
    return last_gathers


def _split(whole: Layout, stored: Layout, axes: tuple[str, ...]) -> Layout | None:
    """Returns ``whole`` (a layout of a parameter that is gathered) split over ``axes``, along the dims that ``stored``
    (its storage layout) splits over them. Returns None if this is not possible.
    """
    layout: Layout | None = whole
    for axis in axes:
        # ``axis`` may be a part of an axis that splits the storage.
        dim = next((stored.dim_of(bound) for bound in stored.bound if stored.mesh.overlap(bound, axis)), None)
        if layout is None or dim is None or any(layout.mesh.overlap(bound, axis) for bound in layout.bound):
            return None
        layout = layout.split(dim, axis)
    return layout
