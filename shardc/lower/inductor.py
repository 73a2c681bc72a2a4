"""Compiles one local graph by Inductor, through Inductor's cache of graphs across starts.

On CPUs without 16-bit units, 16-bit matrix products, convolutions and attention are computed in float32 (`widened`).
"""

from __future__ import annotations

import hashlib
import warnings
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache, partial
from operator import attrgetter, getitem
from pathlib import Path
from typing import Any, TypeGuard

import sympy
import torch
from torch import SymInt, Tensor, fx
from torch._dynamo.source import ConstantSource
from torch._guards import TracingContext, tracing
from torch._inductor import config as inductor_config
from torch._inductor import ir as inductor
from torch._inductor.codecache import FxGraphCache, compiled_fx_graph_hash, write_atomic
from torch._inductor.compile_fx import compile_fx_inner
from torch._inductor.decomposition import select_decomp_table
from torch._inductor.lowering import register_lowering
from torch._inductor.output_code import CompiledFxGraph, CompiledFxGraphConstants
from torch._inductor.utils import BoxedBool, InputType
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.compiler import config
from torch.compiler._cache import CacheArtifactManager
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv
from torch.utils import _pytree as pytree

import shardc.ir.comm  # noqa: F401  (its ops are lowered here)
from shardc._compat import PyTree
from shardc.custom_ops import attention_ops, float8_ops
from shardc.errors import ShardcWarning
from shardc.ir.emitted import check_order
from shardc.ir.executable import BACKWARD, INFERENCE, Half
from shardc.ir.graph import output_node
from shardc.ir.repeat import type_of
from shardc.ir.sized import SIZED, At
from shardc.lower import flex_kernel
from shardc.lower.compile_lock import cache_folder, caches, name_of
from shardc.lower.kernels import check_vectors, together

aten = torch.ops.aten
BoxedRun = Callable[[list[Any]], Sequence[object]]  # takes a list of tensors and sizes, which it empties
_FORWARD_ATTENTION = (aten._scaled_dot_product_flash_attention_for_cpu.default, attention_ops.CALL)
_DENSE = (
    aten.mm.default, aten.addmm.default, aten.bmm.default, aten.baddbmm.default, aten.convolution.default,
    aten.convolution_backward.default, *_FORWARD_ATTENTION,
    aten._scaled_dot_product_flash_attention_for_cpu_backward.default, attention_ops.GRADIENT,
)  # fmt: skip


def widened(table: Mapping[Any, Callable[..., PyTree]]) -> dict[Any, Callable[..., PyTree]]:
    """Return the decompositions ``table`` (op -> function) with float32 versions of 16-bit products, convolutions and
    attention.

    On a CPU without 16-bit units torch takes 3 to 50 times as long for them, by layout. The sums have the same terms.
    """
    casts: dict[int, tuple[Tensor, Tensor]] = {}  # casts, by the tensor's identity; the tensor is held with it

    def wide(x: object) -> object:
        if not _is_slow(x):
            return x
        if id(x) not in casts:
            casts[id(x)] = x, x.to(torch.float32)
        return casts[id(x)][1]

    def decomposition(op: OpOverload) -> Callable[..., PyTree]:
        # Other results of a forward are in float32 (the log-sum-exp) or are counters.
        narrowed = 1 if op in _FORWARD_ATTENTION else None

        def decomposed(*args: PyTree, **kwargs: PyTree) -> PyTree:
            low = next((x for x in pytree.arg_tree_leaves(*args, **kwargs) if _is_slow(x)), None)
            if low is None:
                return table[op](*args, **kwargs) if op in table else NotImplemented
            result = op(*pytree.tree_map(wide, args), **pytree.tree_map(wide, kwargs))
            if isinstance(result, Tensor):
                return result.to(low.dtype)
            back = [x.to(low.dtype) if isinstance(x, Tensor) else x for x in result[:narrowed]]
            return (*back, *result[len(back) :])

        return decomposed

    return {**table, **{op: decomposition(op) for op in _DENSE}}


def _is_slow(x: object) -> TypeGuard[Tensor]:
    """Return whether ``x`` is a tensor of a dtype for which this CPU has no fast matrix products."""
    return isinstance(x, Tensor) and x.device.type == "cpu" and x.dtype in slow_dtypes()


@cache
def slow_dtypes() -> frozenset[torch.dtype]:
    """Return the 16-bit dtypes that torch's CPU library does not compute in on this machine."""
    mkldnn = torch.ops.mkldnn
    has = {torch.bfloat16: "_is_mkldnn_bf16_supported", torch.float16: "_is_mkldnn_fp16_supported"}
    return frozenset(dtype for dtype, query in has.items() if not (hasattr(mkldnn, query) and getattr(mkldnn, query)()))


