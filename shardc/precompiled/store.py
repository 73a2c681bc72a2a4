"""Store of compiled programs in a folder: later starts and other ranks load them, without capture and planning.

A program is found by its `ProgramKey`, the versions of torch and shardc, the rules that the user registered, and its
`Guards`: the values that its capture read, and the code that it traced (`shardc.ir.reach`). The `KEPT` most recently
used programs stay on disk.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import shutil
import tempfile
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path

import torch
from filelock import FileLock, Timeout
from torch import fx, nn

from shardc._compat import PyTree
from shardc.cost.hardware import Hardware
from shardc.cost.model import CostModel
from shardc.custom_ops.functional_ops import written_op
from shardc.errors import PrecompiledError, ShardcWarning
from shardc.ir.executable import CLOSING, FIRST_INFERENCE, INFERENCE, Executable, Phase, without_stage
from shardc.ir.guards import tracing
from shardc.ir.reach import Reach
from shardc.logs import CACHE
from shardc.passes.options import Options
from shardc.precompiled.load import Precompiled
from shardc.precompiled.program_key import ProgramKey
from shardc.precompiled.record import VERSION, Record, is_own, read_record, to_json
from shardc.precompiled.save import save_program
from shardc.rules import is_written_out, registered

MADE = "made.json"  # file beside a program, with the warnings of its compile
PATIENCE = 120.0  # seconds; a process that waits longer for another one compiles by itself
_POLL = 0.05  # seconds
KEPT = 256  # programs on disk, of all calls and models
PACKAGE = Path(__file__).parents[1]
_EVALUATION = (FIRST_INFERENCE, INFERENCE, CLOSING)


class Stored(Precompiled):
    """A program from the store, compiled by an earlier run or another rank. If a graph is needed that was not saved,
    the program is compiled again.

    Args:
        folder, record: the folder of the program, and the record in it.
        fresh: compiles the program again, for graphs that were not saved.
    """

    from_store = True

    def __init__(self, folder: Path, record: Record, fresh: Callable[[], Executable]) -> None:
        super().__init__(folder, record, trust=False)
        self.fresh, self.stored = fresh, f"found in {folder}"

    def make(self, phase: Phase) -> fx.GraphModule | None:
        evaluates = without_stage(phase) in _EVALUATION
        return self._compiled.make(phase) if evaluates and self.trains and not self.infers else super().make(phase)

    def using(self, used: frozenset[int]) -> Executable:
        return self if used == self.differentiates else self._compiled.using(used)

    @cached_property
    def _compiled(self) -> Executable:
        """Return the program, compiled anew instead of loaded from the store.

        Raises:
            PrecompiledError: the model has changed since the forward, and would now compile to another program.
        """
        before = self.key.call.surroundings
        with tracing(grad=True), ExitStack() as modes:
            for kind, dtype in before.autocast:  # a backward runs outside of it
                modes.enter_context(torch.autocast(kind, dtype=dtype))
            program = self.fresh()
        # A capture may read more or less than another, without another result: values of the same reads are compared.
        now = dict(program.guards.values)
        is_changed = any(now.get(name, value) != value for name, value in self.guards.values)
        if program.key.call.surroundings != before or is_changed:
            raise PrecompiledError(
                "a stored program lacks the graphs of this backward, and they cannot be made now: since the call, "
                "settings of torch have changed, or values or code that the model reads",
                fix="run the backward before the change, or set Options(program_cache=False)",
            )
        return program


@dataclass(frozen=True)
class Store:
    """The stored programs with one `ProgramKey`. The programs differ in their guards (values that the capture read).

    Args:
        folder: has a folder for each program.
    """

    folder: Path

    @classmethod
    def of(cls, root: Path, key: ProgramKey, options: Options) -> Store | str:
        """Return the store of the programs with ``key``, in a folder under ``root``. If programs with this key and
        these options cannot be stored, return the reason as text.
        """
        unstorable = [name for name in ("capture", "pipeline", "hooks", "dump") if getattr(options, name)]
        if type(options.cost) not in (CostModel, Hardware):
            unstorable.append("cost")
        if unstorable:
            return f"Options({unstorable[0]}=...) asks for more than a stored program has"
        foreign = [x for x in key.plan.entries if type(x).__module__.partition(".")[0] != __package__.partition(".")[0]]
        if foreign:
            return f"the plan entry {foreign[0]} is of a class of its own"
        try:
            call = to_json(key)
        except PrecompiledError as error:  # a constant, or a class of arguments, that has no form on disk
            return error.what
        versions = VERSION, _code(), torch.__version__, platform.python_version()
        return cls(root / _hash(json.dumps([versions, registered(), call]).encode()))

    def find(
        self, model: nn.Module, loss: Callable[..., PyTree] | None, fresh: Callable[[], Executable]
    ) -> Stored | None:
        """Return the stored program whose guards hold for ``model``, and repeat the warnings of its compile; None if
        there is none. The program calls ``fresh`` to be compiled anew if a graph is needed that was not saved.
        """
        unlike: list[str] = []
        for folder in sorted(self.folder.glob("*/")):
            try:
                notes, record = json.loads((folder / MADE).read_text()), read_record(folder, evaluates=False)
                if others := record.guards.unlike(model, loss):
                    unlike.append(", ".join(others[:3]))
                    continue
                program = Stored(folder, record, fresh)
            except Exception:  # incomplete, such as of a full disk: as if it were missing
                shutil.rmtree(folder, ignore_errors=True)
                continue
            with suppress(OSError):
                (folder / MADE).touch()
            for text in notes["warnings"]:
                warnings.warn(ShardcWarning(text), stacklevel=2)
            CACHE.info("found in the store: %s", folder)
            return program
        text = "not in the store: %d programs of this call there, for other values or code: %s"
        CACHE.info(text, len(unlike), "; ".join(unlike) or "none")
        return None

    @contextmanager
    def turn(self) -> Iterator[None]:
        """Context manager for compiling a program and adding it to the store. The first process of a machine enters at
        once; other processes enter when the first one has left.

        The processes that waited look for the added program first. No process waits if an earlier program could not be
        stored; a block that raises does not count as such.
        """
        lock = FileLock(self.folder / "lock", timeout=PATIENCE, poll_interval=_POLL)
        first = False
        with suppress(OSError, NotImplementedError):  # no locks on this disk, or a wait too long: all compile
            self.folder.mkdir(parents=True, exist_ok=True)
            try:
                lock.acquire(timeout=0)
                first = True
            except Timeout:
                if not self._none.exists():
                    lock.acquire()
                    lock.release()
        try:
            yield
            with suppress(OSError):
                if first and not any(self.folder.glob("*/")):
                    self._none.touch()
        finally:
            lock.release()

    @property
    def _none(self) -> Path:
        """Path of the file that marks this key as one whose program cannot be stored."""
        return self.folder / "none"

    def add(
        self, program: Executable, reached: Reach, ops: Iterable[object], warned: Sequence[str], evaluates: bool = False
    ) -> str:
        """Write ``program`` to the store, unless later starts could not tell whether its code has changed. Return a
        text for people: the folder, or why the program was not stored.

        Args:
            reached: the code that its model and loss reach.
            ops: the captured ops. Of ops that are neither torch's nor shardc's, only those of `torch.library.custom_op`
                have known code.
            warned: the warnings of its compile.
            evaluates: also write the inference graph, which runs if no gradients are recorded.
        """
        if (why := _unknown_dependency(program, reached, ops)) is not None:
            return f"not stored: {why}"
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            draft = Path(tempfile.mkdtemp(dir=self.folder.parent))
            try:
                save_program(program, draft, None, evaluates)
                (draft / MADE).write_text(json.dumps({"warnings": list(warned)}, indent=1))
                guards = program.guards
                os.rename(draft, self.folder / _hash(json.dumps([dict(guards.reached), guards.values]).encode()))
                self._none.unlink(missing_ok=True)
                self._remove_oldest()
            finally:
                shutil.rmtree(draft, ignore_errors=True)
        except PrecompiledError as error:
            return f"not stored: {error.what}"
        except OSError as error:
            return f"not stored: the folder {self.folder} cannot be written: {error.strerror}"
        return f"added to {self.folder}"

    def _remove_oldest(self) -> None:
        """Remove the least recently used programs under the store's root, whatever their keys, until `KEPT` remain."""
        used = sorted(self.folder.parent.glob(f"*/*/{MADE}"), key=lambda path: path.stat().st_mtime)
        for path in used[:-KEPT]:  # a process that reads one now finds it incomplete
            shutil.rmtree(path.parent, ignore_errors=True)


def _unknown_dependency(program: Executable, reached: Reach, ops: Iterable[object]) -> str | None:
    """Return, as text, a dependency of ``program`` that later starts cannot compare; None if there is none."""
    foreign = [
        op
        for op in ops
        if not is_own(op) and (getattr(written_op(op) or op, "_name", "") not in reached.ops or is_written_out(op))
    ]
    if foreign:
        return f"it calls {foreign[0]}, an op of the user's or with a rule of the user's, whose code is not known"
    if program.guards.reads.unseen:
        return "it was captured by running the model on fake tensors, so that it may depend on values without a guard"
    if reached.constants:
        return f"it keeps what {reached.constants[0]} returned as a constant"
    unnamed = [where for does, where in program.guards.reads.traced if does not in reached.code_hashes]
    return f"it runs {unnamed[0]}, which nothing that a start can look at names" if unnamed else None


@cache
def _code() -> str:
    """Return a hash of shardc's own code."""
    return _hash(b"".join(path.read_bytes() for path in sorted(PACKAGE.rglob("*.py"))))


def _hash(data: bytes) -> str:
    """Return a hash of ``data`` as hexadecimal text."""
    return hashlib.sha256(data).hexdigest()[:32]
