"""`Command`, and arguments that commands share: a model (by the function that returns it), a mesh, a plan,
and ``--option NAME=VALUE``, the fields of `shardc.Options`.
"""

from __future__ import annotations

import argparse
import ast
import importlib
import importlib.util
import sys
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from functools import partial
from inspect import isfunction, signature
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple, TypeVar

from torch import nn

import shardc
from shardc._compat import PyTree
from shardc.capture.trace import target_names
from shardc.cost import hardware
from shardc.cost.hardware import Hardware
from shardc.cost.model import CostModel
from shardc.errors import InputError, MeshError, PlanError
from shardc.ir.mesh import Mesh
from shardc.ir.module_paths import is_public
from shardc.plan import Plan, parse_plan
from shardc.runtime.inputs import takes_loss
from shardc.validate import near

OPTIONS = tuple(field.name for field in fields(shardc.Options))
_OBJECTS = ("capture", "pipeline", "hooks")  # options whose values are objects of the target's file
_WORDS = {"true": True, "false": False, "none": None}
T = TypeVar("T")


class Argument:
    """An argument of a command: its name or flags, and the options of `argparse.ArgumentParser.add_argument`."""

    def __init__(self, *names: str, **options: Any) -> None:
        self.names, self.options = names, options


class Command(NamedTuple):
    """A command of ``python -m shardc``: its name, help, arguments and function.

    Args:
        name: its name.
        help: its help text.
        arguments: its arguments, in the order of its help.
        run: runs it with the parsed arguments; returns the exit status, None for 0.
    """

    name: str
    help: str
    arguments: Sequence[Argument]
    run: Callable[[argparse.Namespace], int | None]


@dataclass(frozen=True)
class Target:
    """A model to compile, with example arguments, as the user's file defines it.

    Args:
        name: the target as the user wrote it.
        module: the module in which plans and losses are looked up.
        model: the model.
        args: example arguments of one call, at global shapes.
    """

    name: str
    module: ModuleType
    model: nn.Module | Callable[..., Any]
    args: tuple[PyTree, ...]

    def named(self, name: str, what: str) -> Any:
        """Return attribute ``name`` of the module that the user's file defines. An error calls it ``what``, such as
        "loss".
        """
        return _attribute(self.module, name, self.name.rpartition(":")[0], what)


# The model, the loss and the options.
MODEL = (
    Argument("target", metavar="TARGET", help="path.py:function or module:function -> (model, example_args)"),
    Argument(
        "--loss",
        metavar="NAME",
        help="a function of the target's file: loss(output, *last arguments); the target is called with targets=True",
    ),
    Argument(
        "--option", action="append", default=[], metavar="NAME=VALUE",
        help="an option of shardc.Options, as 'bucket_size=450 MiB' or decompose=1; may be given several times",
    ),
)  # fmt: skip
# Model, mesh and plan.
PROGRAM = (
    *MODEL,
    Argument("--mesh", required=True, help="axes and sizes, as dp=2,tp=4"),
    Argument(
        "--plan", required=True, help="""a plan, as 'fsdp("dp") | llama_tp("tp")', or the .json of `plan --json`"""
    ),
)
# The hardware of the prediction (`shardc.cost.hardware.find`).
HARDWARE = Argument(
    "--hardware",
    default="h100",
    help=f"one of {', '.join(hardware.KNOWN)}, or the .json that `calibrate` wrote (default: h100)",
)
FOLD = Argument("--fold", action="store_true", help="analyse repeated blocks on a few of them")


def passes_argument(what: str) -> Argument:
    """Return the argument ``--passes``, which selects stages of the compiler (see `stages_of`). ``what`` is the start
    of its help text.
    """
    return Argument("--passes", metavar="FIRST:END", help=f"{what}, by number: 0:3 are capture and two passes")


def count_of(text: str) -> int:
    """Return ``text`` as an int of 0 or more: a type for `argparse`."""
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"{text!r} is not a count; write a number such as 40")
    return int(text)


def stages_of(text: str | None, stages: Sequence[str]) -> tuple[str, ...]:
    """Return the stages that ``FIRST:END`` selects, as a Python slice does; all stages for None.

    >>> stages_of("0:2", ("capture", "canonicalize", "seed"))
    ('capture', 'canonicalize')

    Raises:
        InputError: the range is malformed or empty.
    """
    if text is None:
        return tuple(stages)
    first, colon, end = text.partition(":")
    if not colon or not all(part == "" or part.isdecimal() for part in (first, end)):
        raise InputError(f"--passes {text}: no range", fix="write it as 0:3")
    picked = tuple(stages[int(first or 0) : int(end) if end else None])
    if not picked:
        listed = ", ".join(f"{at} {stage}" for at, stage in enumerate(stages))
        raise InputError(f"--passes {text}: the range is empty", fix=f"they are {listed}")
    return picked


