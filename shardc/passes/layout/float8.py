"""Float8: replaces the products of linear layers by scaled products of float8 operands."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import fx

from shardc.custom_ops.float8_ops import BLOCK, MM, QUANTISE, UNIT
from shardc.errors import PlanError
from shardc.ir import graph as ir
from shardc.ir.op_traits import CAST, RESHAPES, TRANSPOSES
from shardc.ir.rewriter import GraphRewriter, erase_dead_code

aten = torch.ops.aten
# Gradients need the range of the second, other operands the precision of the first.
_FINE, _WIDE = torch.float8_e4m3fn, torch.float8_e5m2


class _Operand(NamedTuple):
    """An operand of a product: a matrix, and whether it is transposed."""

    source: fx.Node
    turned: bool


@dataclass(frozen=True)
class Float8:
    """Computes products with weights of linear layers in float8, forward and backward, where the plan says so.

        %t: f32[8,16] = t(%w)               %w.amax: f32[] = amax(abs(%w))
        %y: f32[4,16] = mm(%x, %t)      ->  %w.quantise: f8e4m3fn[16,8] = quantise(%w, %w.amax)
                                            %y: f32[4,16] = mm(%x.quantise, t(%w.quantise), %x.amax, %w.amax)

    A weight is quantised from the dtype in which it is stored, whatever dtype the model casts it to. A matrix is
    quantised once for all products that it is in, or with ``rowwise`` and ``mxfp8`` once for those over its rows and
    once for those over its columns.

    *Requires:* a captured graph in canonical form. *Ensures:* results have the dtypes that they had. The product of a
    weight that is computed from parameters stays.

    Args:
        scaled: module -> "tensorwise", "rowwise" or "mxfp8".
        entry: the plan entry, for errors.

    Raises:
        PlanError: there is no such product; a size of a weight is no multiple of 16 (of 32 with ``mxfp8``); or, with
            ``mxfp8``, the number of tokens is no multiple of 32.
    """

    scaled: Mapping[str, str]
    entry: str = ""
    name = "float8"
    requires = ("canonicalize",)

    def __call__(self, gm: fx.GraphModule) -> fx.GraphModule:
        if self.scaled:
            _Quantiser(self, gm.graph).run()
            erase_dead_code(gm.graph)
        return gm


class _Product(NamedTuple):
    """A product of a linear layer.

    Args:
        node: the product.
        param: the weight, or the weight whose gradient it is.
        gradient: the operand that is a gradient; None in forward.
    """

    node: fx.Node
    param: fx.Node
    gradient: fx.Node | None = None


class _Quantiser:
    """Replaces the products of linear layers of one graph by scaled products of float8 operands.

    Attributes:
        quantised: (matrix, dim over which the maximum is taken, dtype) -> (the matrix in float8, the maximum); the dim
            is None for that of the whole matrix.
    """

    def __init__(self, options: Float8, graph: fx.Graph) -> None:
        self.options, self.graph, self.rewriter = options, graph, GraphRewriter(graph)
        self.quantised: dict[tuple[fx.Node, int | None, torch.dtype], tuple[fx.Node, fx.Node]] = {}

    def run(self) -> None:
        """Replaces the products of linear layers that the plan wants in float8. Raises PlanError if there is none, or
        if the kernels do not take one of them.
        """
        products = list(self._products())
        if not products:
            raise PlanError(
                "there is no linear layer in the modules whose products are to be in float8",
                plan_entry=self.options.entry or None,
                fix="name modules with nn.Linear, or leave matmul out",
            )
        for product in products:
            self._check(product)
        for product in products:
            self._replace(product)

    def _products(self) -> Iterator[_Product]:
        """Yields each product of a linear layer in a module whose products the plan wants in float8: of x and w in
        forward, of dy and w (gradient of x) and of x and dy (gradient of w) in backward.
        """
        weight_of = _weights_of_gradients(self.graph)
        inputs = set()  # (weight, x) of each product of forward
        for node in self.graph.find_nodes(op="call_function", target=aten.mm.default):
            origin = ir.info(node).origin
            if not self.options.scaled.get(origin.module):
                continue
            sources = [_operand(x).source for x in node.args]
            params = [_param(x) for x in sources]
            backward = origin.phase == "backward"
            # The product of forward, or the gradient of its input: one operand is the weight, the other no parameter.
            if params.count(None) == 1:
                side = params.index(None)
                param, other = params[1 - side], sources[side]
                assert param is not None
                if not backward:
                    inputs.add((param, other))
                    yield _Product(node, param)
                elif any(weight is param for weight, _ in inputs):
                    yield _Product(node, param, other)
            # The gradient of the weight, a product of the input and the gradient of the output.
            elif backward and (param := weight_of.get(node)) is not None:
                gradients = [x for x in sources if (param, x) not in inputs]  # the operand that is not x
                if len(gradients) == 1:
                    yield _Product(node, param, gradients[0])

    def _check(self, product: _Product) -> None:
        """Raises PlanError if the kernels do not take a size of the weight, or tokens do not fill whole blocks."""
        name, shape = ir.info(product.param).name, ir.value(product.param).shape
        unit = BLOCK if self._scaling(product.node) == "mxfp8" else UNIT
        # The dim that the product sums over; in the gradient of a weight the tokens, in others a dim of the weight.
        summed = ir.value(product.node.args[0]).shape[1]
        if any(size % unit for size in shape):
            what = f"{name!r} has shape {list(shape)}, and float8 products take sizes that are multiples of {unit}"
            module = name.rpartition(".")[0]
            fix = f"pad it, or leave the layer as it is: add precision(..., modules={module!r}) without matmul "
            fix += "behind this entry"
        elif unit == BLOCK and summed % unit:
            what = f"the gradient of {name!r} is a sum over {summed} tokens, which are no multiple of {BLOCK}"
            fix = f"make rows times length a multiple of {BLOCK}, as mxfp8 products are sums over blocks of so many"
        else:
            return
        source = ir.info(product.node).origin.source or None
        raise PlanError(what, plan_entry=self.options.entry or None, source=source, fix=fix)

    def _replace(self, product: _Product) -> None:
        """Replaces a product by the scaled product of its quantised operands."""
        node, operands, maxima = product.node, [], []
        scaling = self._scaling(node)
        for position, x in enumerate(node.args):
            source, turned = _operand(x)  # the matrix, and whether ``x`` is its transpose
            # A gradient needs the dtype with the wider range only if its whole matrix has one scale.
            wide = source is product.gradient and scaling == "tensorwise"
            # The dim that the product sums over: dim 1 of operand 0, dim 0 of operand 1. It is counted before the
            # transpose, as matrices are quantised before it.
            dim = None if scaling == "tensorwise" else 1 - position if not turned else position
            # A weight is quantised as it is stored, whatever it is cast to, and gathered in float8. Products that need
            # the same float8 form (matrix, dim of the maxima, dtype) share it.
            key = (_param(source) or source, dim, _WIDE if wide else _FINE)
            if key not in self.quantised:
                self.quantised[key] = self._quantise(node, *key)
            quantised, amax = self.quantised[key]
            at = self.rewriter.before(node, like=quantised)
            operands.append(at.call(aten.t.default, quantised) if turned else quantised)
            # Maxima are transposed with their matrix. Those of blocks have a dim more, of size 1, behind the dim of the
            # blocks: [a / 32, 1, b] becomes [b, a / 32, 1], and [a, b / 32, 1] becomes [b / 32, 1, a].
            if turned and dim is not None:
                order = ([1, 0], [1, 0]) if scaling == "rowwise" else ([2, 0, 1], [1, 2, 0])
                amax = at.call(aten.permute.default, amax, order[position])
            maxima.append(amax)
        dtype = ir.value(node).dtype
        scaled = self.rewriter.before(node).call(MM, *operands, *maxima, dtype)
        self.rewriter.replace(node, scaled, rename=True)

    def _scaling(self, product: fx.Node) -> str:
        """Returns "tensorwise", "rowwise" or "mxfp8": the scaling of ``product``, by its module."""
        return self.options.scaled[ir.info(product).origin.module]

    def _quantise(self, product: fx.Node, x: fx.Node, dim: int | None, dtype: torch.dtype) -> tuple[fx.Node, fx.Node]:
        """Inserts the float8 form of ``x`` before ``product``. Its scale is computed from maxima over ``dim`` (of
        blocks of it with mxfp8), or from one maximum of the whole matrix (None). Returns (the float8 form, the maxima).
        """
        origin = ir.info(product).origin
        at = self.rewriter.before(
            product, like=x, module=origin.module, source=origin.source, phase=origin.phase, region=origin.region
        )
        magnitudes, over = at.call(aten.abs.default, x), [0, 1] if dim is None else [dim]
        # Blocks: the dim, of n elements, is viewed as [n / 32, 32], and the maximum is taken over the 32.
        if dim is not None and self._scaling(product) == "mxfp8":
            shape = list(ir.value(x).shape)
            shape[dim : dim + 1], over = [shape[dim] // BLOCK, BLOCK], [dim + 1]
            magnitudes = at.call(aten.view.default, magnitudes, shape)
        amax = at.call(aten.amax.default, magnitudes, over, dim is not None)
        return at.call(QUANTISE, x, amax, dtype), amax


def _operand(x: fx.Node) -> _Operand:
    """Returns an operand of a product as an `_Operand`: the matrix under the transposes of ``x``, and whether ``x`` is
    its transpose.
    """
    turned = False
    while x.target in TRANSPOSES:
        x, turned = x.args[0], not turned
    return _Operand(x, turned)


def _param(x: fx.Node) -> fx.Node | None:
    """Returns the parameter that ``x`` is, or is a cast of; None if it is neither."""
    x = x.args[0] if x.target is CAST else x
    role = ir.info(x).role if x.op == "placeholder" else None
    return x if role is not None and role.kind == "param" else None


def _weights_of_gradients(graph: fx.Graph) -> dict[fx.Node, fx.Node]:
    """Returns node -> parameter, for nodes that lead to the parameter's gradient by views, casts and sums alone."""
    params = {ir.role(node).name: node for node in ir.placeholders(graph, "param")}
    out: dict[fx.Node, fx.Node] = {}
    # From each gradient back, up to and including the first op that is something else, such as the product.
    for role, result in ir.outputs(graph):
        work = [result] if role.kind == "grad" and role.name in params and isinstance(result, fx.Node) else []
        while work:
            node = work.pop()
            out[node] = params[role.name]
            if node.target in _BETWEEN:
                work += node.all_input_nodes
    return out


_BETWEEN = TRANSPOSES | RESHAPES | {CAST, aten.add.Tensor}
