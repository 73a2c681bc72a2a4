"""Blocks that are folded, on real gloo ranks, with everything that else is done to a model: as on one device."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import partial
from math import prod
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.utils.checkpoint import checkpoint

import shardc
from shardc.ir.mesh import Mesh
from shardc.runtime.full_params import unshard
from tests.ranks import device_mesh, run_ranks

WIDTH, DEPTH, ROWS = 6, 6, 8
FSDP = shardc.fsdp("dp")
TP = shardc.tp("tp", colwise=["layers.*.up"], rowwise=["layers.*.down"])


class Block(nn.Module):
    """A residual block; ``scale`` is a number that it reads, ``again`` makes it a checkpoint region."""

    def __init__(self, scale: float = 1.0, drop: float = 0.0, again: bool = False, norm: str = "layer") -> None:
        super().__init__()
        self.norm: nn.Module = nn.LayerNorm(WIDTH) if norm == "layer" else nn.BatchNorm1d(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)
        self.scale, self.drop, self.again = scale, drop, again

    def body(self, x: Tensor) -> Tensor:
        out = self.down(torch.relu(self.up(self.norm(x)))) * self.scale
        return x + F.dropout(out, self.drop, self.training)

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self.body, x, use_reentrant=False) if self.again else self.body(x)


class Net(nn.Module):
    """Blocks between two projections; the loss, or with ``parts`` what two heads and the last block give."""

    def __init__(self, blocks: Sequence[nn.Module], parts: bool) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.layers = nn.ModuleList(blocks)
        self.last, self.other = nn.Linear(WIDTH, 1), nn.Linear(WIDTH, 3)
        self.parts = parts

    def forward(self, x: Tensor) -> Any:
        x = self.first(x)
        for layer in self.layers:
            x = layer(x)
        if self.parts:
            return {"last": self.last(x), "other": self.other(x.tanh()), "hidden": x}
        return self.last(x).square().mean() + self.other(x).sin().mean()


@dataclass(frozen=True)
class Case:
    """What is done with a model of alike blocks.

    Args:
        block: makes a block, given its number.
        change: done to the model before it is compiled.
        drive: does steps on the module and on one device, and compares.
        folds: whether each program is folded; one value for all.
        more: of `shardc.compile`.
    """

    plan: shardc.Plan = FSDP
    block: Callable[[int], nn.Module] = lambda at: Block()
    change: Callable[[Any], Any] = lambda model: None
    drive: Callable[[Any], None] = lambda pair: steps(pair)
    folds: Any = True
    depth: int = DEPTH
    parts: bool = False
    mesh: dict[str, int] = field(default_factory=lambda: {"dp": 2})
    options: dict[str, Any] = field(default_factory=dict)
    more: dict[str, Any] = field(default_factory=dict)
    dtype: torch.dtype = torch.float64

    def model(self, seed: int = 0) -> Net:
        torch.manual_seed(seed)
        made = Net([self.block(at) for at in range(self.depth)], self.parts).to(self.dtype)
        self.change(made)
        return made

    def compiled(self, model: nn.Module, **more: Any) -> Any:
        given = {"backend": "eager", "options": shardc.Options(**self.options), **self.more, **more}
        return shardc.compile(model, device_mesh(Mesh(self.mesh)), self.plan, **given)


class Pair:
    """A sharded module and the same model on one device."""

    def __init__(self, case: Case) -> None:
        self.case, self.source = case, case.model()
        self.module = case.compiled(self.source)

    @property
    def both(self) -> tuple[Any, Any]:
        return self.module, self.source

    def batch(self, seed: int, rows: int = ROWS) -> Tensor:
        drawn = torch.randn(rows, WIDTH, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
        return drawn.to(self.case.dtype)

    def change(self, change: Callable[[Any], Any]) -> None:
        for one in self.both:
            change(one)

    def close(self, ours: Tensor, theirs: Tensor, what: str) -> None:
        error = (ours.detach() - theirs.detach()).norm() / theirs.detach().norm().clamp(min=1e-3)
        assert error <= 1e-9, f"{what} is wrong by {error}"

    def backward(self, seed: int, rows: int = ROWS, share: int = 1) -> None:
        """Gradients of one loss."""
        ours, theirs = (
            self.module(self.module.shard_inputs(self.batch(seed, rows))),
            self.source(self.batch(seed, rows)),
        )
        self.close(ours, theirs, "the loss")
        for loss in (ours, theirs):
            (loss / share).backward()

    def same(self, grads: bool = True) -> None:
        for name, theirs in self.source.named_parameters():
            ours = self.module.get_parameter(name)
            mine, other = (ours.grad, theirs.grad) if grads else (ours, theirs)
            assert (mine is None) == (other is None), f"{name} has no gradient, or should have none"
            if other is not None:
                self.close(unshard(mine, self.module.shardc.spec.storages[name]), other, f"{name}, gradient: {grads}")
        for name, theirs in self.source.named_buffers():
            self.close(self.module.get_buffer(name).double(), theirs.double(), name)

    def optimizers(self) -> list[torch.optim.Optimizer]:
        wrapped = shardc.optim.wrap(torch.optim.AdamW, self.module, lr=0.05)
        return [wrapped, torch.optim.AdamW(self.source.parameters(), lr=0.05)]

    def update(self, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        """Compares gradients, their norm, by which they are clipped, and the parameters after a step."""
        self.same()
        self.close(
            self.module.clip_grad_norm_(0.1), nn.utils.clip_grad_norm_(self.source.parameters(), 0.1), "the norm"
        )
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        self.same(grads=False)


# --- what is done with it


def steps(pair: Pair) -> None:
    """Two steps of AdamW."""
    optimizers = pair.optimizers()
    for seed in range(2):
        pair.backward(seed)
        pair.update(optimizers)


def adds_up(pair: Pair, held: bool) -> None:
    """Two steps of three backwards each, of which the last alone reduces gradients where they are ``held``."""
    optimizers = pair.optimizers()
    for _ in range(2):
        with pair.module.no_sync() if held else nullcontext():
            for seed in range(2):
                pair.backward(seed, share=3)
        pair.backward(2, share=3)
        pair.update(optimizers)


def of_some_outputs(pair: Pair) -> None:
    """The loss takes one output, then another, then all but one."""
    optimizers = pair.optimizers()
    for seed, used in enumerate((["last"], ["other"], ["hidden"], ["last", "hidden"])):
        ours, theirs = pair.module(pair.module.shard_inputs(pair.batch(seed))), pair.source(pair.batch(seed))
        for outs in (ours, theirs):
            sum(outs[name].square().mean() for name in used).backward()  # type: ignore[union-attr]
        pair.update(optimizers)


def of_many_sizes(pair: Pair) -> None:
    optimizers = pair.optimizers()
    for seed, rows in enumerate((8, 12)):
        pair.backward(seed, rows)
        pair.update(optimizers)


def of_uneven_rows(pair: Pair) -> None:
    """Ranks pass rows of their own number."""
    optimizers, mine = pair.optimizers(), dist.get_rank()
    for seed, rows in enumerate(((3, 5), (4, 4), (7, 1))):
        x = pair.batch(seed, sum(rows))
        ours, theirs = pair.module(x.split(rows)[mine]), pair.source(x)
        pair.close(ours, theirs, "the loss")
        ours.backward(), theirs.backward()
        pair.update(optimizers)


def changed_between(pair: Pair, *changes: Callable[[Any], Any]) -> None:
    """A step, then one behind each of the changes to both models."""
    optimizers = pair.optimizers()
    for seed, change in enumerate((lambda model: None, *changes)):
        pair.change(change)
        pair.backward(seed)
        pair.update(optimizers)


def shared(make: Callable[[], Any]) -> Any:
    """What the first rank makes, on all."""
    made = [make() if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(made)
    return made[0]


def saves_and_loads(pair: Pair) -> None:
    """The first rank saves the program; another module steps and evaluates with it."""
    x, folder, fresh = pair.batch(0), shared(tempfile.mkdtemp), pair.module
    program = fresh.lower(x)
    assert program.folded is not None
    if dist.get_rank() == 0:
        program.save(folder)
    dist.barrier()
    saved = shardc.load(folder)
    pair.module = pair.case.compiled(pair.source, precompiled=[saved])
    steps(pair)
    with torch.no_grad():
        pair.close(pair.module(pair.module.shard_inputs(x)), pair.source(x), "an evaluation")
    assert list(pair.module.shardc.programs.values()) == [saved], "something else was compiled"


def resumes(pair: Pair) -> None:
    """The state goes through DCP into a module of another seed, which goes on; whole state dicts are one device's."""
    optimizers = pair.optimizers()
    pair.backward(0)
    pair.update(optimizers)
    folder = shared(tempfile.mkdtemp)
    saved = dict(zip(("model", "optimizer"), get_state_dict(pair.module, optimizers[0]), strict=True))
    dcp.save(saved, checkpoint_id=folder)
    pair.module = pair.case.compiled(pair.case.model(seed=7))
    again = pair.optimizers()[0]
    state = dict(zip(("model", "optimizer"), get_state_dict(pair.module, again), strict=True))
    dcp.load(state, checkpoint_id=folder)
    set_state_dict(pair.module, again, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
    pair.backward(1)
    pair.update([again, optimizers[1]])
    for name, value in pair.module.full_state_dict().items():
        pair.close(value, pair.source.state_dict()[name], name)
    other = pair.case.model(seed=3)
    pair.source.load_state_dict(other.state_dict())
    pair.module.load_state_dict(other.state_dict())
    pair.backward(2)
    pair.same()


def as_whole(pair: Pair) -> None:
    """Bit for bit what comes of the model without folding, dropout included."""
    whole = pair.case.compiled(pair.case.model(), options=shardc.Options(fold=False))
    for one in (pair.module, whole):
        torch.manual_seed(5)
        one(one.shard_inputs(pair.batch(0))).backward()
    for ours, theirs in zip(pair.module.parameters(), whole.parameters(), strict=True):
        assert torch.equal(ours.grad.to_local(), theirs.grad.to_local())


def low(pair: Pair) -> None:
    """All gradients together are about as far from those in full precision as one device's in bfloat16 are."""
    as_whole(pair)
    near, x = pair.case.model().bfloat16(), pair.batch(0)
    near(x.bfloat16()).backward()
    pair.source(x).backward()
    stored = pair.module.shardc.spec.storages
    ours = {name: unshard(p.grad, stored[name]) for name, p in pair.module.named_parameters()}
    exact, other = ({name: p.grad.float() for name, p in one.named_parameters()} for one in (pair.source, near))
    error, allowed = (
        torch.stack([(found[name] - exact[name]).norm() for name in exact]).norm() for found in (ours, other)
    )
    assert 0 < error < 1.5 * allowed, (error, allowed)


def at(place: int, change: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Changes one block."""
    return lambda model: change(model.layers[place])


def hook(block: Any) -> None:
    block.register_forward_hook(lambda module, args, out: out * 2.0)


def scale(block: Any) -> None:
    block.scale = 3.0


def tie(model: Any) -> None:
    model.layers[4].up.weight = model.layers[1].up.weight


def freeze(model: Any, names: str) -> None:
    for name, param in model.named_parameters():
        param.requires_grad_(not name.startswith(names))


held, accumulated = (partial(adds_up, held=held) for held in (True, False))
LOW = shardc.precision(param=torch.bfloat16, reduce=torch.float32)
OFFLOAD = shardc.offload("layers.*")
HSDP = shardc.hsdp(shard="dp", replicate="rep")
CASES = {
    "small buckets": Case(options={"bucket_size": 0, "max_in_flight": 1000}),
    "no_sync": Case(drive=held),
    "no_sync, ddp": Case(shardc.ddp("dp"), drive=held),
    "no_sync, offloaded": Case(FSDP | OFFLOAD, drive=held),
    "accumulated, level 2": Case(shardc.fsdp("dp", level=2), drive=accumulated, depth=5),
    "some outputs": Case(parts=True, drive=of_some_outputs),
    "some outputs, checkpointed": Case(block=lambda at: Block(again=True), parts=True, drive=of_some_outputs),
    "saved, offloaded": Case(
        FSDP | OFFLOAD, drive=saves_and_loads, folds=[]
    ),  # what was saved is; a loaded one is not asked
    "uneven rows": Case(options={"uneven": True}, drive=of_uneven_rows),
    "checkpointed, no_sync": Case(block=lambda at: Block(again=True), drive=held),
    "low": Case(FSDP | LOW, drive=low, dtype=torch.float32),
    "resumed": Case(drive=resumes, folds=[]),  # the second module loads what the first stored
    # What differs between blocks: a run is as long as they are alike.
    "batch norm": Case(
        block=lambda at: Block(norm="batch"),
        drive=lambda pair: changed_between(pair, nn.Module.eval),
        folds=[False, True],
    ),
    "modes": Case(drive=lambda pair: changed_between(pair, at(4, nn.Module.eval)), folds=[True, False]),
    "frozen": Case(
        change=at(0, lambda block: block.requires_grad_(False)),
        drive=lambda pair: changed_between(
            pair, partial(freeze, names="layers.4.up.weight"), partial(freeze, names="layers.")
        ),
        folds=[True, False, True],
    ),
    "another number": Case(
        block=lambda at: Block(scale=1.0 + at // 5),
        drive=lambda pair: changed_between(pair, at(4, scale)),
        folds=[True, False],
    ),
    "a hook on the last": Case(change=at(5, hook)),
    "a hook in between": Case(change=at(2, hook), folds=False),
    "one offloaded": Case(FSDP | shardc.offload("layers.2.*"), folds=False),
    "tied": Case(change=tie, folds=False),
    "recomputed": Case(FSDP | shardc.recompute("layers.*")),
    "one recomputed": Case(FSDP | shardc.recompute("layers.2"), folds=False),
    "dropout": Case(block=lambda at: Block(drop=0.5), drive=as_whole, folds=False),
    # Their programs are of all sizes, made of a capture of the whole model, and kept elsewhere.
    "dynamic": Case(more={"dynamic": {"x": {0: "b"}}}, drive=of_many_sizes, depth=5, folds=[]),
    "hsdp, no_sync": Case(HSDP, mesh={"rep": 2, "dp": 2}, drive=held),
    "fsdp, tp": Case(FSDP | TP, mesh={"dp": 2, "tp": 2}),
    "fsdp, tp, no_sync": Case(FSDP | TP, mesh={"dp": 2, "tp": 2}, drive=held),
}


def run(name: str, again: bool = False) -> None:
    """One start; ``again``: after another, which stored all that could be."""
    case = CASES[name]
    pair = Pair(case)
    case.drive(pair)
    made = pair.module.shardc.cache
    programs = list(made.programs.values())
    if again:
        fresh = [program.stored for program in programs if not program.from_store]
        assert all(stored.startswith("not stored") for stored in fresh), f"{name}: {fresh}"
        return
    ranks: list[Any] = [None] * dist.get_world_size()  # of all, one captures each program
    dist.all_gather_object(ranks, [p.folded is not None if hasattr(p, "folded") else None for p in programs])
    found = [True in of for of in zip(*ranks, strict=True) if set(of) != {None}]
    assert found == case.folds if isinstance(case.folds, list) else set(found) == {case.folds}, f"{name}: {found}"


FEW = ("small buckets", "no_sync")


def cases(ranks: int) -> list[str]:
    return [name for name, case in CASES.items() if prod(case.mesh.values()) == ranks and name not in FEW]


def starts(ranks: int, names: Iterable[str]) -> None:
    """Two starts of each case, of which the second finds what the first stored."""
    for again in (False, True):
        run_ranks(ranks, *(partial(run, name, again) for name in names))


def test_a_step_and_no_sync() -> None:
    starts(2, FEW)


@pytest.mark.slow
def test_on_two_ranks() -> None:
    starts(2, cases(2))


@pytest.mark.slow
def test_on_four_ranks() -> None:
    starts(4, cases(4))