def resolve(options: argparse.Namespace) -> tuple[Target, Mesh, Plan, Callable[..., Any] | None]:
    """Return (target, mesh, plan, loss) for the arguments `PROGRAM`; the loss is None if there is none.

    Raises:
        InputError, MeshError, PlanError: an argument is wrong.
    """
    mesh = mesh_of(options.mesh)
    target, loss = load_with_loss(options.target, options.loss)
    plan = plan_of(options.plan, target, "--plan").on(mesh)
    return target, mesh, plan, loss


def lowered(options: argparse.Namespace, described: Hardware | None = None, **defaults: Any) -> Any:
    """Return the `shardc.Program` that the arguments `PROGRAM` describe. The hardware ``described`` and the
    options ``defaults`` are as for `options_of`.
    """
    target, mesh, plan, loss = resolve(options)
    if described is not None:
        described.check(mesh)  # before the model is captured, which may take a while
    compile_options = options_of(target, options.option, described, **defaults)
    module = shardc.compile(target.model, mesh, plan, loss=loss, options=compile_options)
    return module.shardc.lower(*target.args)


def plan_of(text: str, target: Target, argument: str) -> Plan:
    """Return the plan in ``text``, or in the JSON file of that name; names in it are looked up in the target's module.

    Raises:
        PlanError: the plan is wrong; the message names ``argument``, the command line's argument.
    """
    try:
        if Path(text).suffix == ".json":
            constructors = {name: value for name, value in vars(target.module).items() if callable(value)}
            return Plan.load(text, constructors)
        return parse_plan(text, vars(target.module))
    except PlanError as error:
        raise PlanError(f"{argument}, {error.what}", fix=error.fix) from None


def mesh_of(text: str, argument: str = "--mesh") -> Mesh:
    """Return the mesh in ``text``, such as ``dp=2,tp=4``.

    >>> mesh_of("dp=2,tp=4")
    Mesh(dp=2, tp=4)
    """
    axes: dict[str, int] = {}
    for part in text.split(","):
        name, _, size = part.strip().partition("=")
        if not size.isdecimal():
            raise MeshError(f"{argument} {text}: {part.strip()!r} is not an axis and size", fix="write it as dp=2,tp=4")
        if name in axes:
            raise MeshError(f"{argument} {text}: axis {name!r} occurs twice")
        axes[name] = int(size)
    return Mesh(axes)


def parsed(texts: Sequence[str], target: Target) -> dict[str, Any]:
    """Return name -> value of the options in ``texts``, each ``NAME=VALUE``.

    Values are Python literals, or text. ``cost`` and ``bucket_size`` may name a hardware, or the file that
    ``calibrate`` wrote; ``capture``, ``pipeline`` and ``hooks`` name objects of the target's file.

    Raises:
        InputError: no such option, or no such object in the target's file.
    """
    out: dict[str, Any] = {}
    for text in texts:
        name, equals, value = (part.strip() for part in text.partition("="))
        if not equals:
            raise InputError(f"--option {text}: there is no value", fix="write it as bucket_size=450MiB")
        if name not in OPTIONS:
            raise InputError(f"--option {text}: there is no option {name!r}", fix=near(name, OPTIONS))
        out[name] = _value(name, value, target)
    return out


def options_of(target: Target, texts: Sequence[str], described: Hardware | None = None, **defaults: Any) -> Any:
    """Return the `shardc.Options` of a command: ``defaults``, overridden by the options in ``texts`` (such as
    ``bucket_size=0``).

    Args:
        described: the hardware of a prediction; bucket sizes and p2p collectives default to what suits it.

    Raises:
        InputError: as `parsed`; a value of another type, or out of range.
    """
    if described is not None:
        buckets = None if described.is_host else described
        defaults = {"p2p_collectives": described.sends or None, "bucket_size": buckets, **defaults}
    return shardc.Options(**{**defaults, **parsed(texts, target)})


def _value(name: str, text: str, target: Target) -> Any:
    """Return the value of option ``name``, given as ``text`` on the command line."""
    if name in _OBJECTS:
        objects = [target.named(part.strip(), name) for part in text.split(",")]
        return tuple(hook() if isinstance(hook, type) else hook for hook in objects) if name == "hooks" else objects[0]
    if name == "cost" and hardware.is_file(text):
        return CostModel.load(text)
    if name == "cost" or (name == "bucket_size" and (text.lower() in hardware.KNOWN or hardware.is_file(text))):
        return hardware.find(text)
    if text.lower() in _WORDS:
        return _WORDS[text.lower()]
    try:
        return ast.literal_eval(text)
    except (SyntaxError, ValueError):
        return tuple(text.split(",")) if name == "skip_comm" else text