def _fake_mode_of(values: Iterable[object]) -> FakeTensorMode:
    """Return the mode of the first fake tensor in ``values``; a new mode if there is none."""
    return next((x.fake_mode for x in values if isinstance(x, FakeTensor)), None) or FakeTensorMode()


def _separate(values: Sequence[InputType]) -> list[InputType]:
    """Return fake tensors with the metadata of ``values``, each a separate object: operands are found by identity."""
    with _fake_mode_of(values):
        return [
            torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=x.device) if isinstance(x, Tensor) else x
            for x in values
        ]


def lowered(gm: fx.GraphModule, kind: str, settings: Callable[[], str]) -> tuple[BoxedRun, str]:
    """Compile ``gm`` at the sizes of its placeholders, or load it from Inductor's cache; return (callable, generated
    source).

    Args:
        settings: returns what the code depends on besides the graph, as the function `settings` does.
    """
    inputs = _separate([n.meta["val"] for n in gm.graph.find_nodes(op="placeholder")])
    with _graph_cache(inputs), _shardc_config(inputs):
        plain = caches() and not gm.graph.find_nodes(op="get_attr")  # the values of constants are part of the code
        key = cache_folder("keys") / name_of(gm, kind, settings()) if plain else None
        if key is not None and (cached := _cached_graph(key, inputs, kind)) is not None:
            check_order(gm.graph, cached.source_code)
            return _with_strides(cached, gm), cached.source_code
        compiled, source = lowered_for(gm, inputs, kind)
    if key is not None and (graph_key := getattr(compiled, "_fx_graph_cache_key", None)):
        write_atomic(str(key), graph_key)
    return _with_strides(compiled, gm), source


def _with_strides(run: BoxedRun, gm: fx.GraphModule) -> BoxedRun:
    """Wrap ``run`` so that results that were expanded or had gaps in memory in the trace have their traced strides: one
    that comes with other strides is copied.

    The backward half is compiled for the strides of the trace. Of a view, Inductor only keeps their order.
    """
    results = output_node(gm.graph).all_input_nodes
    with_gaps = {x: x.meta["val"].stride() for x in results if _has_gaps(x.meta.get("val"))}
    wanted = {at: with_gaps[x] for at, x in enumerate(pytree.tree_leaves(output_node(gm.graph).args)) if x in with_gaps}
    if not wanted:
        return run

    def with_strides(inputs: list[Any]) -> list[Any]:
        out: list[Any] = list(run(inputs))
        for at, stride in wanted.items():
            if (x := out[at]).stride() != stride:
                once = x[tuple(slice(None) if step else slice(1) for step in stride)]  # of equal elements, the first
                copy = torch.empty_strided(once.shape, stride, dtype=x.dtype, device=x.device).copy_(once)
                out[at] = copy.as_strided(x.shape, stride)
        return out

    return with_strides


def _has_gaps(x: object) -> bool:
    """Return whether a tensor is not dense: it has gaps between its elements, or elements that share memory."""
    if not isinstance(x, Tensor) or not x.numel():
        return False
    size = 1
    for stride, length in sorted((s, n) for s, n in zip(x.stride(), x.shape, strict=True) if n != 1):
        if stride != size:
            return True
        size *= length
    return False


def _cached_graph(key: Path, inputs: Sequence[InputType], kind: str) -> CompiledFxGraph | None:
    """Load a graph from Inductor's cache without decomposing or hashing it; None if it is not there.

    Args:
        key: the file with its key in that cache.
    """
    if not key.exists():
        return None
    constants, back = CompiledFxGraphConstants(), kind == BACKWARD
    graph, _ = FxGraphCache.load_with_key(
        key.read_text(), [], inputs, True, None, is_backward=back, constants=constants
    )
    if graph is None:
        return None
    graph.post_compile(
        inputs, constants, {**graph.fx_kwargs, "cudagraphs": BoxedBool(inductor_config.triton.cudagraphs)}
    )
    return graph


def settings() -> str:
    """Return a text of all that compiled code depends on besides its graph.

    That is Inductor's configuration, the versions, the device, and the dtypes that shardc upcasts.
    """
    with _graph_cache(()), _shardc_config(()), FakeTensorMode():
        return compiled_fx_graph_hash(fx.GraphModule({}, fx.Graph()), [], {}, [])[0] + str(
            sorted(map(str, slow_dtypes()))
        )


