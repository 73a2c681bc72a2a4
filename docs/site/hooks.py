"""The site's first page is the README, whose links, like those of the pages, are relative to the repository."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File

ROOT = Path(__file__).parents[2]
# To a file of the repository that is no page: on the site its path is named, and not linked.
_ELSEWHERE = re.compile(r"\[([^\]]+)\]\((?:\.\./)?(?:examples|benchmarks|CONTRIBUTING|CHANGELOG|LICENSE)[^)]*\)")


def on_files(files: Any, config: Any) -> Any:
    """Adds the README as ``index.md``."""
    files.append(File.generated(config, "index.md", content=(ROOT / "README.md").read_text(encoding="utf-8")))
    return files


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Links as the site has them."""
    text = _ELSEWHERE.sub(r"\1", markdown)
    return re.sub(r"\]\(docs/", "](", text.replace("](../README.md", "](index.md"))
