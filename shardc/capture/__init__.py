"""Capture: an ordinary module (and its loss) as one joint forward-backward FX graph at global shapes."""

from shardc.capture.caches import register_caches
from shardc.capture.dtypes import Dtypes
from shardc.capture.once import CaptureOnce
from shardc.capture.repeats import find_repeats, shortened
from shardc.capture.symbolic import SymbolicCapture, capture_symbolic
from shardc.capture.tags import Tag
from shardc.capture.trace import Captured, capture, decompositions, input_names, loss_arity

__all__ = [
    "CaptureOnce",
    "Captured",
    "Dtypes",
    "SymbolicCapture",
    "Tag",
    "capture",
    "capture_symbolic",
    "decompositions",
    "find_repeats",
    "input_names",
    "loss_arity",
    "register_caches",
    "shortened",
]
