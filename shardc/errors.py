"""The errors that shardc raises: each names the thing, the plan entry, the source line and what to do."""

from __future__ import annotations


class ShardcError(Exception):
    """Base of every error and warning text of shardc.

    Args:
        what: one sentence that names the thing that is wrong.
        plan_entry: the plan entry that asked for it, as the user wrote it.
        source: ``file:line`` of the user's code that it is about.
        fix: what the user can do, one sentence.
        program: the offending line of a dump with a few lines around it.
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
        super().__init__("\n".join(lines))


class MeshError(ShardcError, ValueError):
    """A mesh that is not valid or is larger than the world; or ranks that do different things."""


class LayoutError(ShardcError, ValueError):
    """A layout that is not valid: an axis used twice, a split below one element, mixed meshes."""


class PlanError(ShardcError, ValueError):
    """A plan entry that matches nothing, names an unknown axis or has the wrong rank."""


class CaptureError(ShardcError, RuntimeError):
    """The model could not be traced to one graph."""


class InputError(ShardcError, ValueError):
    """An input of a wrong shape, dtype or kind at the call."""


class InitError(ShardcError, RuntimeError):
    """An initialisation that cannot run shard by shard, or that leaves a tensor without values."""


class BackwardError(ShardcError, RuntimeError):
    """A backward or an optimizer step that would not have the gradients of a single-device run."""


class RuleError(ShardcError, RuntimeError):
    """An op whose rule does not fit its shapes, or that has none under ``strict``."""


class VerifyError(ShardcError, RuntimeError):
    """A graph that breaks the spec of its stage: a bug in a pass, never the user's fault.

    While a model is compiled its ``fix`` names a file with the program and the versions, to report it with.
    """


class TextError(ShardcError, ValueError):
    """A text that is not a dump."""


class CollectiveError(ShardcError, RuntimeError):
    """A collective that did not complete, most often because another rank died, stalled or raised."""


class PrecompiledError(ShardcError, RuntimeError):
    """A saved program that is broken, or of another torch, mesh, plan or model; or one that cannot be saved."""


class ShardcWarning(UserWarning):
    """A request of the plan that the compiler could not meet, or a cost that the user should know about."""
