"""What commands are given: a model by the function that makes it, a mesh, a plan."""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import sys
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from inspect import isfunction
from pathlib import Path
from types import ModuleType
from typing import Any

from torch import nn

from shardc.cost import hardware
from shardc.errors import InputError, MeshError, PlanError
from shardc.ir.mesh import Mesh
from shardc.plan import Plan, parse_plan
from shardc.validate import near


@dataclass(frozen=True)
class Target:
    """A model to look at.

    Args:
        name: the target as the user wrote it.
        module: the module whose names plans and losses may use.
        model: the model.
        args: example arguments of one call, at global shapes.
    """

    name: str
    module: ModuleType
    model: nn.Module | Callable[..., Any]
    args: tuple[Any, ...]

    def named(self, name: str, what: str) -> Any:
        """What the target's module calls ``name``."""
        return _attribute(self.module, name, self.name.rpartition(":")[0], what)


def add_model(parser: argparse.ArgumentParser) -> None:
    """The arguments that say which model, and which loss."""
    parser.add_argument("target", metavar="TARGET", help="path.py:function or module:function -> (model, example_args)")
    parser.add_argument("--loss", metavar="NAME", help="a function of the target's file: loss(output, *last arguments)")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments that say what to compile."""
    add_model(parser)
    parser.add_argument("--mesh", required=True, help="axes and sizes, as dp=2,tp=4")
    parser.add_argument("--plan", required=True, help="""a plan, as 'fsdp("dp") | llama_tp("tp")'""")


def add_hardware(parser: argparse.ArgumentParser) -> None:
    """The argument that says what times are predicted for; see `shardc.cost.hardware.find`."""
    known = ", ".join(hardware.KNOWN)
    parser.add_argument(
        "--hardware", default="h100", help=f"one of {known}, or the .json that `calibrate` wrote (default: h100)"
    )


def add_fold(parser: argparse.ArgumentParser) -> None:
    """The argument that says to fold; see `shardc.fold`."""
    parser.add_argument("--fold", action="store_true", help="analyse repeated blocks on a few of them")


def add_passes(parser: argparse.ArgumentParser, what: str) -> None:
    """The argument that says which stages to look at; see `stages_of`."""
    parser.add_argument("--passes", metavar="FIRST:END", help=f"{what}, by number: 0:3 are capture and two passes")


def count_of(text: str) -> int:
    """A number of things, for `argparse`: 0 or more."""
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"{text!r} is no count; write it as 40")
    return int(text)


def stages_of(text: str | None, stages: Sequence[str]) -> tuple[str, ...]:
    """The stages that ``FIRST:END`` picks out of ``stages``, as a slice of Python does; all without it.

    >>> stages_of("0:2", ("capture", "canonicalize", "seed"))
    ('capture', 'canonicalize')

    Raises:
        InputError: it is no such range, or an empty one.
    """
    if text is None:
        return tuple(stages)
    first, colon, end = text.partition(":")
    if not colon or not all(part == "" or part.isdecimal() for part in (first, end)):
        raise InputError(f"--passes {text}: no range", fix="write it as 0:3")
    picked = tuple(stages[int(first or 0) : int(end) if end else None])
    if not picked:
        listed = ", ".join(f"{at} {stage}" for at, stage in enumerate(stages))
        raise InputError(f"--passes {text}: no stage is in it", fix=f"they are {listed}")
    return picked


def resolve(options: argparse.Namespace) -> tuple[Target, Mesh, Plan, Callable[..., Any] | None]:
    """The target, mesh, plan and loss that the arguments of `add_arguments` say.

    Raises:
        InputError, MeshError, PlanError: names the argument and what is wrong with it.
    """
    mesh = mesh_of(options.mesh)
    target = load(options.target)
    plan = plan_of(options.plan, target, "--plan").on(mesh)
    return target, mesh, plan, None if options.loss is None else target.named(options.loss, "loss")


def plan_of(text: str, target: Target, argument: str) -> Plan:
    """The plan that ``text`` says, in the words of the target's file.

    Raises:
        PlanError: names the argument and what is wrong with it.
    """
    try:
        return parse_plan(text, vars(target.module))
    except PlanError as error:
        raise PlanError(f"{argument}, {error.what}", fix=error.fix) from None


def mesh_of(text: str, argument: str = "--mesh") -> Mesh:
    """The mesh that ``dp=2,tp=4`` says.

    >>> mesh_of("dp=2,tp=4")
    Mesh(dp=2, tp=4)
    """
    axes: dict[str, int] = {}
    for part in text.split(","):
        name, _, size = part.strip().partition("=")
        if not size.isdecimal():
            raise MeshError(f"{argument} {text}: {part.strip()!r} is no axis and size", fix="write it as dp=2,tp=4")
        if name in axes:
            raise MeshError(f"{argument} {text}: axis {name!r} comes twice")
        axes[name] = int(size)
    return Mesh(axes)


def load(text: str) -> Target:
    """Calls the function that ``path.py:function`` or ``module:function`` names.

    Raises:
        InputError: there is no such file, module or function, or it fails, or makes no (model, arguments).
    """
    where, colon, name = text.rpartition(":")
    if not colon or not where or not name:
        raise InputError(f"target {text!r} names no function", fix="write it as path.py:function or module:function")
    module = _run(where, lambda: _module(where))
    function = _attribute(module, name, where, "function")
    if not callable(function):
        raise InputError(f"{where}: {name} is a {type(function).__name__}, not a function")
    made = _run(f"{where}:{name}()", function)
    if not isinstance(made, tuple) or len(made) != 2 or not callable(made[0]):
        raise InputError(f"{where}: {name}() returns no pair", fix="return (model, example_args)")
    model, args = made
    return Target(text, module, model, tuple(args) if isinstance(args, tuple | list) else (args,))


def _module(where: str) -> ModuleType:
    if not where.endswith(".py"):
        return importlib.import_module(where)
    path = Path(where)
    if not path.is_file():
        raise InputError(f"target: there is no file {where}")
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module  # dataclasses and pickle look a class's module up
    if (folder := str(path.parent.resolve())) not in sys.path:
        sys.path.append(folder)  # as for a script: its neighbours can be imported
    spec.loader.exec_module(module)
    return module


def _attribute(module: ModuleType, name: str, where: str, what: str) -> Any:
    if not hasattr(module, name):
        own = [
            key
            for key, made in vars(module).items()
            if isfunction(made) and made.__module__ == module.__name__ and not key.startswith("_")
        ]
        fix = near(name, own, f"it has {', '.join(own) or 'no functions'}")
        raise InputError(f"{where} has no {what} {name!r}", fix=fix)
    return getattr(module, name)


def _run(what: str, function: Callable[[], Any]) -> Any:
    """What the user's code makes; its errors as one line that says where."""
    try:
        return function()
    except InputError:
        raise
    except (Exception, SystemExit) as error:
        own = [
            f
            for f in traceback.extract_tb(error.__traceback__)[1:]
            if f.filename != __file__ and "importlib" not in f.filename
        ]
        place = f"{own[-1].filename}:{own[-1].lineno}: " if own else ""
        raise InputError(f"{what} fails: {place}{type(error).__name__}: {error}") from None
