"""What forward changes besides tensors in place: said, or refused."""

from __future__ import annotations

import copy
import itertools
import re
import tempfile
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import shardc
from shardc import Mesh, fsdp
from shardc.capture.side_effects import NOT_CHANGED
from shardc.errors import CaptureError, ShardcWarning

MESH = Mesh(dp=2)
PLAN = fsdp("dp", threshold=0)


def simulation(model: nn.Module) -> shardc.Simulation:
    return shardc.Simulation(shardc.compile(model, MESH, PLAN, backend="eager"))


class Attributes(nn.Module):
    """Of which each case below reads and changes some."""

    def __init__(self, run: Callable[[Any, Tensor], Tensor]) -> None:
        super().__init__()
        self.inner, self.run = nn.Linear(4, 4), run
        self.step, self.calls, self.seen = 0, 0, None
        self.listed: list[Any] = []
        self.cache: dict[str, Any] = {}
        self.average, self.table = torch.zeros(4), None

    def forward(self, x: Tensor) -> Tensor:
        return self.run(self, x)


def counts(self: Any, x: Tensor) -> Tensor:
    self.calls += 1
    self.seen = x.shape
    return self.inner(x)


def reads_what_it_set(self: Any, x: Tensor) -> Tensor:
    self.seen = 3.0
    return self.inner(x) * self.seen


def fills_a_table(self: Any, x: Tensor) -> Tensor:
    if self.table is None:
        self.table = torch.arange(4.0)
    if "mask" not in self.cache:
        self.cache["mask"] = torch.ones(4)
    return self.inner(x) + self.table * self.cache["mask"]


class Tables:
    """Holds tensors in an attribute, in a list of a dict, and in the closure of a function."""

    def __init__(self, plain: Tensor, nested: Tensor, closed: Tensor) -> None:
        self.plain, self.nested, self.scaled = plain, {"all": [nested]}, lambda x: x * closed

    def __call__(self, x: Tensor) -> Tensor:
        return self.scaled(x) * self.nested["all"][0] + self.plain


def fills_an_object(self: Any, x: Tensor) -> Tensor:
    if self.table is None:
        self.table = Tables(torch.arange(4.0), torch.full((4,), 2.0), torch.full((4,), 3.0))
    return self.table(self.inner(x))  # type: ignore[no-any-return]


def keeps_the_first_in_a_function(self: Any, x: Tensor) -> Tensor:
    if self.table is None:
        self.table = Tables(torch.arange(4.0), torch.ones(4), x.detach().mean(0))
    return self.table(self.inner(x))  # type: ignore[no-any-return]


def keeps_what_it_computes(self: Any, x: Tensor) -> Tensor:
    self.seen = self.inner(x)
    return x


def schedules(self: Any, x: Tensor) -> Tensor:
    self.step += 1
    return self.inner(x) * min(1.0, self.step / 10)


def schedules_by_name(self: Any, x: Tensor) -> Tensor:
    self.step = self.step + 1
    return self.inner(x) * getattr(self, "step")  # noqa: B009


def averages(self: Any, x: Tensor) -> Tensor:
    self.average = 0.9 * self.average + 0.1 * x.mean(0)
    return self.inner(x) + self.average


def remembers_the_first(self: Any, x: Tensor) -> Tensor:
    if self.table is None:
        self.table = x.mean(0)
    return self.inner(x) + self.table


def counts_in_a_list(self: Any, x: Tensor) -> Tensor:
    self.listed.append(1)
    return self.inner(x) * len(self.listed)


def keeps_in_a_dict(self: Any, x: Tensor) -> Tensor:
    before = self.cache.get("x")
    self.cache["x"] = x
    return self.inner(x) if before is None else self.inner(x) + before


SILENT = [counts, reads_what_it_set]
WARNED = {
    fills_a_table: ["attribute 'table'", "attribute 'cache'"],
    fills_an_object: ["attribute 'table'"],
    keeps_what_it_computes: ["attribute 'seen'"],
}
REFUSED = {
    schedules: "step", schedules_by_name: "step", averages: "average", remembers_the_first: "table",
    counts_in_a_list: "listed", keeps_in_a_dict: "cache",
    keeps_the_first_in_a_function: "table",
}  # fmt: skip


@pytest.mark.parametrize("run", [*SILENT, *WARNED], ids=lambda run: run.__name__)
def test_attributes_that_change_nothing(run: Callable[[Any, Tensor], Tensor]) -> None:
    model = nn.Sequential(Attributes(run))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        sim = simulation(model)
        x = torch.ones(4, 4)
        outs = [sim(x, grad=False) for _ in range(2)]
    told = [str(w.message) for w in caught if isinstance(w.message, ShardcWarning) and "attribute" in str(w.message)]
    assert set(told) == {f"module '0' changes its {what} {NOT_CHANGED}" for what in WARNED.get(run, ())}
    assert (model[0].calls, model[0].cache) == (0, {})
    for out in outs:
        torch.testing.assert_close(out, model(x))


