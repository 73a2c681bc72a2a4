"""Why a compiled program is as it is: `explain` one tensor's layout and costs."""

from shardc.debug.explain import Explanation, explain

__all__ = ["Explanation", "explain"]
