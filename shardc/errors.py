"""Errors of shardc: each says what is wrong, and where it can the plan entry, the source line and the fix."""

from __future__ import annotations

import logging


class ShardcError(Exception):
    """Base class of shardc's errors.

    Args:
        what: one sentence that says what is wrong.
        plan_entry: the plan entry that caused it, as the user wrote it.
        source: ``file:line`` of the user's code.
        fix: one sentence, what the user can do.
        program: the offending line of a dump, with a few lines around it.
    """

    def __init__(
        self,
        what: str,
        *,
        plan_entry: str | None = None,
        source: str | None = None,
        fix: str | None = None,
        program: str | None = None,
    ) -> None:
        self.what, self.plan_entry, self.source, self.fix, self.program = what, plan_entry, source, fix, program
        lines = [what]
        if plan_entry:
            lines.append(f"  plan entry: {plan_entry}")
        if source:
            lines.append(f"  source: {source}")
        if program:
            lines.extend(f"  | {line}" for line in program.splitlines())
        if fix:
            lines.append(f"  fix: {fix}")
        self._text = "\n".join(lines)
        super().__init__(self._text)

    def __str__(self) -> str:
        return self._text  # ``args`` are what torch appends its own lines to, where an interpreter of a graph raised


class MeshError(ShardcError, ValueError):
    """A mesh is invalid or larger than the world, or ranks do different things."""


class LayoutError(ShardcError, ValueError):
    """A layout is invalid (an axis used twice, a split below one element, mixed meshes)."""


class PlanError(ShardcError, ValueError):
    """A plan entry cannot apply: it matches nothing, names an unknown axis, or has another number of dims than the
    tensor.
    """


class CaptureError(ShardcError, RuntimeError):
    """The model could not be traced to one graph."""


class InputError(ShardcError, ValueError):
    """An input of a call has the wrong shape, dtype or kind."""


class InitError(ShardcError, RuntimeError):
    """An initialisation cannot run on shards alone, or leaves a tensor without values."""


class BackwardError(ShardcError, RuntimeError):
    """A backward or an optimizer step would not have the gradients of a single-device run."""


class RuleError(ShardcError, RuntimeError):
    """The rule of an op does not fit its shapes, or is missing under ``strict``."""


class VerifyError(ShardcError, RuntimeError):
    """A graph violates an invariant, or the graphs of a pipeline's ranks do not fit together. Your model and plan are
    not the cause.

    During a compile, ``fix`` names a file with the program and the versions, for a bug report.

    Args:
        what: the whole message.
        node: name of the value that violates the invariant; "" if it is no single value.
        reason: what the invariant is, without stage and value.
        rest: as for `ShardcError`.
    """

    def __init__(self, what: str, *, node: str = "", reason: str = "", **rest: str | None) -> None:
        super().__init__(what, **rest)
        self.node, self.reason = node, reason or what

    def with_fix(self, fix: str) -> VerifyError:
        """Return the same error with the advice ``fix``."""
        rest = {"plan_entry": self.plan_entry, "source": self.source, "program": self.program}
        return VerifyError(self.what, node=self.node, reason=self.reason, fix=fix, **rest)


class TextError(ShardcError, ValueError):
    """A text is not a valid dump."""


class CollectiveError(ShardcError, RuntimeError):
    """A collective did not complete, usually because another rank died, stalled or raised."""


class PrecompiledError(ShardcError, RuntimeError):
    """A saved program is broken or for another torch, mesh, plan or model, or a program cannot be saved."""


WARNINGS = logging.getLogger("shardc.warnings")


class ShardcWarning(UserWarning):
    """A warning about a request of the plan that could not be met, or a cost that the user should know about.

    Each warning is logged too (`shardc.logs`), also where Python shows it only once.
    """

    def __init__(self, *args: object) -> None:
        super().__init__(*args)
        WARNINGS.info("%s", self)
