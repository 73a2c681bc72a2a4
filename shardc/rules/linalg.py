"""Matrix functions and transforms: the dims of a batch are free, those of a matrix or a transform are whole."""

from __future__ import annotations

from collections.abc import Sequence

from shardc.rules.loops import FREE, Loops, mixed
from shardc.rules.notation import WHOLE, rule
from shardc.rules.rule import CONTIGUOUS, Call, Rule, each, table
from shardc.rules.spec import Dims, Spec


def matrices(ops: str) -> list[Rule]:
    """Rules for ops on the last two dims (of pivots the last) of tensors that all have the same batch before them."""

    def spec(call: Call) -> Spec:
        loops = Loops(call)
        ranks = {len(shape) + (name in PIVOTS) for name, shape in zip(loops.names, loops.shapes, strict=True)}
        # Operands of other ranks broadcast, and their batch is not always the first operand's.
        lead = min(ranks) - 2 if len(ranks) == 1 else 0
        batches = {shape[:lead] for shape in (*loops.shapes, *loops.made)}
        lead = lead if len(batches) == 1 else 0

        def dims(name: str, shape: Sequence[int]) -> Dims:
            return loops.dims(name, shape, WHOLE, but=dict(enumerate(loops.dims("b", shape[:lead]))))

        operands = [dims(f"x{at}.", shape) for at, shape in enumerate(loops.shapes)]
        return loops.spec(operands, [dims(f"y{at}.", shape) for at, shape in enumerate(loops.made)])

    return each(ops, spec, "b... x... -> b... y...    x y: whole")


def transforms(ops: str) -> list[Rule]:
    """Rules for Fourier transforms over the dims of argument ``dim``."""

    def spec(call: Call) -> Spec:
        return mixed(call, call["dim"], linear=[{0}])

    return each(ops, spec, "... x -> ... y    x y: whole    linear in self")


def _trilinear(call: Call) -> Spec:
    """Three tensors, each with dims of one place put in, multiplied and summed up over some dims."""
    loops = Loops(call)
    summed, shapes = set(call["sumdim"]), [list(shape) for shape in loops.shapes]
    for shape, places in zip(shapes, (call["expand1"], call["expand2"], call["expand3"]), strict=True):
        for place in sorted(places):
            shape.insert(place, -1)  # none of its own
    operands: list[Dims] = [
        tuple(loops.dim(f"d{i}", n, "sum" if i in summed else FREE) for i, n in enumerate(shape) if n >= 0)
        for shape in shapes
    ]
    sizes = enumerate(zip(*shapes, strict=True))
    result = tuple(loops.dim(f"d{i}", max(over)) for i, over in sizes if i not in summed)
    return loops.spec(operands, [result], linear=[{0}, {1}, {2}])


# Arguments that hold which rows were exchanged, counted from 1.
PIVOTS = ("pivots", "LU_pivots")

TABLE = table(
    matrices(
        "_linalg_eigh _linalg_solve_ex _linalg_svd cholesky cholesky_inverse cholesky_solve linalg_cholesky_ex "
        "linalg_eig linalg_inv_ex linalg_ldl_factor_ex linalg_ldl_solve linalg_lu linalg_lu_factor_ex linalg_lu_solve "
        "linalg_matrix_exp linalg_qr linalg_solve_triangular lu_unpack triangular_solve"
    ),
    transforms("_fft_c2c _fft_r2c _fft_c2r"),
    # A complex number as two real ones at the end, and the other way round.
    [rule(op, "... -> ... parts", parts="whole", linear="0") for op in ("view_as_real", "view_as_real_copy")],
    [rule(op, "... parts -> ...", parts="whole", linear="0") for op in ("view_as_complex", "view_as_complex_copy")],
    rule("_cdist_forward", "... i k, ... j k -> ... i j", k="whole"),
    rule("_cdist_backward", "... i j, ... i k, ... j k, ... i j -> ... i k", j="sum", linear="0"),
    Rule("aten._trilinear", _trilinear, "... a, ... b, o a b -> ... o    a b: sum    linear in each"),
    rule("_int_mm", "i k, k j -> i j", k="sum", linear="0|1"),
    strides=CONTIGUOUS,
)
