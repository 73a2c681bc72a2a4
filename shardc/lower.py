"""Lower: a localized forward or backward graph as a callable, through Inductor or as it is."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache, partial
from operator import attrgetter
from pathlib import Path
from typing import Any

import sympy
import torch
from torch import Tensor, fx
from torch._dynamo.source import ConstantSource
from torch._functorch import config as functorch_config
from torch._functorch import partitioners
from torch._functorch.partitioners import min_cut_rematerialization_partition
from torch._guards import TracingContext, tracing
from torch._inductor import config as inductor_config
from torch._inductor import ir as inductor
from torch._inductor.compile_fx import compile_fx_inner
from torch._inductor.decomposition import select_decomp_table
from torch._inductor.lowering import register_lowering
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.compiler import config
from torch.compiler._cache import CacheArtifactManager
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv
from torch.fx.node import _side_effectful_functions
from torch.utils import _pytree as pytree
from torch.utils.checkpoint import CheckpointPolicy

import shardc.ir.comm
import shardc.ir.host  # noqa: F401  (the ops of both are lowered here)
from shardc.ir.arena import PLAN, MemoryPlan
from shardc.ir.emitted import check_order, joined, uses_of
from shardc.ir.graph import output_node
from shardc.ir.segments import LEAST, Segment, cut, whole
from shardc.ir.sized import SIZED, At
from shardc.progress import steps

c10d = torch.ops._c10d_functional
BACKENDS = ("inductor", "eager")

aten = torch.ops.aten
_FORWARD_ATTENTION = (aten._scaled_dot_product_flash_attention_for_cpu.default,)
_DENSE = (
    aten.mm.default, aten.addmm.default, aten.bmm.default, aten.baddbmm.default, aten.convolution.default,
    aten.convolution_backward.default, *_FORWARD_ATTENTION,
    aten._scaled_dot_product_flash_attention_for_cpu_backward.default,
)  # fmt: skip


@dataclass(frozen=True)
class Code:
    """A local graph that can be called, with a list of local tensors (emptied by the call); it gives a list of results.

    Args:
        run: what is called.
        source: that Inductor made; "" of no code.
    """

    run: Callable[[list[Tensor]], Sequence[Any]]
    source: str = ""

    def __call__(self, inputs: list[Tensor]) -> Sequence[Any]:
        if not self.source:
            return self.run(inputs)
        # Nothing in here is differentiated: no op has to look whether it is. Of a wait, that is most of its time.
        with torch._C._AutoDispatchBelowAutograd():
            return self.run(inputs)


@dataclass(frozen=True)
class Compiled:
    """A lowered half: code for each of its segments, which run in order.

    Args:
        segments, codes: alike segments have the same code.
        plan: where the results of its collectives lie, at the lines of the code where there is some.
        takes: the names of the half's placeholders.
        gives: what it returns: names of values, or constants.
        constants: the tensors that the half holds, by name.
    """

    segments: tuple[Segment, ...]
    codes: tuple[Code, ...]
    plan: MemoryPlan
    takes: tuple[str, ...] = ()
    gives: tuple[Any, ...] = ()
    constants: Mapping[str, Tensor] = field(default_factory=dict)

    def __call__(self, inputs: list[Tensor], enter: Callable[[Segment], None] = lambda _: None) -> Sequence[Any]:
        """Runs it on ``inputs``, which are emptied; ``enter`` is called in front of each segment."""
        if len(self.segments) == 1:
            return self.codes[0](inputs)
        values: dict[str, Any] = {**self.constants, **dict(zip(self.takes, inputs, strict=True))}
        inputs.clear()
        for segment, code in zip(self.segments, self.codes, strict=True):
            enter(segment)
            given = [values.pop(name) if name in segment.done else values[name] for name in segment.takes]
            values.update(zip(segment.gives, code(given), strict=True))
        return [values[x] if isinstance(x, str) else x for x in self.gives]

    @property
    def source_code(self) -> str:
        """What Inductor made, of all segments that differ; "" of no code."""
        return "\n".join(dict.fromkeys(code.source for code in self.codes))


def lower(
    gm: fx.GraphModule,
    backend: str,
    *,
    by: str = "auto",
    backward: bool = False,
    inference: bool = False,
) -> Compiled:
    """``gm`` as something that runs.

    Args:
        gm: a localized graph; its placeholders' ``meta["val"]`` are fake tensors.
        backend: "inductor" or "eager".
        by: Inductor lowers it "whole", by "blocks" that repeat, each kind once, or, "auto", by blocks where four are
            alike.
        backward: it is the backward half.
        inference: no backward will follow.
    """
    plan = output_node(gm.graph).meta.get(PLAN, MemoryPlan())
    at = gm.meta.get(SIZED)
    if backend == "eager":
        return Compiled(whole(gm), (Code(_eager(gm)),), plan)
    if at is not None:
        return _at_any_sizes(gm, at, plan, backward, inference)
    segments = whole(gm) if by == "whole" else cut(gm, LEAST if by == "auto" else 2)
    made: dict[fx.GraphModule, Code] = {}
    half = "inference" if inference else "backward" if backward else "forward"
    for each in steps(list(dict.fromkeys(segment.gm for segment in segments)), f"lowering the {half}"):
        inputs = _unlike([n.meta["val"] for n in each.graph.find_nodes(op="placeholder")])
        with _graph_cache(inputs):
            made[each] = Code(*_inductor(each, inputs, backward, inference))
    codes = tuple(made[segment.gm] for segment in segments)
    takes = tuple(node.name for node in gm.graph.find_nodes(op="placeholder"))
    gives = tuple(x.name if isinstance(x, fx.Node) else x for x in output_node(gm.graph).args[0])
    plan = _as_emitted(plan, segments, codes, takes, gives)
    constants = {node.name: attrgetter(str(node.target))(gm) for node in gm.graph.find_nodes(op="get_attr")}
    return Compiled(segments, codes, plan, takes, gives, constants)


def _unlike(values: Sequence[Any]) -> list[Any]:
    """Fake tensors like ``values``, no two of which are one: an op's operands are found by identity."""
    mode = next((x.fake_mode for x in values if isinstance(x, FakeTensor)), None) or FakeTensorMode()
    with mode:
        return [
            torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=x.device) if isinstance(x, Tensor) else x
            for x in values
        ]


