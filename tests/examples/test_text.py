"""The training text and its batches."""

from __future__ import annotations

import ast
from pathlib import Path

import torch

from examples.text import batch, show, standard_library


def test_text_is_the_source_of_the_running_library() -> None:
    text = standard_library(limit=1_000_000)
    assert text.dtype == torch.uint8 and len(text) == 1_000_000
    assert Path(ast.__file__).read_text() in show(text)


def test_batches_are_fixed_by_the_step_and_targets_follow_tokens() -> None:
    text = standard_library(limit=100_000)
    tokens, targets = batch(text, 3, size=4, length=16)
    assert tokens.shape == targets.shape == (4, 16)
    torch.testing.assert_close(tokens[:, 1:], targets[:, :-1])
    assert torch.equal(tokens, batch(text, 3, size=4, length=16)[0])
    assert not torch.equal(tokens, batch(text, 4, size=4, length=16)[0])
