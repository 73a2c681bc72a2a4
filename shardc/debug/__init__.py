"""Tools to debug a compiled program: `explain` a tensor's layout, `bisect` the passes for a wrong result."""

from shardc.debug.bisect_passes import Verdict, bisect
from shardc.debug.explain_layout import Explanation, explain

__all__ = ["Explanation", "Verdict", "bisect", "explain"]
