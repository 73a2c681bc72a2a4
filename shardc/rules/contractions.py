"""Rules for contractions, matrix functions, Fourier transforms, convolutions and pooling.

Batch and channels of convolutions and pooling may be split; spatial dims must be whole.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from shardc.rules.notation import FREE, WHOLE, Loops, bind, mixed, parse, rule
from shardc.rules.rule import ANY, CONTIGUOUS, Call, Emitted, Local, Rule, rules_for, sized, table
from shardc.rules.spec import Dims, Spec


def biased(op: str, text: str, *summed: str) -> Rule:
    """Return the rule of an op that adds a bias to a product, such as ``addmm``: operand 0 is the bias. ``text`` is the
    rule's notation. The factors ``summed``, over which the product sums, must stay whole, since otherwise every rank
    would add the bias.
    """
    operands, results = parse(text)
    kinds = dict.fromkeys(summed, "whole")

    def spec(call: Call) -> Spec:
        # A bias of fewer dims broadcasts, as a vector does to a matrix: it has the last ones.
        bias_dims = operands[0][len(operands[0]) - len(call.operands[0].shape) :]
        # Partial sums pass only if the bias is one as well: a whole bias would be added once per rank.
        bias, left, right = 0, 1, 2  # positions of the operands
        linear = (frozenset({bias, left}), frozenset({bias, right}))
        return bind(call, (bias_dims, *operands[1:]), results, kinds, linear, moves=False)

    return Rule(f"aten.{op}", spec, f"{text}    {', '.join(summed)}: whole".removesuffix("    : whole"))


def _scaled(call: Call) -> Spec:
    """Return the spec of a float8 matrix product ``i k, k j -> i j``, with the maxima that the scales of its operands
    follow from. Their shapes say of what: [] of the whole matrix, [i, 1] and [1, j] of each row or column,
    [i, blocks, 1] and [blocks, 1, j] of each block of a row or column.
    """
    loops = Loops(call)
    (rows, inner), (_, columns), maxima_a, maxima_b = loops.shapes
    in_blocks = len(maxima_a) == 3
    blocks = maxima_a[1] if in_blocks else inner  # without them, each element of k counts as a block
    i, j = loops.dim("i", rows), loops.dim("j", columns)
    k = loops.dim("k", blocks, kind="sum")
    maxima: list[Dims] = [(i, ()) if maxima_a else (), ((), j) if maxima_b else ()]
    if in_blocks:
        maxima = [(i, k, ()), (k, (), j)]
    summed = (*k, *loops.dim("block", inner // blocks, kind="sum"))  # k of the matrices: block, place in it
    return loops.spec([(i, summed), (summed, j), *maxima], [(i, j)])


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
    Rule("shardc_float8.mm", _scaled, "i (k block), (k block) j, (i k 1), (k 1 j) -> i j    k block: sum"),
    strides=ANY,
)


def _matrices(call: Call) -> Spec:
    """Return the spec of an op on matrices, the last two dims of its tensors (the last one for pivots). The batch dims
    before these may be split if all tensors have the same.
    """
    loops = Loops(call)
    # Numbers of dims of the operands, as if pivots had the dim that they lack.
    ndims = {len(shape) + (name in PIVOTS) for name, shape in zip(loops.names, loops.shapes, strict=True)}
    # Operands of different numbers of dims broadcast, and the batch dims may come from any of them: split nothing then.
    lead = min(ndims) - 2 if len(ndims) == 1 else 0
    batches = {shape[:lead] for shape in (*loops.shapes, *loops.result_shapes)}
    lead = lead if len(batches) == 1 else 0  # number of batch dims that may be split

    def dims(prefix: str, shape: Sequence[int]) -> Dims:
        """Return the factors of a tensor's dims: those of the batch, and whole ones, named ``prefix`` and a number."""
        batch = dict(enumerate(loops.dims("b", shape[:lead])))  # shared by all tensors
        return loops.dims(prefix, shape, WHOLE, but=batch)

    operands = [dims(f"x{at}.", shape) for at, shape in enumerate(loops.shapes)]
    return loops.spec(operands, [dims(f"y{at}.", shape) for at, shape in enumerate(loops.result_shapes)])