def lowered_for(gm: fx.GraphModule, inputs: Sequence[InputType], kind: str) -> tuple[BoxedRun, str]:
    """Compile ``gm`` by Inductor; return (callable, generated source).

    Args:
        inputs: fake tensors, and numbers that may be symbolic.
        kind: whether the graph is a forward, a backward or an inference graph; see `shardc.ir.executable.Half`.
    """

    def compiled_with(kernels: Mapping[Any, Callable[..., PyTree]]) -> Any:
        decomposed = _decomposed(gm, inputs, kernels)
        return compile_fx_inner(decomposed, inputs, is_backward=kind == BACKWARD, is_inference=kind == INFERENCE)

    falls_back = False
    with _shardc_config(inputs):
        try:
            compiled = compiled_with(flex_kernel.KERNELS)
        except Exception:
            if not flex_kernel.is_used(gm):
                raise
            try:
                compiled = compiled_with(flex_kernel.IN_LESS_MEMORY)
            except Exception as error:
                warnings.warn(
                    ShardcWarning(
                        f"torch's kernel of flex_attention does not compile ({type(error).__name__}: {error}), so "
                        "shardc's own code computes it, with all keys; kernel_options= with smaller blocks may help"
                    ),
                    stacklevel=2,
                )
                compiled, falls_back = compiled_with({}), True
    # A graph without ops is not compiled, and has no source.
    source = getattr(compiled, "source_code", "")
    check_order(gm.graph, source)
    # The method has no key in Inductor's cache: the next start tries the kernel again, and warns again.
    return compiled.__call__ if falls_back else compiled, source


@contextmanager
def _shardc_config(inputs: Sequence[InputType]) -> Iterator[None]:
    """Context manager that sets Inductor's configuration for shardc's graphs: ops keep their order, and kernels share
    files.
    """
    if any(isinstance(x, Tensor) and x.device.type == "cpu" for x in inputs):
        check_vectors()
    with inductor_config.patch(reorder_for_peak_memory=False, reorder_for_locality=False), together():
        yield


@contextmanager
def _graph_cache(inputs: Sequence[InputType]) -> Iterator[None]:
    """Context manager in which Inductor may cache graphs, with shardc's lowerings as a part of the key."""
    mode = _fake_mode_of(inputs)
    if mode.shape_env is None:
        mode.shape_env = ShapeEnv()  # without one, Inductor caches nothing
    with tracing(TracingContext(mode)), config.patch(cache_key_tag=_tag()):  # type: ignore[attr-defined]
        yield


@cache
def _tag() -> str:
    """Return a hash of the code of shardc.lower, on which the cached graphs depend."""
    code = b"".join(path.read_bytes() for path in sorted(Path(__file__).parent.glob("*.py")))
    return f"shardc {hashlib.sha256(code).hexdigest()}"


def _decomposed(
    gm: fx.GraphModule, inputs: Sequence[InputType], kernels: Mapping[Any, Callable[..., PyTree]] = flex_kernel.KERNELS
) -> fx.GraphModule:
    """Return ``gm`` in the ops that Inductor lowers; the order of its collectives stays.

    Args:
        kernels: further decompositions, to ops for which Inductor has kernels on some devices.
    """
    table = {**widened(select_decomp_table()), **float8_ops.WRITTEN_OUT, **kernels}
    with _fake_mode_of(inputs), torch.no_grad():
        decomposed = make_fx(gm, decomposition_table=table)(*inputs)
    # torch's kernel of flex_attention for few queries lacks the third result, which Inductor would look up unread.
    for node in decomposed.graph.find_nodes(op="call_function", target=getitem):
        if not node.users:
            decomposed.graph.erase_node(node)
    # Inductor may change the strides of results that the user does not see, but the backward half is compiled for
    # those of the trace.
    last = output_node(decomposed.graph)
    # Inductor returns no constants other than ints; the program records the user's.
    last.args = (tuple(x if isinstance(x, fx.Node | int) else None for x in last.args[0]),)
    last.meta["user_visible_output_idxs"] = [at for at, x in enumerate(last.args[0]) if isinstance(x, fx.Node)]
    return decomposed


def artifacts(compile_all: Callable[[], object]) -> bytes | None:
    """Return the cache artifacts of the graphs that ``compile_all`` compiles; None if there are none."""
    with CacheArtifactManager.with_fresh_cache(), inductor_config.patch(fx_graph_cache=True):
        compile_all()
        saved = torch.compiler.save_cache_artifacts()
    return None if saved is None else saved[0]


def load_artifacts(data: bytes) -> None:
    """Load artifacts into Inductor's cache. This unpickles them, so they must come from a trusted source."""
    torch.compiler.load_cache_artifacts(data)


def fakes(values: Sequence[Mapping[str, Any]]) -> list[object]:
    """Return fake tensors, all of one FakeTensorMode, for a graph's placeholders; constants stay as they are.

    Args:
        values: ``shape``, ``stride``, ``dtype`` and ``device`` of each tensor, or ``constant``.
    """
    with FakeTensorMode(allow_non_fake_inputs=True):  # constants of a graph are real
        return [
            value["constant"]
            if "constant" in value
            else torch.empty_strided(value["shape"], value["stride"], dtype=value["dtype"], device=value["device"])
            for value in values
        ]


