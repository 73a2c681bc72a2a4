"""`Precision`, of ``precision``: the dtypes in which a model computes and its gradients are reduced."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Literal

import torch

from shardc.errors import PlanError
from shardc.plan.entries.entry import Entry
from shardc.plan.match import matching, must_match
from shardc.plan.placed import Placed
from shardc.validate import check_fields

DTYPE_FIELDS = ("param", "reduce", "output", "buffers")


@dataclass(frozen=True)
class Precision(Entry):
    """The dtypes in which tensors are communicated and computed under mixed precision. None keeps a dtype as it is.

    Args:
        param: parameters are cast to this dtype before their gather; floating-point inputs, too.
        reduce: gradients are reduced in this dtype; None: in ``param``.
        output: floating-point outputs of the model, or of ``modules``, are cast to this dtype.
        buffers: floating-point buffers are cast to this dtype.
        keep_low_precision_grads: leave reduced gradients in ``reduce`` instead of casting them back.
        full_precision_eval: compute in the parameters' own dtype while the model is in eval mode.
        cast_forward_inputs: the inputs that are cast to ``param``. True: the floating-point inputs of the model (or of
            ``modules``), and those of each layer in it: the children with parameters of a ModuleList, ModuleDict or
            Sequential. FSDP2 does the same if each layer is wrapped. "model": only those of the model (or of
            ``modules``). False: none.
        matmul: "float8": products of linear layers, forward and backward, have operands in float8, which are scaled by
            their largest value. Weights are scaled and cast before their gather.
        scaling: what has a scale of its own with ``matmul="float8"``. "tensorwise": each operand; gradients are in
            float8_e5m2. "rowwise": each row or column that is multiplied; scales are powers of two, and everything is
            in float8_e4m3fn. "mxfp8": each block of 32 numbers that are multiplied with one row or column, otherwise
            as "rowwise". None: "tensorwise".
        modules: module globs. The policy applies to these modules and everything inside; () is the complete model. A
            module has the last policy that matches it, and no other. An entry with ``matmul`` alone leaves the dtypes
            of earlier ones as they are.
    """

    constructor = "precision"

    param: torch.dtype | None = None
    reduce: torch.dtype | None = None
    output: torch.dtype | None = None
    buffers: torch.dtype | None = None
    keep_low_precision_grads: bool = False
    full_precision_eval: bool = False
    cast_forward_inputs: Annotated[bool | str, Literal[True, False, "model"]] = True
    modules: tuple[str, ...] = ()
    matmul: Annotated[str | None, Literal["float8", None]] = None
    scaling: Annotated[str | None, Literal["tensorwise", "rowwise", "mxfp8", None]] = None

    def __post_init__(self) -> None:
        check_fields(self, PlanError, "", plan_entry="precision(...)")
        if self.scaling is not None and self.matmul is None:
            raise PlanError(
                f"scaling={self.scaling!r} is of float8 products",
                plan_entry="precision(...)",
                fix='write matmul="float8" beside it',
            )
        for name in DTYPE_FIELDS:
            dtype = getattr(self, name)
            if dtype is not None and not dtype.is_floating_point:
                raise PlanError(
                    f"{name}={dtype!r} is not a floating-point dtype",
                    plan_entry="precision(...)",
                    fix=f"write {name}=torch.bfloat16",
                )

    @property
    def key(self) -> tuple[object, ...]:
        return ("precision", self.modules, self.of_products)

    def place(self, params: Mapping[str, Placed], names: Mapping[str, str]) -> dict[str, Placed]:
        holding = dict.fromkeys(path for name in names for path in _around(name)[1:])
        for glob in self.modules:
            must_match(glob, holding, "module with parameters", str(self))
        return {}

    def covers(self, module: str) -> bool:
        """Return whether the entry applies to the module at path ``module``."""
        return not self.modules or any(matching(glob, _around(module)) for glob in self.modules)

    @property
    def grads(self) -> torch.dtype | None:
        """Return the dtype that gradients have after their reduction; None if each gradient has the dtype of its
        parameter.
        """
        return (self.reduce or self.param) if self.keep_low_precision_grads else None

    @property
    def of_products(self) -> bool:
        """Return whether the entry only says how matrix products are computed (``matmul``), and sets no dtypes."""
        of_products = {"matmul", "scaling", "modules", "full_precision_eval"}
        return self.matmul is not None and self.call[1].keys() <= of_products

    @property
    def scaled(self) -> str:
        """Return the scaling of float8 products, "tensorwise", "rowwise" or "mxfp8"; "" without them."""
        return (self.scaling or "tensorwise") if self.matmul == "float8" else ""

    @property
    def row(self) -> tuple[str, str, str]:
        dtypes = ", ".join(f"{name} {value}" for name, value in self.call[1].items() if name != "modules")
        return "precision", ", ".join(self.modules) or "all", dtypes


def _around(name: str) -> list[str]:
    """Return ``name`` and the names of the modules around it, innermost first: ``a.b``, ``a``. The model itself is left
    out.
    """
    parts = name.split(".")
    return [".".join(parts[:count]) for count in range(len(parts), 0, -1)]


_AS_IT_IS = Precision()


@dataclass(frozen=True)
class Policies:
    """The precision of every module of a model, by the entries in order."""

    entries: tuple[Precision, ...] = ()

    def of(self, module: str) -> Precision:
        """Return the precision entry that sets the dtypes of the module at path ``module``.

        It is the last entry that covers the module and sets dtypes, or one that leaves all dtypes as they are.
        """
        return self._last([entry for entry in self.entries if not entry.of_products], module)

    def scaled(self, module: str) -> str:
        """Return the scaling of the float8 products of the module at path ``module``; "" if it has none."""
        return self._last(self.entries, module).scaled

    @staticmethod
    def _last(entries: Sequence[Precision], module: str) -> Precision:
        """Return the last of ``entries`` that covers ``module``; if none does, an entry that changes no dtype."""
        return next((entry for entry in reversed(entries) if entry.covers(module)), _AS_IT_IS)

    @property
    def float8(self) -> Precision | None:
        """Return the last entry that asks for products in float8; None if none does."""
        return next((entry for entry in reversed(self.entries) if entry.scaled), None)

    def of_param(self, name: str) -> Precision:
        """Return the precision of the module that has the parameter ``name``."""
        return self.of(name.rpartition(".")[0])

    def mode(self, training: bool) -> Policies:
        """Return the policies that apply in training or in evaluation. In evaluation, entries with
        ``full_precision_eval`` ask for no lower precision.
        """
        low = [e for e in self.entries if training or not (e.full_precision_eval and e.of_products)]
        return Policies(
            tuple(Precision(modules=e.modules) if e.full_precision_eval and not training else e for e in low)
        )