@pytest.mark.parametrize("run", REFUSED, ids=lambda run: run.__name__)
def test_attributes_that_forward_reads_and_changes_are_refused(run: Callable[[Any, Tensor], Tensor]) -> None:
    module = shardc.compile(nn.Sequential(Attributes(run)), MESH, PLAN, backend="eager")
    name = REFUSED[run]
    with pytest.raises(CaptureError, match=f"forward reads and changes the attribute '0.{name}', which") as caught:
        module.lower(torch.empty(8, 4))
    first = run.__code__.co_firstlineno
    assert caught.value.source is not None and caught.value.fix is not None and f"self.{name}" in caught.value.fix
    file, _, line = caught.value.source.rpartition(":")
    assert file == __file__ and first < int(line) <= first + 4


def counts_lazily(self: Any, x: Tensor) -> Tensor:
    self.late = getattr(self, "late", 0) + 1
    return self.inner(x) * self.late


def tries_first(self: Any, x: Tensor) -> Tensor:
    try:
        self.late += 1
    except AttributeError:
        self.late = 1
    return self.inner(x) * self.late


def adds_the_last(self: Any, x: Tensor) -> Tensor:
    out = self.inner(x)
    out = out + self.late if hasattr(self, "late") else out
    self.late = x
    return out


def notes_lazily(self: Any, x: Tensor) -> Tensor:
    """Whether there is one makes no difference."""
    if not hasattr(self, "late"):
        self.late = None
    self.late = x
    return self.inner(x)


def makes_a_table(self: Any, x: Tensor) -> Tensor:
    if not hasattr(self, "late"):
        self.late = torch.arange(4.0)
    return self.inner(x) + self.late


def notes_a_number(self: Any, x: Tensor) -> Tensor:
    self.cache["calls"] = self.cache.get("calls", 0) + 1
    return self.inner(x)


@pytest.mark.parametrize("run", [counts_lazily, tries_first, adds_the_last], ids=lambda run: run.__name__)
def test_attributes_that_are_not_there_at_first(run: Callable[[Any, Tensor], Tensor]) -> None:
    with pytest.raises(CaptureError, match="forward reads and changes the attribute '0.late'"):
        simulation(nn.Sequential(Attributes(run)))(torch.ones(4, 4), grad=False)


@pytest.mark.filterwarnings("ignore:module '0' changes its attribute")
@pytest.mark.parametrize("run", [notes_lazily, makes_a_table, notes_a_number], ids=lambda run: run.__name__)
def test_attributes_that_are_made_and_change_nothing(run: Callable[[Any, Tensor], Tensor]) -> None:
    model = nn.Sequential(Attributes(run))
    x, own, sim = torch.ones(4, 4), copy.deepcopy(model), simulation(model)
    for _ in range(2):
        torch.testing.assert_close(sim(x, grad=False), own(x))


CALLS, LAST, TABLE, TOLD = 0, None, None, False
SEEN: list[Any] = []
COUNTED: dict[str, int] = {"calls": 0}
NUMBERS = itertools.count(1)


class Shared:
    calls = 0


def counts_globally(self: Any, x: Tensor) -> Tensor:
    global CALLS
    CALLS += 1
    return self.inner(x) * CALLS


def counts_in_a_global_dict(self: Any, x: Tensor) -> Tensor:
    COUNTED["calls"] += 1
    return self.inner(x) * COUNTED["calls"]


def counts_in_a_global_list(self: Any, x: Tensor) -> Tensor:
    SEEN.append(1)
    return self.inner(x) * len(SEEN)


def counts_in_a_class(self: Any, x: Tensor) -> Tensor:
    Shared.calls += 1
    return self.inner(x) * Shared.calls


def counts_by_an_iterator(self: Any, x: Tensor) -> Tensor:
    return self.inner(x) * next(NUMBERS)


def counts_in_a_default(self: Any, x: Tensor, calls: list[int] = [0]) -> Tensor:  # noqa: B006
    calls[0] += 1
    return self.inner(x) * calls[0]


def adds_the_last_global(self: Any, x: Tensor) -> Tensor:
    global LAST
    before, LAST = LAST, x
    return self.inner(x) if before is None else self.inner(x) + before


def counter_in_a_closure() -> Callable[[Any, Tensor], Tensor]:
    calls = 0

    def counts_in_a_closure(self: Any, x: Tensor) -> Tensor:
        nonlocal calls
        calls += 1
        return self.inner(x) * calls

    return counts_in_a_closure


