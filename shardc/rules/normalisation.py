"""Softmaxes and norms as single ops. A traced model has none: they are decomposed, which shards better."""

from __future__ import annotations

from collections.abc import Sequence

from shardc.rules.loops import Loops
from shardc.rules.notation import WHOLE
from shardc.rules.rule import Call, Rule, table
from shardc.rules.scan import along
from shardc.rules.spec import Dims, Spec


class _Norm:
    """The dims of rows ``...`` that are normalised over the last ``d``."""

    def __init__(self, loops: Loops, over: str) -> None:
        shape = loops.shapes[loops.names.index("input")]
        rows = len(shape) - len(loops.call["normalized_shape"])
        self.rows = tuple(loops.dim(f"r{i}", n, over) for i, n in enumerate(shape[:rows]))
        self.row = tuple(loops.dim(f"d{i}", n, WHOLE) for i, n in enumerate(shape[rows:]))

    def of(self, name: str) -> Dims:
        """The dims of an operand by its name in the schema."""
        if name in ("input", "grad_out"):
            return (*self.rows, *self.row)
        return (*self.rows, *[()] * len(self.row)) if name in ("mean", "rstd") else self.row


def _norm(call: Call) -> Spec:
    loops = Loops(call)
    norm = _Norm(loops, "")
    statistics: Sequence[Dims] = [norm.of("mean")] * (len(loops.made) - 1)
    return loops.spec([norm.of(name) for name in loops.names], [norm.of("input"), *statistics])


def _norm_backward(call: Call) -> Spec:
    loops = Loops(call)
    norm = _Norm(loops, "sum")
    gradients = [norm.of(name) for name in ("input", "weight", "bias")]
    made = [dims for dims, result in zip(gradients, call.results, strict=False) if result is not None]
    return loops.spec([norm.of(name) for name in loops.names], made, linear=[{0}])


_TEXT = "... d, d, d -> ... d, ... 1, ... 1    d: whole"

TABLE = table(
    along("_softmax _log_softmax _safe_softmax"),
    along("_softmax_backward_data _log_softmax_backward_data", linear=True),
    *(Rule(f"aten.{op}", _norm, _TEXT) for op in ("native_layer_norm", "_fused_rms_norm")),
    Rule("aten.native_layer_norm_backward", _norm_backward, f"backward of {_TEXT}    ...: sum    linear in grad_out"),
)
