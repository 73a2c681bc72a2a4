"""`Pipeline`: an ordered tuple of passes, as a value that can be printed, cut and extended."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Protocol, TypeVar

from torch import fx

from shardc import _compat
from shardc.errors import InputError
from shardc.logs import steps
from shardc.validate import near


class Pass(Protocol):
    """Interface of a pass: a frozen dataclass that takes a graph and returns one, often the same one, changed.

    It may have an attribute ``requires``: names of passes that must run before it.
    """

    name: str

    def __call__(self, gm: fx.GraphModule) -> fx.GraphModule: ...


P = TypeVar("P", bound=Pass)


class Hook:
    """Observer of a pipeline, called around every pass; subclasses override what they need."""

    def before(self, stage: str, gm: fx.GraphModule) -> None:
        """Observes the graph before the pass ``stage``."""

    def after(self, stage: str, gm: fx.GraphModule) -> None:
        """Observes the graph after the pass ``stage``."""


@dataclass(frozen=True)
class Pipeline:
    """Passes in the order in which they run.

    ``pipeline[Bucket]`` is the pass of that class; ``+`` joins two pipelines.

    Args:
        passes: each with a unique name.

    Raises:
        InputError: two passes have one name, or there is no pass of that name.
    """

    passes: tuple[Pass, ...]

    def __post_init__(self) -> None:
        repeated = [name for name in self.names if self.names.count(name) > 1]
        if repeated:
            name = repeated[0]
            raise InputError(f"{repeated.count(name)} passes are called {name!r}", fix="give each a name of its own")

    @property
    def names(self) -> tuple[str, ...]:
        """Returns the names of the passes in order."""
        return tuple(pass_.name for pass_ in self.passes)

    def check_requires(self) -> None:
        """Raises InputError if a pass runs without a pass that it requires, or before it."""
        for at, pass_ in enumerate(self.passes):
            for name in getattr(pass_, "requires", ()):
                if name in self.names[:at]:
                    continue
                what = "runs after it" if name in self.names else "is not in the pipeline"
                moved = f"insert it behind that one: passes.after({name!r}, ...)"
                fix = moved if name in self.names else f"leave {name!r} in the pipeline"
                raise InputError(f"the pass {pass_.name!r} requires {name!r}, which {what}", fix=fix)

    def run(self, gm: fx.GraphModule, *hooks: Hook) -> fx.GraphModule:
        """Runs the passes on ``gm`` and returns the graph of the last; ``hooks`` are called before and after each.

        Autocast is off meanwhile, since the graph has its own casts.
        """
        with _compat.no_autocast():
            for pass_ in steps(self.passes, "passes"):
                for hook in hooks:
                    hook.before(pass_.name, gm)
                gm = pass_(gm)
                for hook in hooks:
                    hook.after(pass_.name, gm)
        return gm

    def before(self, name: str, *passes: Pass) -> Pipeline:
        """Returns a new pipeline with the given ``passes`` inserted before the pass called ``name``."""
        at = self._at(name)
        return Pipeline((*self.passes[:at], *passes, *self.passes[at:]))

    def after(self, name: str, *passes: Pass) -> Pipeline:
        """Returns a new pipeline with the given ``passes`` inserted after the pass called ``name``."""
        at = self._at(name) + 1
        return Pipeline((*self.passes[:at], *passes, *self.passes[at:]))

    def without(self, *names: str) -> Pipeline:
        """Returns a new pipeline without the passes that the arguments (``names``) name."""
        out = {self._at(name) for name in names}
        return Pipeline(tuple(pass_ for at, pass_ in enumerate(self.passes) if at not in out))

    def replaced(self, *passes: Pass) -> Pipeline:
        """Returns a new pipeline in which each given pass (``passes``) takes the place of the pass that has the same
        name.
        """
        new = {self._at(pass_.name): pass_ for pass_ in passes}  # position -> pass
        return Pipeline(tuple(new.get(at, pass_) for at, pass_ in enumerate(self.passes)))

    def until(self, name: str) -> Pipeline:
        """Returns the passes before the pass ``name``."""
        return Pipeline(self.passes[: self._at(name)])

    def behind(self, name: str) -> Pipeline:
        """Returns the passes after the pass ``name``."""
        return Pipeline(self.passes[self._at(name) + 1 :])

    def __getitem__(self, kind: type[P]) -> P:
        for pass_ in self.passes:
            if isinstance(pass_, kind):
                return pass_
        raise InputError(f"the pipeline has no {kind.__name__}", fix=f"leave {kind.name!r} in it")

    def __iter__(self) -> Iterator[Pass]:
        return iter(self.passes)

    def __add__(self, other: Pipeline) -> Pipeline:
        return Pipeline((*self.passes, *other.passes))

    def __str__(self) -> str:
        width = max(map(len, self.names), default=0)
        return "\n".join(f"{pass_.name:{width}}  {_summary(pass_)}".rstrip() for pass_ in self.passes)

    def _at(self, name: str) -> int:
        """Returns the position of the pass ``name``; raises InputError if there is none."""
        if name not in self.names:
            raise InputError(f"there is no pass {name!r}", fix=near_stage(name, self.names))
        return self.names.index(name)


# Earlier name of a pass -> its name.
_RENAMED = {"settle": "hoist_grad_epilogue", "absent": "prune_unused_grads", "silence": "skip_communication"}


def near_stage(name: str, stages: Iterable[str]) -> str:
    """Returns a hint for an error about the unknown pass ``name``: the name that it has now, or the most similar name
    of ``stages``.
    """
    return f"it is called {_RENAMED[name]!r} now" if name in _RENAMED else near(name, stages)


def _summary(pass_: Pass) -> str:
    """Returns the first sentence of a pass's docstring."""
    text = " ".join((type(pass_).__doc__ or "").split("\n\n")[0].split())  # the first paragraph, on one line
    return text.partition(". ")[0].removesuffix(".").replace("`", "")
