"""Capture: an ordinary module (and its loss) as one joint forward-backward FX graph at global shapes."""

from shardc.capture.trace import Captured, Tag, capture, decompositions, input_names, loss_arity

__all__ = ["Captured", "Tag", "capture", "decompositions", "input_names", "loss_arity"]
