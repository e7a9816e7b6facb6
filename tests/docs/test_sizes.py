"""Pages that grow stay short: the map of the design, which has every room, its pages, and the changelog."""

from __future__ import annotations

import re

import pytest

import rooftile
from tests.docs.pages import ROOT
from tests.unit.test_floors import FLOORS

MAP = ROOT / "DESIGN.md"
PAGES = sorted((ROOT / "docs" / "design").glob("*.md"))
# bytes that are read in one sitting
MOST_OF_THE_MAP, MOST_OF_A_PAGE = 8 * 1024, 6 * 1024
ROW = re.compile(r"^\| (\d+) \| (?:\[)?`(\w+)`", re.MULTILINE)


def test_the_map_fits_on_two_screens():
    assert len(MAP.read_bytes()) <= MOST_OF_THE_MAP


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_a_page_of_the_design_is_short(page):
    assert len(page.read_bytes()) <= MOST_OF_A_PAGE


def test_the_map_has_every_room_on_its_floor():
    rooms = {room: int(floor) for floor, room in ROW.findall(MAP.read_text(encoding="utf-8"))}
    assert rooms == {room: floor for room, floor in FLOORS.items() if room != "__main__"}


def test_the_map_leads_to_every_page():
    linked = set(re.findall(r"\]\(docs/design/([\w-]+\.md)", MAP.read_text(encoding="utf-8")))
    assert linked == {page.name for page in PAGES}


# lines of a version that a reader takes in
MOST_CHANGES = 66


def test_the_changelog_of_a_version_is_short():
    _, *versions = re.split(r"^## ", (ROOT / "CHANGELOG.md").read_text(encoding="utf-8"), flags=re.MULTILINE)
    counts = {version.split()[0]: len(re.findall(r"^- ", version, re.MULTILINE)) for version in versions}
    assert rooftile.__version__ in counts
    assert {version: count for version, count in counts.items() if not 0 < count <= MOST_CHANGES} == {}
