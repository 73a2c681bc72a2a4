"""Every form of plan against the same model on one device, on ranks of one kind of device.

    python -m benchmarks.gpu.correct --device cuda --ranks 2 --forms ddp,fsdp3 --rows out/gpu/rows.jsonl

A case is a form under one backend and dtype. It trains a small decoder for some steps beside the plain model and
compares losses and gradients. ``bf16`` computes in it by `shardc.precision`, beside the plain model in float32. Forms
of float8 are compared with a plain model that quantises the same operands, without updates.
"""

from __future__ import annotations

import argparse
import importlib.util
import tempfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

import shardc
from benchmarks.gpu.kernels import LENGTH, eager_flex, in_float8, with_documents
from benchmarks.gpu.ranks import World, mesh_of, start
from benchmarks.gpu.rows import Skipped, tried
from examples.models import llama
from shardc.capture import capture

VARIANTS = ("eager/f32", "inductor/f32", "eager/bf16", "inductor/bf16")
# Of losses, and of all gradients together: the norm of the difference over the norm.
CLOSE = {"f32": 1e-4, "bf16": 5e-2}
# Two sums that differ by rounding may be rounded to neighbours in float8. Another scaling differs by 0.17 in float32.
CLOSE_FLOAT8 = {"f32": 3e-2, "bf16": 2e-1}
STEPS, RATE = 2, 1e-3
Compile = Callable[..., Any]


@dataclass(frozen=True)
class Form:
    """A way to shard the decoder, and what is done with the module.

    Args:
        plan: whose axes are ``axes``; the last has all ranks.
        options: of `shardc.Options`.
        checkpoint: blocks are computed again in backward.
        check: takes the form, a mesh, the device, the backend and the dtype; gives the largest difference.
        close: the largest difference that is allowed, by dtype.
    """

    plan: shardc.Plan
    axes: tuple[str, ...] = ("dp",)
    options: Mapping[str, Any] = field(default_factory=dict)
    checkpoint: bool = False
    check: Callable[..., float] = lambda *args: trains(*args)
    close: Mapping[str, float] = field(default_factory=lambda: CLOSE)

    def source(self, device: torch.device) -> nn.Module:
        """The plain model."""
        torch.manual_seed(0)
        return llama.Llama(llama.LlamaConfig(checkpoint=self.checkpoint)).to(device)

    def compiled(self, source: nn.Module, mesh: DeviceMesh, backend: str, dtype: str, **more: Any) -> Any:
        low = shardc.precision(param=torch.bfloat16, reduce=torch.float32)
        plan = self.plan | low if dtype == "bf16" else self.plan
        options = shardc.Options(**self.options)
        return shardc.compile(source, mesh, plan, loss=llama.loss, backend=backend, options=options, **more)


