"""Rules for contractions, matrix functions and Fourier transforms. The latter two may be split in batch dims only."""

from __future__ import annotations

from collections.abc import Sequence

from shardc.rules.loops import FREE, Loops, mixed
from shardc.rules.notation import WHOLE, bind, parse, rule
from shardc.rules.rule import ANY, CONTIGUOUS, Call, Rule, rules_for, table
from shardc.rules.spec import Dims, Spec


def biased(op: str, text: str, *summed: str) -> Rule:
    """Return the rule of ``operand 0 + product``; ``summed`` is whole, or each rank would add operand 0."""
    operands, results = parse(text)
    kinds = dict.fromkeys(summed, "whole")

    def spec(call: Call) -> Spec:
        first = operands[0][len(operands[0]) - len(call.operands[0].shape) :]
        linear = (frozenset({0, 1}), frozenset({0, 2}))
        return bind(call, (first, *operands[1:]), results, kinds, linear, False)

    return Rule(f"aten.{op}", spec, f"{text}    {', '.join(summed)}: whole".removesuffix("    : whole"))


CONTRACTIONS = table(
    rule("mm", "i k, k j -> i j", k="sum", linear="0|1"),
    rule("bmm", "b i k, b k j -> b i j", k="sum", linear="0|1"),
    rule("mv", "i k, k -> i", k="sum", linear="0|1"),
    rule("dot", "k, k -> ", k="sum", linear="0|1"),
    rule("vdot", "k, k -> ", k="sum", linear="0|1"),
    rule("outer", "i, j -> i j", linear="0|1"),
    biased("addmm", "i j, i k, k j -> i j", "k"),
    biased("baddbmm", "b i j, b i k, b k j -> b i j", "k"),
    biased("addbmm", "i j, b i k, b k j -> i j", "b", "k"),
    biased("addmv", "i, i k, k -> i", "k"),
    biased("addr", "i j, i, j -> i j"),
    strides=ANY,
)


def matrices(ops: str) -> list[Rule]:
    """Return rules for ops on the last two dims (the last one for pivots) of tensors with equal batch dims."""

    def spec(call: Call) -> Spec:
        loops = Loops(call)
        ranks = {len(shape) + (name in PIVOTS) for name, shape in zip(loops.names, loops.shapes, strict=True)}
        # Operands of different ranks broadcast, and the batch dims may come from any of them: split nothing then.
        lead = min(ranks) - 2 if len(ranks) == 1 else 0
        batches = {shape[:lead] for shape in (*loops.shapes, *loops.result_shapes)}
        lead = lead if len(batches) == 1 else 0

        def dims(name: str, shape: Sequence[int]) -> Dims:
            return loops.dims(name, shape, WHOLE, but=dict(enumerate(loops.dims("b", shape[:lead]))))

        operands = [dims(f"x{at}.", shape) for at, shape in enumerate(loops.shapes)]
        return loops.spec(operands, [dims(f"y{at}.", shape) for at, shape in enumerate(loops.result_shapes)])

    return rules_for(ops, spec, "b... x... -> b... y...    x y: whole")


def transforms(ops: str) -> list[Rule]:
    """Return rules for Fourier transforms over the dims of argument ``dim``, which must be whole."""

    def spec(call: Call) -> Spec:
        return mixed(call, call["dim"], linear=[{0}])

    return rules_for(ops, spec, "... x -> ... y    x y: whole    linear in self")


def _trilinear(call: Call) -> Spec:
    """Return the spec of ``_trilinear``: three tensors, each unsqueezed, multiplied, summed over ``sumdim``."""
    loops = Loops(call)
    summed, shapes = set(call["sumdim"]), [list(shape) for shape in loops.shapes]
    for shape, places in zip(shapes, (call["expand1"], call["expand2"], call["expand3"]), strict=True):
        for place in sorted(places):
            shape.insert(place, -1)  # the operand lacks this dim
    operands: list[Dims] = [
        tuple(loops.dim(f"d{i}", n, "sum" if i in summed else FREE) for i, n in enumerate(shape) if n >= 0)
        for shape in shapes
    ]
    sizes = enumerate(zip(*shapes, strict=True))
    result = tuple(loops.dim(f"d{i}", max(over)) for i, over in sizes if i not in summed)
    return loops.spec(operands, [result], linear=[{0}, {1}, {2}])


# Arguments with LAPACK pivots (the rows exchanged, counted from 1): one dim less than the matrix.
PIVOTS = ("pivots", "LU_pivots")

MATRIX_FUNCTIONS = table(
    matrices(
        "_linalg_eigh _linalg_solve_ex _linalg_svd cholesky cholesky_inverse cholesky_solve linalg_cholesky_ex "
        "linalg_eig linalg_inv_ex linalg_ldl_factor_ex linalg_ldl_solve linalg_lu linalg_lu_factor_ex linalg_lu_solve "
        "linalg_matrix_exp linalg_qr linalg_solve_triangular lu_unpack triangular_solve"
    ),
    transforms("_fft_c2c _fft_r2c _fft_c2r"),
    # Complex numbers as a last dim of (real, imaginary), and back.
    [rule(op, "... -> ... parts", parts="whole", linear="0") for op in ("view_as_real", "view_as_real_copy")],
    [rule(op, "... parts -> ...", parts="whole", linear="0") for op in ("view_as_complex", "view_as_complex_copy")],
    rule("_cdist_forward", "... i k, ... j k -> ... i j", k="whole"),
    rule("_cdist_backward", "... i j, ... i k, ... j k, ... i j -> ... i k", j="sum", linear="0"),
    Rule("aten._trilinear", _trilinear, "... a, ... b, o a b -> ... o    a b: sum    linear in each"),
    rule("_int_mm", "i k, k j -> i j", k="sum", linear="0|1"),
    strides=CONTIGUOUS,
)

TABLE = CONTRACTIONS | MATRIX_FUNCTIONS
