"""What the documents point at is there: commands with their flags, files of the tree, headings of other pages."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import pytest

from vericache_conform.cli.main import PROGRAM as CONFORM
from vericache_core.cli.main import PROGRAM

ROOT = Path(__file__).parents[1]
HISTORY = ("docs/log.md", "docs/adr/", "CHANGELOG.md")
"""They may name what is gone."""
PAGES = {str(path.relative_to(ROOT)): path for place in ("*.md", "docs/**/*.md", "*/*/README.md") for path in ROOT.glob(place)}
PRESENT = {name: path for name, path in PAGES.items() if not name.startswith(HISTORY)}


def commands() -> Iterator[tuple[str, str]]:
    """Page and command line of every command of ours that stands in a block of code; no synopsis with brackets."""
    for name, path in PRESENT.items():
        for line in path.read_text(encoding="utf-8").replace("\\\n", " ").splitlines():
            found = re.match(r"\s*(?:\$ )?((?:vericache|vericache-conform) .*)", line)
            if found and "[" not in found[1]:
                yield name, found[1]


@pytest.mark.parametrize(("page", "line"), list(commands()))
def test_every_command_is_one_that_the_program_takes(page: str, line: str) -> None:
    words = [word for word in shlex.split(line, comments=True) if word != "..." or '"..."' in line]
    program = {"vericache": PROGRAM, "vericache-conform": CONFORM}[words[0]]
    program.parse(words[1:])


@pytest.mark.parametrize("page", PAGES)
def test_every_link_leads_somewhere(page: str) -> None:
    text = PAGES[page].read_text(encoding="utf-8")
    for link in re.findall(r"\]\(([^)]+)\)", text):
        if link.startswith("https://"):
            continue
        path, _, anchor = link.partition("#")
        target = (PAGES[page].parent / path).resolve() if path else PAGES[page]
        assert target.exists(), link
        if anchor:
            headings = re.findall(r"^#+ (.*)$", target.read_text(encoding="utf-8"), re.MULTILINE)
            assert anchor in {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}, link


@pytest.mark.parametrize("page", PRESENT)
def test_every_file_that_is_named_is_there(page: str) -> None:
    text = PRESENT[page].read_text(encoding="utf-8")
    tops = "benchmarks|compressors|conformance|deploy|docs|integrations|tests|vericache_core"
    for name in re.findall(rf"`((?:{tops})/[\w./-]+\.\w+)`", text):
        assert (ROOT / name).exists() or (PRESENT[page].parent / name).exists(), name
