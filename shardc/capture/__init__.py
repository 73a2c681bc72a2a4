"""Capture: traces a module (and its loss) to one joint forward-backward FX graph at global shapes."""

from shardc.capture.capture_cache import CaptureOnce as CaptureOnce
from shardc.capture.dtypes import Dtypes as Dtypes
from shardc.capture.markers import Tag as Tag
from shardc.capture.repeats import find_repeats as find_repeats
from shardc.capture.repeats import numbered_containers as numbered_containers
from shardc.capture.repeats import shortened as shortened
from shardc.capture.replacements import register_caches as register_caches
from shardc.capture.symbolic import SymbolicCapture as SymbolicCapture
from shardc.capture.symbolic import capture_symbolic as capture_symbolic
from shardc.capture.trace import Captured as Captured
from shardc.capture.trace import as_module as as_module
from shardc.capture.trace import capture as capture
from shardc.capture.trace import decompositions as decompositions
from shardc.capture.trace import input_names as input_names
from shardc.capture.trace import loss_arity as loss_arity
from shardc.capture.trace import target_names as target_names
