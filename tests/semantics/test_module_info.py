"""Every entry of torch's module database, compiled: what one device computes, or refused with a text that helps.

Each sample runs under `shardc.fsdp` on two simulated ranks, and in two microbatches: outputs, gradients and buffers
are one device's. So does each with four times as many rows, if it runs: most have too few for ranks and microbatches.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from itertools import islice

import pytest
import torch

from tests.semantics.module_cases import NAMES, PLANS, Case, cases, verdict

PARTS = 32
# What is refused, by name and plan, with the text that the user sees.
REFUSED = (
    (
        "Lazy.*",
        "fsdp|microbatches",
        "parameter 'inner.weight' is of a lazy module and has no shape yet\n  source: .*\n"
        "  fix: call the model once, then compile it",
    ),
    (
        "CTCLoss",
        "fsdp|microbatches",
        r"Beside computes a CTC loss \(ctc_loss\), in which sizes depend on the values of lengths\n  source: .*\n"
        "  fix: take it outside of the compiled module, of the outputs that this returns without loss= and without "
        "labels: each rank takes the mean of its rows",
    ),
    # Dim 0 is the sequence, or there is a mask whose dim 0 is no batch.
    (
        "Transformer.*|MultiheadAttention",
        "microbatches",
        r"the step cannot run in microbatches, which split dim 0 of 'tensors\.0'.*: \d values of all microbatches are "
        "needed, one after the other, before the step can go on; .*\n  plan entry: .*\n  source: .*\n"
        r"  fix: if that is not the batch, say which dim is, as by Plan\(inputs=\{'tensors\.0': '_, @dp.*'\}\), or "
        "'...' for an input without one, such as a mask; or use modules that treat each sample by itself .*",
    ),
)


def expected(case: Case, plan: str, error: str) -> bool:
    entry = case.name.partition(" ")[0]
    return any(
        re.fullmatch(names, entry) and re.fullmatch(plans, plan) and re.fullmatch(f"refused: {text}", error)
        for names, plans, text in REFUSED
    )


def with_tiled(samples: Iterator[Case]) -> Iterator[Case]:
    for case in samples:
        yield case
        if (tiled := case.tiled()) is not None:
            yield tiled


def check(entries: range, every: int, count: int | None = None) -> None:
    """Every ``every``-th sample, ``count`` at most, of each of the entries, under each plan."""
    wrong = []
    for at in entries:
        torch._dynamo.reset()
        for case in islice(with_tiled(islice(cases(at), 0, None, every)), count):
            for plan in PLANS:
                text = verdict(case, PLANS[plan])
                if text.startswith("WRONG") or (text.startswith("refused") and not expected(case, plan, text)):
                    wrong.append(f"{case.name} under {plan}: {text}")
    assert not wrong, "\n".join(wrong)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", ["Bilinear", "LazyConv1d", "PReLU", "InstanceNorm1d", "CTCLoss"])
def test_a_sample(name: str) -> None:
    at = NAMES.index(name)
    check(range(at, at + 1), 1, 1)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("part", range(8))
def test_some_entries(part: int) -> None:
    """The first samples of entries spread over the database."""
    check(range(part, len(NAMES), 24), 1, 4)


@pytest.mark.long
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("part", range(PARTS))
def test_all_samples(part: int) -> None:
    """All of them; of an entry with hundreds, which differ by arguments alone, one in seven."""
    for at in range(part, len(NAMES), PARTS):
        check(range(at, at + 1), 7 if NAMES[at] in ("CrossEntropyLoss", "LinearCrossEntropyLoss") else 1)
