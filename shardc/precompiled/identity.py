"""The identity of a program (the call, model and loss that it was compiled for) as JSON, and its comparison."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor, nn

from shardc.errors import PrecompiledError
from shardc.ir.reads import Reads
from shardc.ir.value_text import tensor_text
from shardc.precompiled.record import Call, TensorLeaf
from shardc.precompiled.tree_spec import spec_from_json, spec_to_json
from shardc.runtime.signature import Constant, Like, Signature

_KINDS = {kind.__name__: kind for kind in (bool, int, float, str, type(None))}
_PLAIN = (bool, int, float, str, type(None))
NOTHING_READ = Reads()


@dataclass(frozen=True)
class Identity:
    """The call, model and device that a program was compiled for.

    Args:
        signature: the arguments of the call, at global shapes, and the modes of the model.
        model: parameter, buffer, module or function -> its description, for all that the model and the loss reach.
        device: the device type that it runs on.
    """

    signature: Signature
    model: Mapping[str, str]
    device: str


def described(model: nn.Module, loss: Callable[..., Any] | None, reads: Reads = NOTHING_READ) -> dict[str, str]:
    """Return name -> description of each part of ``model`` and ``loss`` that a program depends on.

    Parts are parameters and buffers (shapes and dtypes, not values), modules, other tensors (by value, since they are
    constants of a program) and code that the model and the loss reach (`shardc.ir.reach`), given what a capture
    ``reads``. Modes are not among them: they are in the signature.
    """
    out = {}
    first: dict[int, str] = {}
    for kind in ("parameters", "buffers"):
        for name, tensor in getattr(model, f"named_{kind}")(remove_duplicate=False):
            owner = first.setdefault(id(tensor), name)
            shown = f"{_dtype_text(tensor.dtype)}{list(tensor.shape)}"
            out[f"{kind[:-1]} {name!r}"] = shown if owner == name else f"tied to {owner!r}"
    for name, module in model.named_modules(remove_duplicate=False):
        out[f"module {name!r}"] = _shown(module)
    if isinstance(loss, nn.Module):
        for name, module in loss.named_modules():
            state = {**module._parameters, **module._buffers}
            values = "".join(f", {key}={tensor_text(x)}" for key, x in state.items() if x is not None)
            out[f"module {name!r} of the loss"] = f"{_shown(module)}{values}"
    reached = reads.reach(model, loss)
    return {**out, **reached.code, **reached.values}


def _shown(module: nn.Module) -> str:
    """Return the class and the plain attributes of a module, with a hash of each tensor outside of its state."""
    text = f"{type(module).__qualname__}({module.extra_repr()})"
    for key, value in sorted(vars(module).items()):
        if isinstance(value, _PLAIN) and key != "training" and not key.startswith("_"):
            text += f", {key}={value!r}"
        elif isinstance(value, Tensor) and not value.is_meta:
            text += f", {key}={tensor_text(value)}"
    return text


def check_same(what: str, saved: Mapping[str, str], now: Mapping[str, str], fix: str) -> None:
    """Raise PrecompiledError, with the differences, if ``saved`` and ``now`` differ."""
    wrong = []
    for key in dict.fromkeys((*saved, *now)):
        if saved.get(key) != now.get(key):
            wrong.append(f"{key} was {saved.get(key, 'not there')} and is {now.get(key, 'not there')}")
    if wrong:
        more = f"; and {len(wrong) - 3} more" if len(wrong) > 3 else ""
        raise PrecompiledError(f"{what} is stale: {'; '.join(wrong[:3])}{more}", fix=fix)


# --- signatures as JSON


def signature_to_json(signature: Signature) -> dict[str, Any]:
    """Return ``signature`` as JSON data; PrecompiledError for a constant or structure that JSON cannot represent."""
    around = signature.surroundings
    leaves = []
    for name, leaf in zip(signature.names, signature.leaves, strict=True):
        if isinstance(leaf, Like):
            leaves.append({"shape": leaf.shape, "dtype": _dtype_text(leaf.dtype), "requires_grad": leaf.requires_grad})
        elif leaf.kind.__name__ in _KINDS:
            leaves.append({"constant": leaf.value, "kind": leaf.kind.__name__})
        else:
            raise PrecompiledError(
                f"input {name!r} is the constant {leaf.value!r}, which cannot be saved",
                fix="pass a tensor, a number, a string or None",
            )
    return {
        "names": signature.names,
        "leaves": leaves,
        "spec": spec_to_json(signature.spec, "the arguments"),
        "modes": signature.modes,
        "grads": signature.grads,
        "dtypes": [_dtype_text(dtype) for dtype in signature.dtypes],
        "surroundings": {
            **around._asdict(),
            "autocast": [[kind, _dtype_text(dtype)] for kind, dtype in around.autocast],
            "default_dtype": _dtype_text(around.default_dtype),
        },
        "reads": signature.reads,
    }


def reads_to_json(reads: Reads) -> list[dict[str, Any]]:
    """Return ``reads`` as JSON data; PrecompiledError for a global that another process cannot import."""
    for read in reads.entries:
        if "scope(" in read.expression:
            raise PrecompiledError(
                f"the program depends on {read}, a global of code that cannot be imported",
                fix="put the code of the model into a file that is imported",
            )
    return [asdict(read) for read in reads.entries]


def signature_of(call: Call) -> Signature:
    """Return the signature that `signature_to_json` wrote; PrecompiledError if it is inconsistent."""
    leaves: list[Like | Constant] = []
    for leaf in call.leaves:
        if isinstance(leaf, TensorLeaf):
            leaves.append(Like(leaf.shape, leaf.dtype, leaf.requires_grad))
        elif type(leaf.constant) is not _KINDS[leaf.kind]:
            raise PrecompiledError(f"the constant {leaf.constant!r} of the arguments is no {leaf.kind}")
        else:
            leaves.append(Constant(_KINDS[leaf.kind], leaf.constant))
    spec = spec_from_json(call.spec, "the arguments")
    if not len(leaves) == len(call.names) == spec.num_leaves:
        raise PrecompiledError(f"{len(leaves)} arguments have {len(call.names)} names and {spec.num_leaves} places")
    return Signature(
        call.names, tuple(leaves), spec, call.modes, call.grads, call.dtypes, call.surroundings, call.reads
    )


def _dtype_text(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def value_to_json(value: Any) -> dict[str, Any]:
    """Return a placeholder's value as JSON data: sizes, strides, dtype and device of a tensor, or a number."""
    if isinstance(value, Tensor):
        return {
            "shape": tuple(value.shape), "stride": value.stride(), "dtype": _dtype_text(value.dtype),
            "device": str(value.device),
        }  # fmt: skip
    if isinstance(value, _PLAIN):
        return {"constant": value}
    raise PrecompiledError(f"a value of type {type(value).__name__} cannot be saved", fix="compile for fixed sizes")