GLOBALS = {
    counts_globally: "CALLS", counts_in_a_global_dict: "COUNTED", counts_in_a_global_list: "SEEN",
    counts_in_a_class: "Shared.calls", counts_by_an_iterator: "NUMBERS", adds_the_last_global: "LAST",
    counts_in_a_default: "run.__defaults__[0]", counter_in_a_closure(): "run.__closure__[0].cell_contents",
}  # fmt: skip


@pytest.mark.parametrize("run", GLOBALS, ids=lambda run: run.__name__)
def test_globals_that_forward_reads_and_changes_are_refused(run: Callable[[Any, Tensor], Tensor]) -> None:
    module = shardc.compile(nn.Sequential(Attributes(run)), MESH, PLAN, backend="eager")
    with pytest.raises(CaptureError, match=f"reads and changes the .*{re.escape(GLOBALS[run])}'?, which") as caught:
        module.lower(torch.empty(8, 4))
    assert caught.value.fix is not None and "buffer" in caught.value.fix
    file, _, line = (caught.value.source or "").rpartition(":")
    assert file == __file__ and 0 < int(line) - run.__code__.co_firstlineno <= 3
    assert (CALLS, LAST, SEEN, COUNTED, Shared.calls) == (0, None, [], {"calls": 0}, 0)


def tells_once(self: Any, x: Tensor) -> Tensor:
    global TOLD
    if not TOLD:
        TOLD = True
    return self.inner(x)


def fills_a_global_table(self: Any, x: Tensor) -> Tensor:
    global TABLE
    if TABLE is None:
        TABLE = torch.arange(4.0)
    return self.inner(x) + TABLE


def counts_globally_alone(self: Any, x: Tensor) -> Tensor:
    global CALLS
    CALLS = CALLS + 1
    COUNTED["calls"] += 1
    SEEN.append(x.shape)
    return self.inner(x)


@pytest.mark.parametrize("run", [tells_once, fills_a_global_table, counts_globally_alone], ids=lambda run: run.__name__)
def test_globals_that_change_nothing(run: Callable[[Any, Tensor], Tensor]) -> None:
    model, x = nn.Sequential(Attributes(run)), torch.ones(4, 4)
    with pytest.warns(ShardcWarning, match="the model changes globals"):
        sim = simulation(model)
        outs = [sim(x, grad=False) for _ in range(2)]
    assert (CALLS, TABLE, SEEN, COUNTED, TOLD) == (0, None, [], {"calls": 0}, False)
    for out in outs:
        torch.testing.assert_close(out, model(x))
    globals().update(CALLS=0, TABLE=None, TOLD=False)
    SEEN.clear()
    COUNTED.update(calls=0)


NOTED: list[Tensor] = []


def test_a_hook_that_keeps_what_it_sees_is_a_warning() -> None:
    seen: list[Tensor] = []
    hooks: dict[str, Callable[..., Any]] = {
        r"the model changes globals of \S+test_side_effects \(NOTED\)": lambda module, args, out: NOTED.append(out),
        "a hook of module '0' changes variables around it": lambda module, args, out: seen.append(out),
    }
    for what, hook in hooks.items():
        model = nn.Sequential(nn.Linear(4, 4))
        model[0].register_forward_hook(hook)
        with pytest.warns(ShardcWarning, match=what):
            simulation(model)(torch.ones(4, 4), grad=False)
    assert not NOTED and not seen