def _inductor(gm: fx.GraphModule, inputs: Sequence[Any], backward: bool, inference: bool) -> tuple[Any, str]:
    """What Inductor makes of ``gm``, and its code."""
    # Its own reorderings would take the schedule apart.
    with inductor_config.patch(reorder_for_peak_memory=False, reorder_for_locality=False):
        compiled = compile_fx_inner(_decomposed(gm, inputs), inputs, is_backward=backward, is_inference=inference)
    # A graph without ops is not compiled, and has no source.
    source = getattr(compiled, "source_code", "")
    check_order(gm.graph, source)
    return compiled, source


def _as_emitted(
    plan: MemoryPlan, segments: Sequence[Segment], codes: Sequence[Code], takes: Sequence[str], gives: Sequence[Any]
) -> MemoryPlan:
    """``plan`` at the lifetimes of the code."""
    if not plan.slots or not all(code.source for code in codes):
        return plan
    read = {code.source: uses_of(code.source) for code in codes}
    uses = [read[code.source] for code in codes]
    found = uses[0] if len(uses) == 1 else joined(uses, segments, takes, gives)
    return plan.moved(found.spans, found.leaving, found.given[len(found.given) - len(plan.given) :])


@contextmanager
def _graph_cache(inputs: Sequence[Any]) -> Iterator[None]:
    """A block in which Inductor may cache whole graphs, under keys that the lowerings of this file are part of."""
    mode = next((x.fake_mode for x in inputs if isinstance(x, FakeTensor)), None) or FakeTensorMode()
    if mode.shape_env is None:
        mode.shape_env = ShapeEnv()  # without one, Inductor caches nothing
    with tracing(TracingContext(mode)), config.patch(cache_key_tag=_tag()):  # type: ignore[attr-defined]
        yield


@cache
def _tag() -> str:
    return f"shardc {hashlib.sha256(Path(__file__).read_bytes()).hexdigest()}"


def artifacts(compile_all: Callable[[], object]) -> bytes | None:
    """Inductor's artifacts of what ``compile_all`` lowers; None if there are none."""
    with CacheArtifactManager.with_fresh_cache(), inductor_config.patch(fx_graph_cache=True):
        compile_all()
        made = torch.compiler.save_cache_artifacts()
    return None if made is None else made[0]


def load_artifacts(data: bytes) -> None:
    """Puts artifacts into Inductor's cache. They are unpickled: only of those whom one trusts."""
    torch.compiler.load_cache_artifacts(data)


