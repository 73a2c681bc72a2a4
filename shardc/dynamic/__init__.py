"""Dynamic sizes: one program for many input sizes.

A program is compiled at three sizes near the example's. Numbers that differ between the three are fitted by polynomials
in the sizes: two points determine them and the third confirms.
"""

from shardc.dynamic.family import DynamicDims, Families, Family, SizedProgram, check_dynamic
from shardc.dynamic.generalize import Differs

__all__ = ["Differs", "DynamicDims", "Families", "Family", "SizedProgram", "check_dynamic"]