def _keep_inputs(op: OpOverload) -> None:
    """Make Inductor lower ``op`` as a collective, so that the memory of its inputs is not reused before the wait.

    On a CPU, small tensors travel in one message, and results are parts of it, which lie anywhere.
    """

    @register_lowering(op, type_promotion_kind=None)
    def lowered(*args: Any) -> PyTree:
        on_cpu = pytree.tree_leaves(args)[0].get_device().type == "cpu"
        with inductor_config.patch(assume_unaligned_fallback_output=on_cpu):
            return pytree.tree_map(inductor.TensorBox.create, inductor._CollectiveKernel.create_out_of_place(op, *args))


for _op in (
    torch.ops.shardc.permute_ranks.default,
    torch.ops.shardc.send_rows_coalesced.default,
    torch.ops.shardc.all_gather_into_tensor_coalesced.default,
    torch.ops.shardc.reduce_scatter_tensor_coalesced.default,
    torch.ops.shardc.all_reduce_coalesced.default,
    torch.ops.shardc.to_device.default,
    torch.ops.shardc.to_host.default,
):
    _keep_inputs(_op)


def give_values(gm: fx.GraphModule) -> None:
    """Set a fake tensor on each node of a local graph that has none; equal calls share one."""
    kinds: dict[Hashable, int] = {}
    seen: dict[int, str] = {}  # id of a value -> its kind
    values: dict[Hashable, object] = {}
    mode = _fake_mode_of(node.meta.get("val") for node in gm.graph.find_nodes(op="placeholder"))

    def kind(node: fx.Node) -> str:
        value = node.meta["val"]
        if id(value) not in seen:
            seen[id(value)] = f"%{kinds.setdefault(type_of(value), len(kinds))}"
        return seen[id(value)]

    for node in gm.graph.nodes:
        if "val" in node.meta or node.op == "output":
            continue
        if node.op == "get_attr":
            node.meta["val"] = mode.from_tensor(attrgetter(str(node.target))(gm), static_shapes=True)
            continue
        key = node.target, repr(fx.node.map_arg((node.args, node.kwargs), kind))
        if key not in values:
            args, kwargs = fx.node.map_arg((node.args, node.kwargs), lambda x: x.meta["val"])
            with mode:
                values[key] = node.target(*args, **kwargs)
        node.meta["val"] = values[key]


def lowered_at_any_sizes(half: Half) -> tuple[BoxedRun, str] | None:
    """Return (callable at this graph's sizes, generated source) from code compiled for symbolic sizes; None if the
    graph has no symbolic form.
    """
    at: At | None = half.gm.meta.get(SIZED)
    if at is None:
        return None
    units = at.units
    compiled = next((code for holds, code in at.graph.compiled if holds(units)), None)
    if compiled is None:
        env = ShapeEnv()
        mode = FakeTensorMode(allow_non_fake_inputs=True, shape_env=env)
        # Torch specialises sizes 0 and 1: a dim of size 1 broadcasts.
        symbols = {name: _symbol(env, name, unit) if unit > 1 else unit for name, unit in units.items()}
        with mode:
            inputs = at.graph.inputs(symbols)
        compiled = lowered_for(at.graph.symbolic(half.gm), inputs, half.kind)
        at.graph.compiled.append((partial(_holds, env, symbols), compiled))
    code, source = compiled
    sizes = list(units.values())

    def run(inputs: list[Any]) -> Sequence[object]:
        both: list[object] = [*sizes, *inputs]
        inputs.clear()
        return code(both)

    return run, source


def _symbol(env: ShapeEnv, name: str, value: int) -> int | SymInt:
    """Return a new symbolic size of ``env``, with ``value`` as its example."""
    source = ConstantSource(name)
    symbol = env.create_symbol(value, source=source, dynamic_dim=DimDynamic.DYNAMIC, constraint_dim=None)
    return env.create_symintnode(symbol, hint=value, source=source)


def _holds(env: ShapeEnv, symbols: Mapping[str, int | SymInt], units: Mapping[str, int]) -> bool:
    """Return whether code compiled at the symbolic sizes ``symbols`` is valid at the sizes ``units``, by name: they
    meet the guards of the compilation.
    """
    fixed = {name: x for name, x in symbols.items() if isinstance(x, int)}
    if any(units[name] != x if name in fixed else units[name] < 2 for name, x in symbols.items()):
        return False
    values = {x.node._expr: sympy.Integer(units[name]) for name, x in symbols.items() if not isinstance(x, int)}
    return all(guard.expr.xreplace(values) == sympy.true for guard in env.guards)
