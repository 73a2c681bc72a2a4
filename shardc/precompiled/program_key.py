"""The static key of a program: what it is compiled for, known before its capture; names what differs."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from shardc.errors import PrecompiledError
from shardc.ir.code import tensor_text
from shardc.ir.mesh import Mesh
from shardc.ir.reach import reach
from shardc.plan.value import Plan
from shardc.runtime.signature import Signature

_PLAIN = (bool, int, float, str, type(None))


@dataclass(frozen=True)
class ProgramKey:
    """What a program is compiled for, but for what its capture reads of the model (`shardc.ir.guards.Guards`).

    A module looks for its programs by ``call``, as the rest is the same for all of them. The store and saved programs
    compare all of it, and the versions of torch and shardc.

    Args:
        call: the arguments, at global shapes, and the modes of the model and of torch.
        model: thing -> what it is: every parameter, buffer and module, and the code of these and of the loss.
        device: the type of device that it runs on.
        options: as text. A program that the user gives to `shardc.compile` may be of others.
    """

    call: Signature
    model: Mapping[str, str]
    device: str
    mesh: Mesh
    plan: Plan
    options: str

    def check(self, now: Mapping[str, str], reached: Mapping[str, str], what: str, fix: str) -> None:
        """Raises PrecompiledError, with the difference, unless a program ``what`` of this key fits.

        Args:
            now: mesh, plan and device in words, and the model as `described` and `Guards.reached` have it.
            reached: the same of this program's guards.
        """
        own = {"the mesh": str(self.mesh), "the plan": str(self.plan), "the device": self.device}
        saved = {**own, **self.model, **reached}
        wrong = []
        for key in dict.fromkeys((*saved, *now)):
            if saved.get(key) != now.get(key):
                wrong.append(f"{key} was {saved.get(key, 'not there')} and is {now.get(key, 'not there')}")
        if wrong:
            more = f"; and {len(wrong) - 3} more" if len(wrong) > 3 else ""
            raise PrecompiledError(f"{what} is stale: {'; '.join(wrong[:3])}{more}", fix=fix)


def described(model: nn.Module, loss: Callable[..., Any] | None) -> dict[str, str]:
    """Lists, one line each, the parts of ``model`` and ``loss`` that a program depends on.

    Values of the model's parameters and buffers do not count, nor do modes, which are the signature's; those of its
    other tensors, and of the loss's, are constants of the program. Code is what the model and the loss reach
    (`shardc.ir.reach`) before a capture says what it traced.
    """
    out = {}
    first: dict[int, str] = {}
    for kind in ("parameters", "buffers"):
        for name, tensor in getattr(model, f"named_{kind}")(remove_duplicate=False):
            owner = first.setdefault(id(tensor), name)
            shown = f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)}"
            out[f"{kind[:-1]} {name!r}"] = shown if owner == name else f"tied to {owner!r}"
    for name, module in model.named_modules(remove_duplicate=False):
        out[f"module {name!r}"] = _shown(module)
    if isinstance(loss, nn.Module):
        for name, module in loss.named_modules():
            state = {**module._parameters, **module._buffers}
            values = "".join(f", {key}={tensor_text(x)}" for key, x in state.items() if x is not None)
            out[f"module {name!r} of the loss"] = f"{_shown(module)}{values}"
    reached = reach(model, loss)
    return {**out, **reached.code, **reached.values}


def _shown(module: nn.Module) -> str:
    """The class of a module, and its plain attributes; of tensors that are none of its state, a hash of the values."""
    text = f"{type(module).__qualname__}({module.extra_repr()})"
    for key, value in sorted(vars(module).items()):
        if isinstance(value, _PLAIN) and key != "training" and not key.startswith("_"):
            text += f", {key}={value!r}"
        elif isinstance(value, Tensor) and not value.is_meta:
            text += f", {key}={tensor_text(value)}"
    return text
