"""What Dynamo and AOTAutograd say, as a `CaptureError` with the user's line and what to do."""

from __future__ import annotations

import re

from torch import nn
from torch._dynamo.exc import TorchDynamoException

from shardc.capture.source import frames, users_own
from shardc.errors import CaptureError


def capture_error(model: nn.Module, error: RuntimeError) -> CaptureError:
    """``error``, raised while ``model`` was traced, in terms of the model."""
    text = str(error)
    reason = next((line.strip() for line in text.splitlines() if line.strip()), type(error).__name__)
    if not isinstance(error, TorchDynamoException):
        reason = f"{type(error).__name__}: {reason}"
    stack = frames(text) or [f"{frame.filename}:{frame.lineno}" for frame in getattr(error, "real_stack", None) or ()]
    why = re.search(r"(raised exception .*)", text) or re.search(r"(?:Explanation|Developer debug context): (.*)", text)
    hint = re.search(r"Hint: (.*)", text)
    if op := re.search(r"backward through (\S+) but no autograd formula was registered", text):
        return CaptureError(
            f"{op[1]}, which {type(model).__name__} calls, has no gradient",
            source=users_own(stack) or None,
            fix="give it one with torch.library.register_autograd, or call it under torch.no_grad()",
        )
    return CaptureError(
        f"{type(model).__name__} cannot be traced to one graph: {reason}" + (f" ({why[1].strip()})" if why else ""),
        source=users_own(stack) or None,
        fix=hint[1].strip() if hint else "write this line with tensor operations whose shapes do not depend on values",
    )