def load_with_loss(text: str, loss_name: str | None) -> tuple[Target, Callable[..., PyTree] | None]:
    """Return a target as (`Target`, its loss). The loss is the function ``loss_name`` of the target's file, or None if
    no name is given.

    Raises:
        InputError: as for `load`; or there is no such loss, or the target returns no targets for it.
    """
    if loss_name is None:
        return load(text), None
    target = load(text, with_targets=True)
    loss: Callable[..., PyTree] = target.named(loss_name, "loss")
    names, model = target_names(loss), target.model
    if isinstance(model, nn.Module) and names and not takes_loss(model, target.args, {}, len(names)):
        several = ", ".join(names)
        raise InputError(
            f"--loss {loss_name}: {text} returns no {several} for it",
            fix=f"return (model, (..., {several})), after forward's arguments, if the function is called with "
            "targets=True",
        )
    return target, loss


def load(text: str, with_targets: bool = False) -> Target:
    """Return the `Target` of ``path.py:function`` or ``module:function``, with the model and arguments that this
    function returns.

    Args:
        with_targets: pass ``targets=True``, if the function has such a parameter: it returns the loss's targets too.

    Raises:
        InputError: the file, module or function does not exist or fails, or it does not return (model, arguments).
    """
    where, colon, name = text.rpartition(":")
    if not colon or not where or not name:
        raise InputError(f"target {text!r} names no function", fix="write it as path.py:function or module:function")
    module = _run(where, lambda: _module(where))
    function = _attribute(module, name, where, "function")
    fix = "write a function without arguments that returns (model, example_args)"
    if not callable(function) or isinstance(function, nn.Module):
        raise InputError(f"{where}: {name} is a {type(function).__name__}, not a function", fix=fix)
    parameters = signature(function).parameters
    if needed := [
        key for key, p in parameters.items() if p.default is p.empty and p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)
    ]:
        raise InputError(f"{where}: {name}() needs {', '.join(needed)}", fix=fix)
    targets = {"targets": True} if with_targets and "targets" in parameters else {}
    returned = _run(f"{where}:{name}()", partial(function, **targets))
    if not isinstance(returned, tuple) or len(returned) != 2 or not callable(returned[0]):
        raise InputError(f"{where}: {name}() does not return a pair", fix="return (model, example_args)")
    model, args = returned
    return Target(text, module, model, tuple(args) if isinstance(args, tuple | list) else (args,))


def _module(where: str) -> ModuleType:
    """Return the module at ``where``: a file, or the name of a module to import."""
    path = Path(where)
    if path.suffix != ".py":
        return importlib.import_module(where)
    if not path.is_file():
        raise InputError(f"target: there is no file {where}")
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module  # dataclasses and pickle look up the module of a class
    if (folder := str(path.parent.resolve())) not in sys.path:
        sys.path.append(folder)  # as for a script: files beside it can be imported
    spec.loader.exec_module(module)
    return module


def _attribute(module: ModuleType, name: str, where: str, what: str) -> Any:
    """Return attribute ``name`` of ``module``; raise InputError if there is none.

    The error says that ``where`` has no ``what`` of this name, and proposes similar names.
    """
    if not hasattr(module, name):
        functions = {
            key: function.__module__ == module.__name__
            for key, function in vars(module).items()
            if isfunction(function) and is_public(key)
        }
        defined = ", ".join(key for key, is_defined in functions.items() if is_defined)
        fix = near(name, functions, f"it has {defined or 'no functions'}")
        raise InputError(f"{where} has no {what} {name!r}", fix=fix)
    return getattr(module, name)


def _run(what: str, function: Callable[[], T]) -> T:
    """Call the user's ``function`` and return its result; InputError "``what`` fails" if it raises.

    Raises:
        InputError: the function fails: "``what`` fails", the line of the user's code, and the error.
    """
    try:
        return function()
    except InputError:
        raise
    except (Exception, SystemExit) as error:
        user_frames = [
            f
            for f in traceback.extract_tb(error.__traceback__)[1:]
            if f.filename != __file__ and "importlib" not in f.filename
        ]
        place = f"{user_frames[-1].filename}:{user_frames[-1].lineno}: " if user_frames else ""
        raise InputError(f"{what} fails: {place}{type(error).__name__}: {error}") from None
