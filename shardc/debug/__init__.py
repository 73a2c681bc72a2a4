"""Tools to debug a compiled program: `explain` shows the origin of a layout, `bisect` finds the pass of an error."""

from shardc.debug.bisect_passes import Verdict, bisect
from shardc.debug.explain_layout import Explanation, explain

__all__ = ["Explanation", "Verdict", "bisect", "explain"]
