"""Rules for pointwise ops: every dim is a factor and operands broadcast. A linear op also accepts partial sums."""

from __future__ import annotations

from collections.abc import Iterable

from shardc.custom_ops import float8_ops
from shardc.rules.notation import Loops
from shardc.rules.rule import ANY, Call, Rule, rules_for, table
from shardc.rules.spec import Spec


def pointwise(ops: str, linear: str = "", *, moves: bool = False) -> list[Rule]:
    """Return a rule for each of ``ops``, names separated by spaces: operands broadcast, and every dim may be split.

    Args:
        linear: sets of arguments, by name, that may be partial sums: ``"self|other"`` either, ``"self&other"`` both
            together. A set with an argument that is not a tensor in the call is dropped.
        moves: the op returns the values of its first operand.
    """

    def spec(call: Call) -> Spec:
        return pointwise_spec(call, named_sets(call, linear), moves)

    text = "... -> ..." if not linear else f"... -> ...    linear in {linear}"
    return rules_for(ops, spec, text)


def pointwise_spec(call: Call, linear: Iterable[Iterable[int]] = (), moves: bool = False) -> Spec:
    """Return the spec of a pointwise op: its operands broadcast to its results, which all have the same shape.
    ``linear`` and ``moves`` are as in `Spec`.
    """
    loops = Loops(call)
    shape = loops.result_shapes[0]
    operands = [loops.broadcast(operand, shape) for operand in loops.shapes]
    results = [loops.broadcast(shape, shape) for _ in loops.result_shapes]
    return loops.spec(operands, results, linear=linear, moves=moves)


def named_sets(call: Call, linear: str) -> tuple[frozenset[int], ...]:
    """Translate names of arguments to positions among the operands: return one set of positions for each set in
    ``linear``, such as "self&other|weight" (two sets).

    Sets with an argument that is not a tensor in the call are left out.
    """
    named = [[call.position(name) for name in group.split("&")] for group in linear.split("|") if group]
    return tuple(frozenset(at for at in group if at is not None) for group in named if None not in group)


def _div(call: Call) -> Spec:
    """Return the spec of a division. It is linear in the dividend, unless the division rounds."""
    exact = "mode" not in call.name  # overloads that round are called ``Tensor_mode`` and ``Scalar_mode``
    return pointwise_spec(call, named_sets(call, "self") if exact else ())


def _quantise(call: Call) -> Spec:
    """Return the spec of the op that converts numbers to float8. Its second operand has the maxima for the scales: one
    for all, one per row, or one per block of a dim, [rows, blocks, 1] or [blocks, 1, columns] of a matrix.
    """
    loops = Loops(call)
    shape, amax = loops.shapes
    if len(amax) < 3:  # broadcasts
        return pointwise_spec(call)
    # The dim of the matrix that is cut into blocks has two factors: the block, and the position in it. In `of_amax`, ()
    # is the dim of size 1.
    dim = float8_ops.dim_of_blocks(shape, amax)
    blocks, other = loops.dim("blocks", amax[dim]), loops.dim("d", shape[1 - dim])
    cut = (*blocks, *loops.dim("block", shape[dim] // amax[dim]))
    x, of_amax = ((other, cut), (other, blocks, ())) if dim else ((cut, other), (blocks, (), other))
    return loops.spec([x, of_amax], [x])


def _cast(call: Call) -> Spec:
    """Return the spec of a cast. A partial sum passes through a cast to its own dtype, or to floats that are not
    narrower: others would round each rank's term.
    """
    before, after = call.operands[0].dtype, call.results[0].dtype  # type: ignore[union-attr]
    wider = after.is_floating_point and (not before.is_floating_point or after.itemsize >= before.itemsize)
    return pointwise_spec(call, [{0}] if wider or before == after else ())


def _masked_fill(call: Call) -> Spec:
    """Return the spec of ``masked_fill``, which is linear if it fills with zero: other values in the terms of all ranks
    would add up.
    """
    zero = not isinstance(call["value"], bool) and call["value"] == 0
    return pointwise_spec(call, [{0}] if zero else ())


TABLE = table(
    pointwise(
        "abs acos acosh angle asin asinh atan atanh bitwise_not ceil cos cosh deg2rad digamma erf erfc erfinv exp exp2 "
        "expm1 floor frac i0 isfinite isinf isnan isneginf isposinf lgamma log log10 log1p log2 logical_not logit "
        "nan_to_num polygamma rad2deg reciprocal relu round rsqrt sgn sigmoid sign signbit sin sinc sinh sqrt square "
        "tan tanh trunc special_bessel_j0 special_bessel_j1 special_entr special_erfcx special_i0e special_i1 "
        "special_i1e special_log_ndtr special_ndtri special_airy_ai "
        "special_bessel_y0 special_bessel_y1 special_modified_bessel_i0 special_modified_bessel_i1 "
        "special_spherical_bessel_j0"
    ),
    pointwise(
        "celu clamp clamp_max clamp_min clip elu gelu hardshrink hardsigmoid hardswish hardtanh leaky_relu mish relu6 "
        "selu silu softplus softshrink threshold"
    ),
    pointwise(
        "elu_backward gelu_backward hardshrink_backward hardsigmoid_backward hardswish_backward hardtanh_backward "
        "leaky_relu_backward logit_backward mish_backward native_dropout_backward sigmoid_backward silu_backward "
        "softplus_backward softshrink_backward tanh_backward threshold_backward",
        linear="grad_output|grad_out",
    ),
    pointwise("add sub rsub", linear="self&other"),
    pointwise("mul", linear="self|other"),
    pointwise("neg positive conj_physical _conj _neg_view", linear="self"),
    pointwise("complex", linear="real&imag"),
    pointwise("polar"),
    pointwise("detach detach_copy clone alias alias_copy lift_fresh_copy", moves=True),
    pointwise("copy", linear="src"),
    pointwise("where.self where.ScalarSelf where.ScalarOther where.Scalar", linear="self&other"),
    pointwise("addcmul addcdiv lerp"),
    pointwise(
        "atan2 float_power bitwise_and bitwise_left_shift bitwise_or bitwise_right_shift bitwise_xor copysign eq "
        "floor_divide fmax fmin fmod ge gcd gt heaviside hypot igamma igammac lcm ldexp le logaddexp logaddexp2 "
        "logical_and logical_or logical_xor lt max.other maximum min.other minimum ne nextafter pow remainder "
        "special_xlog1py special_zeta true_divide xlogy"
    ),
    Rule("aten.div", _div, "... -> ...    linear in self"),
    Rule("aten._to_copy", _cast, "... -> ...    linear in self"),
    Rule("shardc_float8.quantise", _quantise, "..., ... -> ...; or (blocks block) k, blocks 1 k -> (blocks block) k"),
    Rule("aten.masked_fill", _masked_fill, "... -> ...    linear in self where the value is 0"),
    strides=ANY,
)
