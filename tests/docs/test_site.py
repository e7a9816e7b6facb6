"""The documentation site holds every page, and its links lead somewhere: mkdocs checks them where it is installed."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from importlib.util import find_spec
from types import SimpleNamespace

import pytest
import yaml

from scripts.site_links import on_page_markdown
from tests.docs.pages import NAMES, ROOT

CONFIG = yaml.safe_load((ROOT / "mkdocs.yml").read_text(encoding="utf-8"))
PAGES = [name.removeprefix("docs/") for name in NAMES if name.startswith("docs/")]
HEADING = re.compile(r"^#+ +(.+)$", re.MULTILINE)
ANCHOR = re.compile(r"\]\(([^)#\s:]*)#([^)\s]+)\)")


def listed(entries: list) -> list[str]:
    """Returns the pages of a navigation, in its order."""
    found: list[str] = []
    for entry in entries:
        found += [entry] if isinstance(entry, str) else [page for below in entry.values() for page in listed(below)]
    return found


def test_every_page_is_in_the_navigation_once() -> None:
    assert sorted(listed(CONFIG["nav"])) == sorted(PAGES)
    assert CONFIG["strict"] is True


# links of a column that a reader can take in at a glance
MOST_LINKS = 14


def test_a_column_of_links_fits_on_a_screen() -> None:
    """A section is a tab, so its pages are the left column; the right one has the headings of a page."""
    assert "navigation.tabs" in CONFIG["theme"]["features"]
    for section in CONFIG["nav"]:
        ((title, pages),) = section.items()
        assert 1 < len(pages) <= MOST_LINKS, title
    (toc,) = [one["toc"] for one in CONFIG["markdown_extensions"] if isinstance(one, dict) and "toc" in one]
    deepest = toc["toc_depth"]
    for name in PAGES:
        text = re.sub(r"^```.*?^```$", "", (ROOT / "docs" / name).read_text(encoding="utf-8"), flags=re.DOTALL | re.MULTILINE)
        found = [line for line in text.splitlines() if re.match(rf"#{{2,{deepest}}} ", line)]
        assert len(found) <= MOST_LINKS, f"{name}: {found}"


def test_code_wraps_where_a_column_is_narrower_than_its_lines() -> None:
    (sheet,) = CONFIG["extra_css"]
    (rule,) = re.findall(r"pre > code \{([^}]*)\}", (ROOT / "docs" / sheet).read_text(encoding="utf-8"))
    assert "white-space: pre-wrap" in rule


def anchors(text: str) -> set[str]:
    """Returns the anchors of a page's headings, as GitHub and mkdocs make them."""
    return {re.sub(r"[^\w\- ]", "", heading.lower()).strip().replace(" ", "-") for heading in HEADING.findall(text)}


@pytest.mark.parametrize("name", NAMES)
def test_every_link_to_a_heading_finds_it(name) -> None:
    text = (ROOT / name).read_text(encoding="utf-8")
    for page, anchor in ANCHOR.findall(text):
        target = (ROOT / name).parent / page if page else ROOT / name
        assert anchor in anchors(target.read_text(encoding="utf-8")), f"{name}: {page}#{anchor}"


def test_links_out_of_the_site_lead_to_the_repository() -> None:
    page = SimpleNamespace(file=SimpleNamespace(src_uri="how-to/page.md"))
    config = SimpleNamespace(repo_url="https://host/owner/rooftile")
    text = "[a](../../DESIGN.md#the-rooms) [b](../quickstart.md) [c](../../nowhere.md) [d](https://x/../../y)"
    due = "[a](https://host/owner/rooftile/blob/main/DESIGN.md#the-rooms) [b](../quickstart.md) [c](../../nowhere.md) [d](https://x/../../y)"
    assert on_page_markdown(text, page, config, None) == due


@pytest.mark.skipif(find_spec("material") is None, reason="needs `make docs` once")
def test_the_site_builds_without_a_warning(tmp_path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--quiet", "--site-dir", str(tmp_path)],
        cwd=ROOT, env=os.environ | {"NO_MKDOCS_2_WARNING": "1"}, capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "search" / "search_index.json").exists()