def test_a_replaced_buffer_is_an_error() -> None:
    class Replaces(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("last", torch.zeros(4))

        def forward(self, x: Tensor) -> Tensor:
            self.last = x.mean(0)
            return x + self.last

    module = shardc.compile(nn.Sequential(Replaces()), MESH, PLAN, backend="eager")
    with pytest.raises(CaptureError, match="replaces the buffer '0.last' by another tensor"):
        module.lower(torch.empty(8, 4))


@pytest.mark.parametrize("persistent", [False, True])
def test_an_empty_buffer_that_is_filled_is_a_warning(persistent: bool) -> None:
    """As models keep a table of positions that they make in the first call; the program makes it in each."""

    class Fills(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("bias", None, persistent=persistent)

        def forward(self, x: Tensor) -> Tensor:
            if self.bias is None:
                self.bias = torch.arange(4.0)
            return x + self.bias

    model = nn.Sequential(Fills())
    if persistent:  # a checkpoint of the model would have it from then on
        with pytest.raises(CaptureError, match="replaces the buffer '0.bias' by another tensor"):
            simulation(model)(torch.ones(4, 4), grad=False)
        return
    with pytest.warns(ShardcWarning, match="module '0' fills its empty buffer 'bias' in forward; the compiled program"):
        sim = simulation(model)
        for _ in range(2):
            assert torch.equal(sim(torch.ones(4, 4), grad=False), torch.ones(4, 4) + torch.arange(4.0))
    assert model[0].bias is None


class Keeps(nn.Module):
    """Puts what it computes into the dict or the list that it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor, kept: dict[str, Any], *, change: bool = True) -> Tensor:
        if change:
            kept["rows"].append(x)
            kept["y"] = self.linear(kept["x"])
        return self.linear(x)


def test_a_changed_argument_is_a_warning() -> None:
    x = torch.ones(4, 4)
    kept: dict[str, Any] = {"x": x, "rows": [x], "same": [x]}
    with pytest.warns(ShardcWarning) as said:
        simulation(Keeps())(x, kept, grad=False)
    assert [str(w.message).split(" in forward")[0] for w in said] == [
        "the model changes its argument kept",
        "the model changes its argument kept['rows']",
    ]
    assert "return the new value instead" in str(said[0].message)
    assert list(kept) == ["x", "rows", "same"] and len(kept["rows"]) == 1
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        simulation(Keeps())(x, kept, grad=False, change=False)


class Config:
    """What a model is configured by; it is shared with the copies of the model."""

    def __init__(self) -> None:
        self.kind: str | None = None
        self.scale: float | None = None


class Chooses(nn.Module):
    """Chooses at its first call what it does from then on, as models of transformers choose their loss."""

    def __init__(self, run: Callable[[Any, Tensor], Tensor]) -> None:
        super().__init__()
        self.inner, self.run, self.config = nn.Linear(4, 4), run, Config()
        self.first, self.flip, self.phase = True, False, "warm"

    def forward(self, x: Tensor) -> Tensor:
        return self.run(self, x)


def by_input(self: Any, x: Tensor) -> Tensor:
    if self.config.kind is None:
        self.config.kind = "double" if x.dtype == torch.float64 else "single"
    return self.inner(x.float()) * (2 if self.config.kind == "double" else 1)


def two_choices(self: Any, x: Tensor) -> Tensor:
    if self.first:
        self.config.scale, self.first = 3.0, False
    return self.inner(x.float()) * self.config.scale


def otherwise_first(self: Any, x: Tensor) -> Tensor:
    out = self.inner(x.float()) * (2 if self.first else 1)
    self.first = False
    return out


def flips(self: Any, x: Tensor) -> Tensor:
    self.flip = not self.flip
    return self.inner(x.float()) * (2 if self.flip else 1)


def goes_on(self: Any, x: Tensor) -> Tensor:
    """The second call does what the first does, and the third does not."""
    if self.phase == "late":
        return x.float()
    self.phase = {"warm": "hot", "hot": "late"}[self.phase]
    return self.inner(x.float())


@pytest.mark.parametrize("run", [otherwise_first, flips, goes_on], ids=lambda run: run.__name__)
def test_a_choice_that_does_not_last_is_refused(run: Callable[[Any, Tensor], Tensor]) -> None:
    module = shardc.compile(Chooses(run), MESH, PLAN, backend="eager")
    with pytest.raises(CaptureError, match="forward reads and changes the attribute"):
        module.lower(torch.empty(8, 4))
    assert (module.first, module.flip, module.phase, module.config.kind) == (True, False, "warm", None)


@pytest.fixture
def alone() -> Iterator[DeviceMesh]:
    """A mesh of this process alone."""
    with tempfile.NamedTemporaryFile() as file:
        dist.init_process_group("gloo", init_method=f"file://{file.name}", rank=0, world_size=1)
        yield init_device_mesh("cpu", (1,), mesh_dim_names=("dp",))
        dist.destroy_process_group()


@pytest.mark.parametrize("run", [by_input, two_choices], ids=lambda run: run.__name__)
def test_a_choice_that_lasts_is_made_at_the_first_call(run: Callable[[Any, Tensor], Tensor], alone: DeviceMesh) -> None:
    model = nn.Sequential(Chooses(run))
    own = copy.deepcopy(model)
    with warnings.catch_warnings():
        warnings.simplefilter("error", ShardcWarning)
        module = shardc.compile(model, alone, shardc.ddp("dp"), backend="eager")
        for dtype in (torch.float32, torch.float32, torch.float64):
            x = torch.ones(4, 4, dtype=dtype)
            torch.testing.assert_close(module(x), own(x))
            assert vars(module[0].config) == vars(own[0].config) and module[0].first == own[0].first
    assert len({id(program) for program in module.shardc.programs.values()}) == 2  # of two dtypes
    module[0].config.kind, own[0].config.kind, module[0].first, own[0].first = None, None, True, True
    torch.testing.assert_close(module(x), own(x))
    assert vars(module[0].config) == vars(own[0].config)