def batches(device: torch.device, count: int = STEPS, **sizes: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Global batches, the same on every rank and kind of device."""
    torch.manual_seed(1)
    for _ in range(count):
        tokens, targets = llama.batch(llama.LlamaConfig(), **sizes)
        yield tokens.to(device), targets.to(device)


def difference(module: nn.Module, source: nn.Module) -> float:
    """Of all gradients together, relative to their norm."""
    apart = norm = 0.0
    for name, param in source.named_parameters():
        grad = module.get_parameter(name).grad
        assert (grad is None) == (param.grad is None), f"{name} has a gradient on one side alone"
        if param.grad is not None:
            whole = grad.full_tensor() if isinstance(grad, DTensor) else grad
            apart += (whole.to(param.device).double() - param.grad.double()).pow(2).sum().item()
            norm += param.grad.double().pow(2).sum().item()
    return (apart / max(norm, 1e-30)) ** 0.5


def loss_apart(ours: Tensor, theirs: Tensor) -> float:
    return abs(ours.item() - theirs.item()) / abs(theirs.item())


def trains(
    form: Form, mesh: DeviceMesh, device: torch.device, backend: str, dtype: str, model: nn.Module | None = None,
    **sizes: int,
) -> float:  # fmt: skip
    """Steps of AdamW on the shards, and what evaluation gives behind them."""
    source = form.source(device) if model is None else model
    module = form.compiled(source, mesh, backend, dtype)
    ours = shardc.optim.wrap(torch.optim.AdamW, module, lr=RATE)
    theirs = torch.optim.AdamW(source.parameters(), lr=RATE)
    apart = []
    for x, y in batches(device, **sizes):
        mine, other = module(*module.shard_inputs(x, y)), llama.loss(source(x), y)
        mine.backward()
        other.backward()
        apart += [loss_apart(mine, other), difference(module, source)]
        for optimizer in (ours, theirs):
            optimizer.step()
            optimizer.zero_grad()
    with torch.no_grad():
        apart.append(loss_apart(module(*module.shard_inputs(x, y)), llama.loss(source(x), y)))
    return max(apart)


def accumulates(form: Form, mesh: DeviceMesh, device: torch.device, backend: str, dtype: str) -> float:
    """Two micro-batches, of which the first communicates no gradients."""
    source = form.source(device)
    module = form.compiled(source, mesh, backend, dtype)
    (x, y), (more_x, more_y) = batches(device)
    with module.no_sync():
        module(*module.shard_inputs(x, y)).backward()
    module(*module.shard_inputs(more_x, more_y)).backward()
    (llama.loss(source(x), y) + llama.loss(source(more_x), more_y)).backward()
    return difference(module, source)


def resizes(form: Form, mesh: DeviceMesh, device: torch.device, backend: str, dtype: str) -> float:
    """One program for batches of three sizes."""
    source = form.source(device)
    captured: list[Any] = []

    def counted(*args: Any, **kwargs: Any) -> Any:
        captured.append(args)
        return capture(*args, **kwargs)

    both = {0: "b", 1: "t"}
    once = replace(form, options={"capture": counted})
    module = once.compiled(source, mesh, backend, dtype, dynamic={"tokens": both, "target": both})
    apart, first = [], 0
    for size, length in ((8, 16), (12, 16), (8, 24)):
        ((x, y),) = batches(device, 1, size=size, length=length)
        mine, other = module(*module.shard_inputs(x, y)), llama.loss(source(x), y)
        mine.backward()
        other.backward()
        apart += [loss_apart(mine, other), difference(module, source)]
        module.zero_grad()
        source.zero_grad()
        first = first or len(captured)
    assert len(captured) == first, "a second size was captured again"
    return max(apart)


def loads(form: Form, mesh: DeviceMesh, device: torch.device, backend: str, dtype: str) -> float:
    """A saved program, with Inductor's artifacts, in a module that captures nothing."""
    source = form.source(device)
    first = form.compiled(source, mesh, backend, dtype)
    ((x, y),) = batches(device, 1)
    first(*first.shard_inputs(x, y)).backward()

    def refused(*args: Any, **kwargs: Any) -> Any:
        raise AssertionError("the saved program does not serve the call, which was captured")

    folder = tempfile.mkdtemp()
    first.lower(x, y).save(folder)
    saved = shardc.load(folder, trust=True)
    module = replace(form, options={"capture": refused}).compiled(source, mesh, backend, dtype, precompiled=saved)
    mine, other = module(*module.shard_inputs(x, y)), llama.loss(source(x), y)
    mine.backward()
    other.backward()
    return max(loss_apart(mine, other), difference(module, source))


def attends(form: Form, mesh: DeviceMesh, device: torch.device, backend: str, dtype: str) -> float:
    """`flex_attention` of packed sequences; the plain model's is torch's own, without a kernel."""
    with eager_flex():
        return trains(form, mesh, device, backend, dtype, with_documents(device), length=LENGTH)


def quantises(form: Form, mesh: DeviceMesh, device: torch.device, backend: str, dtype: str, scaling: str) -> float:
    """Gradients of products in float8; beside ``f32`` also in float64, where a number in float8 is never another."""
    apart = []
    for wide in (torch.float64, torch.float32) if dtype == "f32" else (torch.float32,):
        source = form.source(device).to(wide)
        module, plain = form.compiled(source, mesh, backend, dtype), in_float8(source, scaling)
        for x, y in batches(device):
            mine, other = module(*module.shard_inputs(x, y)), llama.loss(plain(x), y)
            mine.backward()
            other.backward()
            apart += [loss_apart(mine, other), difference(module, plain)]
            module.zero_grad()
            plain.zero_grad()
        if wide == torch.float64:
            assert max(apart) <= 1e-9, f"differs by {max(apart):.1e} in float64, allowed are 1e-09"
    return max(apart)


def library(form: Form, mesh: DeviceMesh, device: torch.device, backend: str, dtype: str) -> float:
    """A Llama of `transformers`, which computes its own loss."""
    if importlib.util.find_spec("transformers") is None:
        raise Skipped("transformers is not installed")
    import transformers as hf

    torch.manual_seed(0)
    sizes = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
    config = hf.LlamaConfig(**sizes, num_attention_heads=4, num_key_value_heads=4, use_cache=False)
    source = hf.LlamaForCausalLM(config).to(device)
    low = shardc.precision(param=torch.bfloat16, reduce=torch.float32)
    module = shardc.compile(source, mesh, form.plan | low if dtype == "bf16" else form.plan, backend=backend)
    apart = []
    for x, _ in batches(device):
        given = {"input_ids": x, "attention_mask": torch.ones_like(x), "labels": x}
        mine, other = module(**module.shard_inputs(**given)[1]).loss, source(**given).loss
        mine.backward()
        other.backward()
        mean = mine.detach() / mesh.size()
        dist.all_reduce(mean)  # each rank has the loss of its own rows
        apart += [loss_apart(mean, other), difference(module, source)]
        module.zero_grad()
        source.zero_grad()
    return max(apart)


def _float8(scaling: Literal["tensorwise", "rowwise"], plan: shardc.Plan, *axes: str) -> Form:
    scaled = shardc.precision(matmul="float8", scaling=scaling, modules="layers")
    return Form(plan | scaled, axes or ("dp",), check=partial(quantises, scaling=scaling), close=CLOSE_FLOAT8)


_FSDP = shardc.fsdp("dp")
FORMS: dict[str, Form] = {
    "ddp": Form(shardc.ddp("dp")),
    "fsdp1": Form(shardc.fsdp("dp", level=1)),
    "fsdp2": Form(shardc.fsdp("dp", level=2)),
    "fsdp3": Form(_FSDP),
    "hsdp": Form(shardc.hsdp(shard="dp", replicate="rep"), ("rep", "dp")),
    "hsdp, replicas": Form(shardc.hsdp(shard="dp", replicate="rep"), ("dp", "rep")),
    "tp": Form(llama.llama_tp("tp"), ("tp",)),
    "tp+sp": Form(llama.llama_tp("tp", sequence=True), ("tp",)),
    "fsdp3+tp": Form(_FSDP | llama.llama_tp("tp"), ("dp", "tp")),
    "offload": Form(_FSDP | shardc.offload("*")),
    "offload some, pageable": Form(_FSDP | shardc.offload("layers.*", pin_memory=False)),
    "memory_budget": Form(_FSDP, options={"memory_budget": 64 << 10}),
    "checkpoint": Form(_FSDP, checkpoint=True),
    "checkpoint, tp+sp": Form(llama.llama_tp("tp", sequence=True), ("tp",), checkpoint=True),
    "no_sync": Form(_FSDP, check=accumulates),
    "microbatches": Form(_FSDP | shardc.microbatches(2)),
    "microbatches, gathered once": Form(shardc.fsdp("dp", gather="step") | shardc.microbatches(2)),
    "dynamic": Form(_FSDP, check=resizes),
    "saved": Form(_FSDP, check=loads),
    "transformers": Form(_FSDP, check=library),
    "flex": Form(_FSDP, check=attends),
    **{f"flex, {method}": Form(shardc.cp("cp", method=method), ("cp",), check=attends)
       for method in ("gather", "ring", "ulysses")},
    "float8": _float8("tensorwise", _FSDP),
    "float8, rowwise": _float8("rowwise", _FSDP),
    "float8, fsdp3+tp": _float8("tensorwise", _FSDP | llama.llama_tp("tp"), "dp", "tp"),
    "float8, rowwise, fsdp3+tp": _float8("rowwise", _FSDP | llama.llama_tp("tp"), "dp", "tp"),
}  # fmt: skip


def run(name: str, variant: str, world: World) -> tuple[str, dict[str, Any]]:
    """One case on this rank, inside of its process group; a note and numbers.

    Raises:
        AssertionError: a difference is larger than `CLOSE`.
    """
    form, (backend, dtype) = FORMS[name], variant.split("/")
    mesh = mesh_of(world.kind, world.ranks, form.axes)
    torch._dynamo.reset()
    apart = form.check(form, mesh, world.device, backend, dtype)
    assert apart <= form.close[dtype], f"differs by {apart:.1e}, allowed are {form.close[dtype]:.0e}"
    return f"differs by {apart:.1e}", {"difference": apart}


def _case(name: str, variant: str, world: World) -> tuple[str, dict[str, Any]]:
    """`run` on all ranks; what one of them raises is raised on the first."""
    key, mine = f"{name}/{variant}", ""
    world.enter(key)
    try:
        made = run(name, variant, world)
    except (Skipped, Exception) as error:
        if world.ranks == 1:
            raise
        mine = f"rank {world.rank}: {type(error).__name__}: {error}"
        made = "", {}
        wrong = isinstance(error, AssertionError)
        mine = ("skipped: " if isinstance(error, Skipped) else "wrong: " if wrong else "failed: ") + mine
    finally:
        if world.ranks == 1:
            world.leave()
    if world.ranks > 1:
        said = [text for text in world.said(key, mine) if text]
        world.leave()
        if said:
            kind = {"s": Skipped, "w": AssertionError}.get(said[0][0], RuntimeError)
            raise kind("; ".join(said))
    return made


def _rank(rank: int, ranks: int, folder: str, device: str, forms: list[str], variants: list[str], rows: str) -> None:
    torch.set_num_threads(1)
    world = World(device, rank, ranks, folder)
    section = f"{ranks} rank{'s' * (ranks > 1)}"
    for name in forms:
        for variant in variants:
            path = Path(rows) if rank == 0 else None
            tried(path, section, f"{name}, {variant}", 90, partial(_case, name, variant, world))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--forms", default=";".join(FORMS), help="joined by semicolons")
    parser.add_argument("--variants", default=",".join(VARIANTS))
    parser.add_argument("--rows", required=True)
    given = parser.parse_args()
    start(given.ranks, _rank, given.device, given.forms.split(";"), given.variants.split(","), given.rows)


if __name__ == "__main__":
    main()