def _trilinear(call: Call) -> Spec:
    """Return the spec of ``_trilinear``: three tensors, each unsqueezed, multiplied, summed over ``sumdim``.

    Example: ``bilinear`` of x [n, a] and y [n, b] with a weight [o, a, b] has the common dims n, o, a, b: x lacks o and
    b, the weight n, y o and a; a and b are summed.
    """
    loops = Loops(call)
    summed, shapes = set(call["sumdim"]), [list(shape) for shape in loops.shapes]
    absent = -1  # in place of the size of a common dim that the operand lacks
    for shape, places in zip(shapes, (call["expand1"], call["expand2"], call["expand3"]), strict=True):
        for place in sorted(places):
            shape.insert(place, absent)
    operands: list[Dims] = [
        tuple(loops.dim(f"d{i}", n, kind="sum" if i in summed else FREE) for i, n in enumerate(shape) if n != absent)
        for shape in shapes
    ]
    sizes = enumerate(zip(*shapes, strict=True))  # common dim -> its size in each operand
    result = tuple(loops.dim(f"d{i}", max(of_operands)) for i, of_operands in sizes if i not in summed)
    return loops.spec(operands, [result], linear=[{0}, {1}, {2}])  # in each operand by itself


# Arguments with LAPACK pivots (the rows exchanged, counted from 1): one dim less than the matrix.
PIVOTS = ("pivots", "LU_pivots")

MATRIX_FUNCTIONS = table(
    rules_for(
        "_linalg_eigh _linalg_solve_ex _linalg_svd cholesky cholesky_inverse cholesky_solve linalg_cholesky_ex "
        "linalg_eig linalg_inv_ex linalg_ldl_factor_ex linalg_ldl_solve linalg_lu linalg_lu_factor_ex linalg_lu_solve "
        "linalg_matrix_exp linalg_qr linalg_solve_triangular lu_unpack triangular_solve",
        _matrices,
        "b... x... -> b... y...    x y: whole",
    ),
    rules_for(
        "_fft_c2c _fft_r2c _fft_c2r",
        mixed(lambda call: call["dim"], linear=True),
        "... x -> ... y    x y: whole    linear in self",
    ),
    # Complex numbers as a last dim of (real, imaginary), and back.
    [rule(op, "... -> ... parts", parts="whole", linear="0") for op in ("view_as_real", "view_as_real_copy")],
    [rule(op, "... parts -> ...", parts="whole", linear="0") for op in ("view_as_complex", "view_as_complex_copy")],
    rule("_cdist_forward", "... i k, ... j k -> ... i j", k="whole"),
    rule("_cdist_backward", "... i j, ... i k, ... j k, ... i j -> ... i k", j="sum", linear="0"),
    Rule("aten._trilinear", _trilinear, "... a, ... b, o a b -> ... o    a b: sum    linear in each"),
    rule("_int_mm", "i k, k j -> i j", k="sum", linear="0|1"),
    strides=CONTIGUOUS,
)


