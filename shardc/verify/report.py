"""Writes a report file for an error of the verifier: the graph before and after the pass, and versions."""

from __future__ import annotations

import platform
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from hashlib import blake2b
from pathlib import Path

import torch
from torch import fx

from shardc.errors import VerifyError
from shardc.ir import text
from shardc.ir.mesh import Mesh


@contextmanager
def reporting(mesh: Mesh, programs: Mapping[str, fx.GraphModule | None]) -> Iterator[None]:
    """Write a report file for a VerifyError of the block that has no fix, and raise it with a fix that names the file.

    Args:
        programs: title in the file -> graph; None for a graph that does not exist.
    """
    try:
        yield
    except VerifyError as error:
        if error.fix is not None:
            raise
        parts = [str(error), f"torch {torch.__version__}, Python {platform.python_version()}, {platform.platform()}"]
        parts += [f"--- {name}\n{_text(gm, mesh)}" for name, gm in programs.items() if gm is not None]
        content = "\n\n".join(parts)
        path = Path(tempfile.gettempdir()) / f"shardc-report-{blake2b(content.encode(), digest_size=6).hexdigest()}.txt"
        try:
            path.write_text(content)
            how = f"with {path}, which holds the program and the versions"
        except OSError as reason:
            how = f"with this text (no report could be written to {path}: {reason.strerror})"
        fix = f"this is a fault of shardc, or of a pass of your own, and not of your model or plan; report it {how}"
        raise VerifyError(
            error.what, plan_entry=error.plan_entry, source=error.source, program=error.program, fix=fix
        ).with_traceback(error.__traceback__) from None


def _text(gm: fx.GraphModule, mesh: Mesh) -> str:
    try:
        return text.dump(gm, mesh)
    except VerifyError as error:  # a broken graph may not be printable
        return f"{error}\n{gm.graph}"
