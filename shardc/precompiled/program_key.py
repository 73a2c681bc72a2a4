"""`ProgramKey`, the static key of a program: call, model, mesh and plan, known before its capture."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from torch import Tensor, nn

from shardc._compat import PyTree
from shardc.errors import PrecompiledError
from shardc.ir.code import tensor_text
from shardc.ir.mesh import Mesh
from shardc.ir.module_paths import is_public
from shardc.ir.reach import reach
from shardc.plan.value import Plan
from shardc.runtime.inputs import Signature
from shardc.validate import torch_name

PLAIN = (bool, int, float, str, type(None))  # classes of values that JSON can hold


@dataclass(frozen=True)
class ProgramKey:
    """The cache key of a program: its call, model, mesh, plan and device. Its guards (values of the model that the
    capture read) are not part of the key.

    A module finds its programs by ``call``, since the other fields are the same for all of them. The store and saved
    programs compare all fields, and the versions of torch and shardc.

    Args:
        call: the arguments, at global shapes, and the modes of the model and of torch.
        model: name of a parameter, buffer, module or piece of code -> its description as text; see `described`.
        device: type of the device: "cpu", "cuda".
        options: the `Options` as text. A program passed to `shardc.compile` may have others.
    """

    call: Signature
    model: Mapping[str, str]
    device: str
    mesh: Mesh
    plan: Plan
    options: str

    def check(self, now: Mapping[str, str], reached: Mapping[str, str], what: str, fix: str) -> None:
        """Raises PrecompiledError, with the differences, unless the program of this key is valid under the
        descriptions ``now``.

        Args:
            now: the descriptions that hold now: of mesh, plan and device, those of `described` and `Guards.reached`.
            reached: the descriptions in this program's guards.
            what, fix: name of the program and ``fix`` of the error.
        """
        compiled_for = {"the mesh": str(self.mesh), "the plan": str(self.plan), "the device": self.device}
        saved = {**compiled_for, **self.model, **reached}
        wrong = []
        for key in dict.fromkeys((*saved, *now)):
            if saved.get(key) != now.get(key):
                wrong.append(f"{key} was {saved.get(key, 'not there')} and is {now.get(key, 'not there')}")
        if wrong:
            more = f"; and {len(wrong) - 3} more" if len(wrong) > 3 else ""
            raise PrecompiledError(f"{what} is stale: {'; '.join(wrong[:3])}{more}", fix=fix)


def described(model: nn.Module, loss: Callable[..., PyTree] | None) -> dict[str, str]:
    """Return name -> description, as text, of each part of ``model`` and ``loss`` that a program depends on.

    Values of the model's parameters and buffers do not count, nor do modes, which are in the signature. Values of its
    other tensors, and of the loss's, are constants of the program. The code is all that model and loss can reach
    (`shardc.ir.reach`), since only a capture knows what it traces.
    """
    out = {}
    first: dict[int, str] = {}
    for kind in ("parameters", "buffers"):
        for name, tensor in getattr(model, f"named_{kind}")(remove_duplicate=False):
            owner = first.setdefault(id(tensor), name)
            shown = f"{torch_name(tensor.dtype)}{list(tensor.shape)}"
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
    """Return the class of a module and its plain attributes as text. A tensor attribute is given by a hash of its
    values.
    """
    text = f"{type(module).__qualname__}({module.extra_repr()})"
    for key, value in sorted(vars(module).items()):
        if isinstance(value, PLAIN) and key != "training" and is_public(key):
            text += f", {key}={value!r}"
        elif isinstance(value, Tensor) and not value.is_meta:
            text += f", {key}={tensor_text(value)}"
    return text