def fakes(values: Sequence[Mapping[str, Any]]) -> list[Any]:
    """Fake tensors of one mode for a graph's placeholders; a constant is itself.

    Args:
        values: ``shape``, ``stride``, ``dtype`` and ``device`` of each tensor, or ``constant``.
    """
    with FakeTensorMode():
        return [
            value["constant"]
            if "constant" in value
            else torch.empty_strided(value["shape"], value["stride"], dtype=value["dtype"], device=value["device"])
            for value in values
        ]


def _at_any_sizes(gm: fx.GraphModule, at: At, plan: MemoryPlan, backward: bool, inference: bool) -> Compiled:
    """``gm``, compiled once for all sizes that what Inductor looked at holds for."""
    units = at.units
    compiled = next((one for holds, one in at.graph.compiled if holds(units)), None)
    if compiled is None:
        env = ShapeEnv()
        mode = FakeTensorMode(allow_non_fake_inputs=True, shape_env=env)
        # Torch takes 0 and 1 for sizes of their own: what has one element is broadcast.
        symbols = {name: _symbol(env, name, unit) if unit > 1 else unit for name, unit in units.items()}
        with mode:
            inputs = at.graph.inputs(symbols)
        compiled = _inductor(at.graph.symbolic(gm), inputs, backward, inference)
        at.graph.compiled.append((partial(_holds, env, symbols), compiled))
    code, source = compiled
    given = list(units.values())

    def run(inputs: list[Tensor]) -> Sequence[Any]:
        both: list[Any] = [*given, *inputs]
        inputs.clear()
        return code(both)

    codes = (Code(run, source),)
    return Compiled(whole(gm), codes, _as_emitted(plan, whole(gm), codes, (), ()))


def _symbol(env: ShapeEnv, name: str, value: int) -> Any:
    source = ConstantSource(name)
    symbol = env.create_symbol(value, source=source, dynamic_dim=DimDynamic.DYNAMIC, constraint_dim=None)
    return env.create_symintnode(symbol, hint=value, source=source)


def _holds(env: ShapeEnv, symbols: Mapping[str, Any], units: Mapping[str, int]) -> bool:
    """Whether what was asked of the sizes while compiling has the same answers for ``units``."""
    fixed = {name: x for name, x in symbols.items() if isinstance(x, int)}
    if any(units[name] != x if name in fixed else units[name] < 2 for name, x in symbols.items()):
        return False
    values = {x.node._expr: sympy.Integer(units[name]) for name, x in symbols.items() if name not in fixed}
    return all(guard.expr.xreplace(values) == sympy.true for guard in env.guards)


def _decomposed(gm: fx.GraphModule, inputs: Sequence[Any]) -> fx.GraphModule:
    """``gm`` in the ops that Inductor lowers; the order of its collectives stays."""
    mode = next((x.fake_mode for x in inputs if isinstance(x, FakeTensor)), None) or FakeTensorMode()
    with mode, torch.no_grad():
        made = make_fx(gm, decomposition_table=_widened(select_decomp_table()))(*inputs)
    # Results that are not the user's Inductor may give other strides, as convolutions prefer them, but the backward
    # half is compiled for those of the trace.
    last = output_node(made.graph)
    last.meta["user_visible_output_idxs"] = [at for at, x in enumerate(last.args[0]) if isinstance(x, fx.Node)]
    return made


def _widened(table: Mapping[Any, Callable[..., Any]]) -> dict[Any, Callable[..., Any]]:
    """``table``, with matrix products, convolutions and attention of few bits in float32 on a CPU that lacks them.

    There torch takes 3 to 50 times as long for them as for float32, by layout. What is added up is the same.
    """
    known: dict[int, tuple[Tensor, Tensor]] = {}  # casts, by the tensor's identity; the tensor is held with it

    def wide(x: Any) -> Any:
        if not _is_slow(x):
            return x
        if id(x) not in known:
            known[id(x)] = x, x.to(torch.float32)
        return known[id(x)][1]

    def decomposition(op: Any) -> Callable[..., Any]:
        # The others of a forward's results, as the log-sum-exp, have float32 and counters.
        narrowed = 1 if op in _FORWARD_ATTENTION else None

        def decomposed(*args: Any, **kwargs: Any) -> Any:
            low = next((x for x in pytree.arg_tree_leaves(*args, **kwargs) if _is_slow(x)), None)
            if low is None:
                return table[op](*args, **kwargs) if op in table else NotImplemented
            made = op(*pytree.tree_map(wide, args), **pytree.tree_map(wide, kwargs))
            if isinstance(made, Tensor):
                return made.to(low.dtype)
            back = [x.to(low.dtype) if isinstance(x, Tensor) else x for x in made[:narrowed]]
            return (*back, *made[len(back) :])

        return decomposed

    return {**table, **{op: decomposition(op) for op in _DENSE}}


