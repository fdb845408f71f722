"""Links of all pages, also those in the repository's root, and every `docs/….md` that code and configuration name."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest
import yaml

from gpuwatch.metrics import BY_NAME
from tests.programs import ROOT

PAGES = [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")]
LINK = re.compile(r"\]\((?![a-z]+:)([^)#\s]*)(?:#([^)\s]+))?\)")


def anchors(page: Path) -> set[str]:
    """Return the anchors of a page's headings, as GitHub and mkdocs make them."""
    headings = re.findall(r"^#+ (.+)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", each.lower()).replace(" ", "-") for each in headings}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_link_leads_somewhere(page: Path) -> None:
    for target, anchor in LINK.findall(page.read_text()):
        found = (page.parent / target) if target else page
        assert found.exists(), target
        if anchor:
            assert anchor in anchors(found), f"{target}#{anchor}"


def test_every_page_that_a_file_names_exists() -> None:
    listed = subprocess.run(
        ["git", "grep", "-hoIE", r"\bdocs/[a-zA-Z/_-]+\.(md|json|png)", "--", ".", ":!CHANGELOG.md"],
        cwd=ROOT, capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    if listed.returncode != 0:
        pytest.skip("not a git checkout")
    assert {name for name in listed.stdout.split() if not (ROOT / name).exists()} == set()


def test_every_page_is_in_the_navigation() -> None:
    """mkdocs itself checks the same: `make docs`. This names the line to add without a build."""
    text = (ROOT / "mkdocs.yml").read_text()
    pages = {str(page.relative_to(ROOT / "docs")) for page in (ROOT / "docs").rglob("*.md")}
    pages = {page for page in pages if not page.startswith("runbooks/")}  # a hook lists those
    listed = {page for section in yaml.safe_load(text)["nav"] for entry in section.values() for page in leaves(entry)}
    assert listed - {"contributing.md", "changelog.md", "security.md"} == pages


def leaves(entry: object) -> list[str]:
    if isinstance(entry, str):
        return [entry]
    parts = entry.values() if isinstance(entry, dict) else entry
    return [page for part in parts for page in leaves(part)]  # type: ignore[attr-defined]


@pytest.mark.parametrize(("page", "least"), [("SECURITY.md", 10), ("docs/evidence/faults.md", 20)])
def test_every_test_and_metric_that_a_line_of_evidence_names_is_there(page: str, least: int) -> None:
    text = (ROOT / page).read_text()
    named = set(re.findall(r"`((?:[\w]+/)*test_\w+\.py)`", text))
    assert len(named) >= least
    folders = (ROOT / "tests", ROOT / "tests/unit/agent")
    assert [name for name in named if not any((folder / name).is_file() for folder in folders)] == []
    assert {name for name in re.findall(r"`(gpuwatch_[a-z_]+)", text)} <= BY_NAME.keys()


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_row_of_a_table_has_as_many_cells_as_its_head(page: Path) -> None:
    """A "|" in a cell begins another one, in code too, unless it is escaped."""
    text = re.sub(r"^```.*?^```$", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
    for table in re.findall(r"(?:^\|.*\n)+", text, re.MULTILINE):
        head, *rows = (re.split(r"(?<!\\)\|", row) for row in table.splitlines())
        assert [row for row in rows if len(row) != len(head)] == []
