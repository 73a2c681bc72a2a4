"""Dynamic sizes: one program for many sizes of the inputs.

A program is compiled at three sizes near the example's; every number in it that differs between them is a simple
function of the sizes, which the first two give and the third confirms.
"""

from shardc.dynamic.family import Families, Family
from shardc.dynamic.generalize import Differs
from shardc.dynamic.named import DynamicDims, check_dynamic

__all__ = ["Differs", "DynamicDims", "Families", "Family", "check_dynamic"]
