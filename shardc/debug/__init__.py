"""Why a compiled program is as it is: `explain` one tensor's layout, `bisect` the passes for a wrong result."""

from shardc.debug.bisect import Verdict, bisect
from shardc.debug.explain import Explanation, explain

__all__ = ["Explanation", "Verdict", "bisect", "explain"]
