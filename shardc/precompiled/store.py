"""Programs that earlier starts or other ranks have made, in a folder of the user's.

Who finds one there neither captures nor plans.

A program is found by all that it was made from: the call and the model (`Identity`), the mesh, plan and options, the
versions of torch and shardc, the rules that the user registered, what its capture read, and the source files of each
package whose code was traced. Of all programs the `KEPT` that were used last stay on disk.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import shutil
import sys
import sysconfig
import tempfile
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

import torch
from filelock import FileLock, Timeout
from torch import fx, nn

from shardc.cost.hardware import Hardware
from shardc.cost.model import CostModel
from shardc.errors import PrecompiledError, ShardcWarning
from shardc.ir.executable import FORWARD, INFERENCE, Executable, Phase
from shardc.ir.mesh import Mesh
from shardc.ir.reads import Reads
from shardc.passes.options import Options
from shardc.plan.value import Plan
from shardc.precompiled.allowed import is_own
from shardc.precompiled.identity import Identity, signature_to_json
from shardc.precompiled.load import Precompiled
from shardc.precompiled.record import VERSION, Record, read_record
from shardc.precompiled.save import save_program
from shardc.rules import registered

MADE = "made.json"  # beside a program: the files that it depends on, and the warnings that it gave
PATIENCE = 120.0  # seconds; who waits longer for another process makes the program itself
_POLL = 0.05  # seconds
KEPT = 256  # programs, of all calls and models
PACKAGE = Path(__file__).parents[1]
# Code of these is told by a version.
TOLD = [PACKAGE, Path(torch.__file__).parent, Path(sysconfig.get_path("stdlib"))]


class Stored(Precompiled):
    """A program of an earlier start, or of another rank.

    Args:
        fresh: makes it again; asked for the halves that were not saved.
    """

    stored = True

    def __init__(self, folder: Path, record: Record, fresh: Callable[[], Executable]) -> None:
        super().__init__(folder, record, trust=False)
        self.fresh = fresh

    def make(self, phase: Phase) -> fx.GraphModule | None:
        if phase != INFERENCE or phase in self._halves or FORWARD not in self._halves:
            return super().make(phase)
        with torch.inference_mode(False), torch.enable_grad():  # as where no program was stored
            return self.fresh().make(phase)


@dataclass(frozen=True)
class Store:
    """The stored programs for one call of one model, which differ in what their captures read.

    Args:
        folder: where they lie.
        mesh, plan: what they are for.
    """

    folder: Path
    mesh: Mesh
    plan: Plan

    @classmethod
    def of(cls, root: Path, identity: Identity, mesh: Mesh, plan: Plan, options: Options) -> Store | None:
        """The store for a call, under ``root``; None where it cannot be told what a program would depend on."""
        own = (options.capture, options.pipeline, options.hooks, options.dump)
        foreign = (type(x).__module__.partition(".")[0] != __package__.partition(".")[0] for x in plan.entries)
        if any(own) or any(foreign) or type(options.cost) not in (CostModel, Hardware):
            return None
        try:
            call = signature_to_json(replace(identity.signature, reads=()))
        except PrecompiledError:  # a constant, or a class of arguments, that has no form on disk
            return None
        versions = VERSION, _code(), torch.__version__, platform.python_version()
        key = json.dumps(
            [
                versions,
                registered(),
                str(mesh),
                plan.to_json(),
                repr(options),
                identity.device,
                dict(identity.model),
                call,
            ]
        )
        return cls(root / _hash(key.encode()), mesh, plan)

    def find(self, model: nn.Module, loss: object, fresh: Callable[[], Executable]) -> Stored | None:
        """The program for ``model`` as it is now, whose warnings are given again; None where there is none.

        Args:
            fresh: makes the program.
        """
        for folder in sorted(self.folder.glob("*/")):
            try:
                made, record = json.loads((folder / MADE).read_text()), read_record(folder, evaluates=False)
                if not unchanged(made["files"]) or Reads(record.reads).values(model, loss) != record.signature.reads:
                    continue
                found = Stored(folder, record, fresh)
            except Exception:  # cut off, or of a disk that is full: as if it were not there
                shutil.rmtree(folder, ignore_errors=True)
                continue
            with suppress(OSError):
                (folder / MADE).touch()
            for text in made["warnings"]:
                warnings.warn(ShardcWarning(text), stacklevel=2)
            return found
        return None

    @contextmanager
    def turn(self) -> Iterator[None]:
        """A block in which a program is made and added: of all processes of a machine, one begins, and the others wait.

        Then they look for what it added. Who finds nothing makes a program without keeping others waiting. Nobody waits
        where no start added one so far, because it failed or its program cannot be stored.
        """
        lock = FileLock(self.folder / "lock", timeout=PATIENCE, poll_interval=_POLL)
        first = False
        with suppress(OSError, NotImplementedError):  # no locks on this disk, or a wait too long: all make it
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
        finally:
            with suppress(OSError):
                if first and not any(self.folder.glob("*/")):
                    self._none.touch()
            lock.release()

    @property
    def _none(self) -> Path:
        """A file that says that a program was made, and none could be added."""
        return self.folder / "none"

    def add(self, program: Executable, ops: Iterable[object], said: Sequence[str], evaluates: bool = False) -> None:
        """Writes ``program``, unless it depends on what cannot be told.

        Args:
            ops: what was captured. Of ops that are neither torch's nor shardc's, the code is not known.
            said: the warnings that it gave.
            evaluates: also what runs where no gradients are recorded.
        """
        files = sources(program.reads.files)
        if files is None or not all(map(is_own, ops)):
            return
        with suppress(OSError, PrecompiledError):
            self.folder.mkdir(parents=True, exist_ok=True)
            made = Path(tempfile.mkdtemp(dir=self.folder.parent))
            try:
                save_program(program, self.plan, made, None, evaluates)
                text = json.dumps({"files": files, "warnings": list(said)}, indent=1)
                (made / MADE).write_text(text)
                os.rename(made, self.folder / _hash(json.dumps([files, program.identity.signature.reads]).encode()))
                self._none.unlink(missing_ok=True)
                self._forget()
            finally:
                shutil.rmtree(made, ignore_errors=True)

    def _forget(self) -> None:
        """Removes the programs under the same root, whatever they are of, that were used least recently."""
        used = sorted(self.folder.parent.glob(f"*/*/{MADE}"), key=lambda path: path.stat().st_mtime)
        for path in used[:-KEPT]:  # who reads one now finds that it is cut off
            shutil.rmtree(path.parent, ignore_errors=True)


def sources(traced: Iterable[str]) -> dict[str, str] | None:
    """The files, with hashes, of each package that one of the ``traced`` files belongs to; None if one is no file.

    Torch, shardc and Python are told by their versions.
    """
    loaded = {str(file): name for name, m in list(sys.modules.items()) if (file := getattr(m, "__file__", None))}
    own = [file for file in traced if not _told(Path(file))]
    if not all(Path(file).is_file() for file in own):
        return None
    packages = {loaded[file].partition(".")[0] for file in own if file in loaded} - {"__main__"}
    beside = (file for file, name in loaded.items() if name.partition(".")[0] in packages and Path(file).is_file())
    return {file: _hash(Path(file).read_bytes()) for file in sorted({*own, *beside})}


def _told(file: Path) -> bool:
    """Whether the code in ``file`` is torch's, shardc's or Python's own, and not a package's that lies within these."""
    return any(file.is_relative_to(root) and "-packages" not in str(file.relative_to(root)) for root in TOLD)


def unchanged(files: Mapping[str, str]) -> bool:
    """Whether files have the hashes that `sources` gave."""
    return all(Path(file).is_file() and _hash(Path(file).read_bytes()) == was for file, was in files.items())


@cache
def _code() -> str:
    """A hash of shardc's own code."""
    return _hash(b"".join(path.read_bytes() for path in sorted(PACKAGE.rglob("*.py"))))


def _hash(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()[:32]