class _Image:
    """Loops of a convolution: input ``n (g c) X``, weight ``(g o) c K`` (``(g c) o K`` if transposed), output
    ``n (g o) Y``. n is the batch, g the groups, c and o the input and output channels of a group; X, K and Y stand for
    the spatial dims, which are whole.

    Args:
        x, w, y: shapes of input, weight and output.
        kinds: the kind (free, whole, a reduction) of those of the loops n, c and o that are not free.

    Attributes:
        x, w, y: factors of the dims of input, weight and output.
        channels: factors of the output channels, which a bias has too.
    """

    def __init__(self, loops: Loops, x: tuple[int, ...], w: tuple[int, ...], y: tuple[int, ...], **kinds: str) -> None:
        call = loops.call
        groups, transposed = call["groups"], call["transposed"]
        # Dim 1 of input (x) and output (y) has the channels of all groups.
        n = loops.dim("n", x[0], kind=kinds.get("n", FREE))
        g = loops.dim("g", groups)
        c = loops.dim("c", x[1] // groups, kind=kinds.get("c", FREE))
        o = loops.dim("o", y[1] // groups, kind=kinds.get("o", FREE))
        in_channels, self.channels = (*g, *c), (*g, *o)  # ``channels``: of the output, and of a bias
        self.x = (n, in_channels, *loops.dims("x", x[2:], WHOLE))
        self.y = (n, self.channels, *loops.dims("y", y[2:], WHOLE))
        # Dim 0 of the weight (w) has the channels of all groups, dim 1 those of one group on the other side.
        kernel = loops.dims("k", w[2:], WHOLE)
        self.w = (in_channels, o, *kernel) if transposed else (self.channels, c, *kernel)


def _forward(call: Call) -> Spec:
    """Return the spec of a convolution: it sums over the input channels ``c`` of a group."""
    loops = Loops(call)
    biased = len(loops.shapes) == 3
    x, w, y = loops.shapes[0], loops.shapes[1], loops.result_shapes[0]
    # With c split the output is partial, and every rank would add the bias to its term.
    image = _Image(loops, x, w, y, c=WHOLE if biased else "sum")
    operands = [image.x, image.w, *([(image.channels,)] if biased else [])]
    # Linear in the input, and in the weight; with a bias in neither, for the same reason.
    return loops.spec(operands, [image.y], linear=() if biased else [{0}, {1}])


def _backward(call: Call) -> Spec:
    """Return the spec of the backward of a convolution: gradients of the input (a sum over ``o``), of the weight and of
    the bias (sums over the batch ``n``). ``output_mask`` of the call says which of the three there are.
    """
    loops = Loops(call)
    y, x, w = loops.shapes  # the gradient of the output has the output's shape
    has_bias_gradient = call["output_mask"][2]
    # The bias gradient does not sum over c, so splitting c would leave it replicated and not partial.
    image = _Image(loops, x, w, y, n="sum", o="sum", c=WHOLE if has_bias_gradient else FREE)
    grads: list[Dims] = [image.x, image.w, (image.channels,)]
    results = [dims for dims, result in zip(grads, call.results, strict=True) if result is not None]
    grad_position = 0  # linear in the gradient of the output
    return loops.spec([image.y, image.x, image.w], results, linear=[{grad_position}])


def _local_groups(local: Local) -> Emitted:
    """Emit and return the convolution, or its backward, with the number of groups that this rank's channels form: a
    split of the channels may split the groups.

    Dim 1 of the weight is the channels of one group: input channels or, if transposed, output channels.
    """
    is_backward = local.call.position("grad_output") is not None
    # The tensor of whose channels dim 1 of the weight has one group: the input or, if transposed, the output.
    if not local.call["transposed"]:
        layout = local.operand_layout("input")
    else:
        layout = local.operand_layout("grad_output") if is_backward else local.results[0]
    channels, channels_per_group = layout.local_shape[1], local.operand_layout("weight").local_shape[1]
    return local.same(groups=channels // channels_per_group)


def windowed(ops: str, ndim: int, linear: bool = False) -> list[Rule]:
    """Return rules for ops that slide a window over the last ``ndim`` dims, such as pooling, and for their backward
    ops. These dims must not be split; leading dims may be.

    Args:
        ops: names of aten ops, separated by spaces.
        linear: whether operand 0 may be a partial sum.
    """
    text = "... x -> ... y    x y: whole" + ("    linear in operand 0" if linear else "")
    return rules_for(ops, mixed(lambda call: range(-ndim, 0), linear=linear), text)


def _resize_backward(ops: str, ndim: int) -> list[Rule]:
    """Return rules of backward ops of resizing the last ``ndim`` dims, such as upsampling (see `windowed`). Their
    argument ``input_size`` is the shape of the result, so on a rank it becomes the local shape.
    """
    return [replace(rule, localize=sized("input_size")) for rule in windowed(ops, ndim, linear=True)]


def _sampled(call: Call) -> Spec:
    """Return the spec of ``grid_sample`` or of its backward: an image ``n c X`` is read at grid points ``n Y e`` (e is
    their 2 or 3 coordinates), which all channels share; the result is ``n c Y``.
    """
    loops = Loops(call)
    backward = "grad_output" in loops.names
    image, grid = (loops.shapes[loops.names.index(name)] for name in ("input", "grid"))
    # Channels share the grid, so the grid's gradient sums over them.
    n, c = loops.dim("n", image[0]), loops.dim("c", image[1], kind="sum" if backward else FREE)
    # In backward all points add to the whole image's gradient, so they are not split.
    points = loops.dims("y", grid[1:-1], kind=WHOLE if backward else FREE)
    x, of_grid = (n, c, *loops.dims("x", image[2:], WHOLE)), (n, *points, loops.dim("e", grid[-1], WHOLE))
    y = (n, c, *points)
    by_name = {"input": x, "grid": of_grid, "grad_output": y}
    results: list[Dims] = [y]
    if backward:  # gradients of image and grid, of which one may be None
        results = [dims for dims, result in zip((x, of_grid), call.results, strict=True) if result is not None]
    # Backward is linear in the gradient alone, forward in the image.
    linear = [{loops.names.index("grad_output" if backward else "input")}]
    return loops.spec([by_name[name] for name in loops.names], results, linear=linear)


def _columns(call: Call) -> Spec:
    """Return the spec of ``im2col``, from an image ``n c X`` to its windows ``n (c k) l``, and of ``col2im``, back. A
    window has k elements of each channel c, and there are l windows; n is an optional batch.
    """
    loops = Loops(call)
    columns, image = loops.shapes[0], loops.result_shapes[0]
    if "output_size" not in call:  # an argument of `col2im` alone
        columns, image = image, columns
    lead = loops.dims("n", image[:-3])
    c = loops.dim("c", image[-3])
    # Dim -2 of the columns has all elements of a window: those of channel 0 first.
    window_factors = c + loops.dim("k", columns[-2] // max(image[-3], 1), WHOLE)
    sides = {  # shape -> factors of its dims
        columns: (*lead, window_factors, loops.dim("l", columns[-1], WHOLE)),
        image: (*lead, c, *loops.dims("x", image[-2:], WHOLE)),
    }
    operand, result = sides[loops.shapes[0]], sides[loops.result_shapes[0]]
    return loops.spec([operand], [result], linear=[{0}])


_TEXT = "n (g c) x..., (g o) c k... -> n (g o) y..."

CONVOLUTIONS = table(
    Rule("aten.convolution", _forward, f"{_TEXT}    c: sum; x y k: whole    linear in input, weight", _local_groups),
    Rule("aten.convolution_backward", _backward, f"backward of {_TEXT}    n o: sum; x y k: whole", _local_groups),
    strides=ANY,
) | table(
    rules_for("grid_sampler_2d grid_sampler_3d", _sampled, "n c x, n y e -> n c y    x e: whole    linear in input"),
    rules_for(
        "grid_sampler_2d_backward grid_sampler_3d_backward",
        _sampled,
        "n c y, n c x, n y e -> n c x, n y e    c: sum; x y e: whole",
    ),
    Rule("aten.im2col", _columns, "n c x -> n (c k) l    x k l: whole    linear"),
    Rule("aten.col2im", _columns, "n (c k) l -> n c x    x k l: whole    linear"),
    windowed("max_pool2d_with_indices max_pool2d_with_indices_backward adaptive_max_pool2d", 2),
    windowed("adaptive_max_pool2d_backward max_unpool2d", 2),
    windowed("max_pool3d_with_indices max_pool3d_with_indices_backward adaptive_max_pool3d", 3),
    windowed("adaptive_max_pool3d_backward", 3),
    windowed("avg_pool1d adaptive_avg_pool1d reflection_pad1d reflection_pad1d_backward", 1, linear=True),
    windowed("replication_pad1d replication_pad1d_backward", 1, linear=True),
    windowed("avg_pool2d avg_pool2d_backward _adaptive_avg_pool2d _adaptive_avg_pool2d_backward", 2, linear=True),
    windowed("reflection_pad2d reflection_pad2d_backward replication_pad2d", 2, linear=True),
    windowed("replication_pad2d_backward", 2, linear=True),
    windowed("avg_pool3d avg_pool3d_backward _adaptive_avg_pool3d _adaptive_avg_pool3d_backward", 3, linear=True),
    windowed("reflection_pad3d reflection_pad3d_backward replication_pad3d", 3, linear=True),
    windowed("replication_pad3d_backward", 3, linear=True),
    windowed("upsample_nearest1d _upsample_nearest_exact1d upsample_linear1d", 1, linear=True),
    windowed("upsample_nearest2d _upsample_nearest_exact2d upsample_bilinear2d upsample_bicubic2d", 2, linear=True),
    windowed("_upsample_bilinear2d_aa _upsample_bicubic2d_aa", 2, linear=True),
    windowed("upsample_nearest3d _upsample_nearest_exact3d upsample_trilinear3d", 3, linear=True),
    _resize_backward("upsample_nearest1d_backward _upsample_nearest_exact1d_backward upsample_linear1d_backward", 1),
    _resize_backward("upsample_nearest2d_backward _upsample_nearest_exact2d_backward upsample_bilinear2d_backward", 2),
    _resize_backward("upsample_bicubic2d_backward _upsample_bilinear2d_aa_backward", 2),
    _resize_backward("_upsample_bicubic2d_aa_backward", 2),
    _resize_backward("upsample_nearest3d_backward _upsample_nearest_exact3d_backward upsample_trilinear3d_backward", 3),
    strides=CONTIGUOUS,
)

TABLE = CONTRACTIONS | MATRIX_FUNCTIONS | CONVOLUTIONS
