"""Links of the pages lead to files that exist, and to headings that they have."""

import re
from functools import cache
from pathlib import Path

import pytest
from places import ROOT

PAGES = [*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").rglob("*.md"))]
LINK = re.compile(r"\]\((?!https?:|mailto:)([^)#\s]*)(?:#([^)\s]+))?\)")
CODE = re.compile(r"^```.*?^```", re.M | re.S)


@cache
def anchors(page: Path) -> frozenset[str]:
    """The anchors of a page's headings, as GitHub and MkDocs make them."""
    heads = re.findall(r"^#+ (.*)$", CODE.sub("", page.read_text()), re.M)
    bare = [re.sub(r"\]\([^)]*\)", "", head).lower() for head in heads]
    return frozenset(re.sub(r"[^\w -]", "", x).strip().replace(" ", "-") for x in bare)


def faults(page: Path) -> list[str]:
    found = []
    for target, anchor in LINK.findall(CODE.sub("", page.read_text())):
        there = page.parent / target if target else page
        if not there.exists():
            found.append(f"{target} does not exist")
        elif anchor and there.suffix == ".md" and anchor not in anchors(there):
            found.append(f"{target or page.name} has no heading #{anchor}")
    return found


@pytest.mark.parametrize("page", PAGES, ids=lambda p: str(p.relative_to(ROOT)))
def test_links_lead_somewhere(page: Path) -> None:
    assert not faults(page)


def test_every_page_is_reached_from_the_index() -> None:
    seen, todo = set(), [ROOT / "docs/index.md"]
    while todo:
        page = todo.pop()
        if page in seen:
            continue
        seen.add(page)
        links = LINK.findall(CODE.sub("", page.read_text()))
        todo += [(page.parent / t).resolve() for t, _ in links if t.endswith(".md")]
    left = set((ROOT / "docs").rglob("*.md")) - seen
    assert not {str(page) for page in left}


def test_a_broken_link_is_found(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("# A `b`: c\n[x](#a-b-c) [y](#z) [u](u.md) [v](https://v.org/w)\n")
    assert faults(page) == ["page.md has no heading #z", "u.md does not exist"]