def _is_slow(x: Any) -> bool:
    """Whether ``x`` is a tensor of a dtype in which this CPU has no fast matrix products."""
    return isinstance(x, Tensor) and x.device.type == "cpu" and x.dtype in _slow_dtypes()


@cache
def _slow_dtypes() -> frozenset[torch.dtype]:
    """The dtypes of few bits that torch's CPU library does not compute in on this machine."""
    mkldnn = torch.ops.mkldnn
    has = {torch.bfloat16: "_is_mkldnn_bf16_supported", torch.float16: "_is_mkldnn_fp16_supported"}
    return frozenset(dtype for dtype, asked in has.items() if not (hasattr(mkldnn, asked) and getattr(mkldnn, asked)()))


def _eager(gm: fx.GraphModule) -> Callable[[list[Tensor]], Sequence[Any]]:
    def run(inputs: list[Tensor]) -> Sequence[Any]:
        # Takes the inputs out of the list and lets go of each value after its last use.
        with torch.no_grad():
            return fx.Interpreter(gm).boxed_run(inputs)

    return run


def min_cut(joint: fx.GraphModule, forward_outputs: int) -> tuple[fx.GraphModule, fx.GraphModule]:
    """Splits a joint graph by AOTAutograd's min-cut: little is saved, cheap ops run again in backward."""
    inputs = [n.meta["val"] for n in joint.graph.nodes if n.op == "placeholder"]
    count = sum(n.name.startswith("primals") for n in joint.graph.find_nodes(op="placeholder"))
    primals, tangents = inputs[:count], inputs[count:]
    with functorch_config.patch(functionalize_rng_ops=False), _nothing_draws(), _unread_waits_go():
        return min_cut_rematerialization_partition(joint, (primals, tangents), num_fwd_outputs=forward_outputs)


@contextmanager
def _nothing_draws() -> Iterator[None]:
    """No random state is kept for what runs again: an attention kernel that drops nothing is tagged as if it drew."""
    asked = partitioners.has_recomputable_rng_ops
    partitioners.has_recomputable_rng_ops = lambda fx_g: False
    try:
        yield
    finally:
        partitioners.has_recomputable_rng_ops = asked


@contextmanager
def _unread_waits_go() -> Iterator[None]:
    """A collective that nobody reads is dead: each half has those that it reads, and the cut does not keep the rest."""
    waits = _side_effectful_functions & {c10d.wait_tensor, c10d.wait_tensor.default}
    _side_effectful_functions.difference_update(waits)
    try:
        yield
    finally:
        _side_effectful_functions.update(waits)


def must_recompute(node: fx.Node, region: int) -> None:
    """Marks ``node``, which does not draw, to run again in backward instead of being saved."""
    node.meta["recompute"] = CheckpointPolicy.MUST_RECOMPUTE
    node.meta["ac_graph_id"] = region


def must_save(node: fx.Node, region: int) -> None:
    """Marks ``node`` to be saved for backward."""
    node.meta["recompute"] = CheckpointPolicy.MUST_SAVE
    node.meta["ac_graph_id"] = region


def _keep_inputs(op: Any) -> None:
    """Makes Inductor lower ``op`` as a collective, whose inputs' memory is not used again before the wait."""

    @register_lowering(op, type_promotion_kind=None)
    def lowered(*args: Any) -> Any:
        return pytree.tree_map(inductor.TensorBox.create, inductor._CollectiveKernel.create_out_of_place(op, *args))


for _op in (
    torch.ops.shardc.permute_ranks.default,
    torch.ops.shardc.all_gather_into_tensor_coalesced.default,
    torch.ops.shardc.reduce_scatter_tensor_coalesced.default,
    torch.ops.shardc.all_reduce_coalesced.default,
    torch.ops.shardc.to_device.default,
    torch.ops.shardc.to_host.default,
):
    _keep_inputs(_op)
