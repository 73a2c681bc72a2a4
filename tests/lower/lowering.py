"""A graph through Inductor."""

from __future__ import annotations

from torch import fx

from shardc.ir.executable import Compiled, Half
from shardc.ir.mesh import Mesh
from shardc.lower import lower

GROUP = "shardc:dp"


def lowered(gm: fx.GraphModule, phase: str) -> Compiled:
    return lower(Half(phase, gm, Mesh(dp=2)), backend="inductor")[0]
