"""The glossary: in order, each term once, with every public name that is a noun of the domain."""

from __future__ import annotations

import re
from pathlib import Path

import shardc

TERMS = re.findall(r"^- \*\*(.+?)\*\*: ", (Path(__file__).parents[2] / "docs/glossary.md").read_text(), re.MULTILINE)
# Public names that are verbs, or that the reference is the place for.
OTHERS = {
    "ShardcError", "ShardcWarning", "batches", "compile", "data_parts", "find_plan", "load", "local", "local_map",
    "measure_links", "optim", "register_forward_method", "register_rule", "shard", "train_step", "value_and_grad",
}  # fmt: skip


def test_terms_are_in_order_and_once() -> None:
    assert len(TERMS) >= 80
    assert sorted(set(TERMS), key=str.lower) == TERMS


def test_public_nouns_are_terms() -> None:
    spoken = {term.lower().replace(" ", "_").rstrip("s") for term in TERMS} | {"tp"}  # in it as "tensor parallel"
    assert {name for name in set(shardc.__all__) - OTHERS if name.lower().rstrip("s") not in spoken} == set()
    assert OTHERS <= set(shardc.__all__)
