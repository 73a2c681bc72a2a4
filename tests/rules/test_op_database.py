"""Torch's own op database: each call that its samples make, forward and backward, under every strategy of its rule."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from typing import Any

import pytest
import torch
from torch.testing._internal.common_methods_invocations import op_db
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

from shardc.ir.mesh import Mesh
from shardc.rules import find_rule
from shardc.rules.proof import Sample, prove
from shardc.runtime.sim.lockstep import Lockstep

# The database's favourite sizes are 5 and 10.
MESHES = (Mesh(x=2), Mesh(x=5))
PARTS = 8
LARGE = 1000
UNDEFINED = "empty"


class Recorder(TorchDispatchMode):
    """Keeps every functional call of an op that has a rule."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[Sample] = []

    def __torch_dispatch__(self, op: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        writes = any(a.alias_info is not None and a.alias_info.is_write for a in op._schema.arguments)
        tensors = [x for x in tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)]
        plain = all(x.layout == torch.strided and x.numel() <= LARGE for x in tensors)
        if not writes and plain and find_rule(op) is not None:
            given = tree_map_only(torch.Tensor, lambda x: x.detach().clone(), (args, kwargs))
            self.calls.append(Sample(op, *given, defined=UNDEFINED not in str(op)))
        return op(*args, **kwargs)


def recorded(info: Any, count: int) -> Iterator[Sample]:
    """The calls that the first ``count`` samples of a database entry make."""
    dtype = next((d for d in (torch.float64, torch.int64, torch.bool) if d in info.dtypes), None)
    if dtype is None:
        return
    differentiable = info.supports_autograd and dtype == torch.float64
    for sample in islice(info.sample_inputs("cpu", dtype, requires_grad=differentiable), count):
        with Recorder() as recorder:
            try:
                made = info.op(sample.input, *sample.args, **sample.kwargs)
                outputs = [x for x in tree_leaves(made) if isinstance(x, torch.Tensor) and x.requires_grad]
                torch.autograd.backward(outputs, [torch.ones_like(x) for x in outputs])
            except (RuntimeError, AssertionError):
                pass  # some entries need what this build lacks; the calls before are still good samples
        yield from recorder.calls


def check(part: int, count: int) -> None:
    tried, wrong, seen = 0, [], set()
    for info in op_db[part::PARTS]:
        for sample in recorded(info, count):
            if str(sample) in seen:
                continue
            seen.add(str(sample))
            rule = find_rule(sample.op)
            assert rule is not None
            found = prove(rule, sample, Lockstep, MESHES)
            tried += found.tried
            wrong += found.wrong
    assert wrong == []
    assert tried > 100


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("part", [0, *(pytest.param(part, marks=pytest.mark.slow) for part in range(1, PARTS))])
def test_first_sample(part: int) -> None:
    check(part, 1)


@pytest.mark.long
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("part", range(PARTS))
def test_all_samples(part: int) -> None:
    check(part, 100)
