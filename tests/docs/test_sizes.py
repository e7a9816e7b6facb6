"""The map of the design stays a map: it is short, has every room on its floor, and leads to every page of docs/design."""

from __future__ import annotations

import re

import pytest

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
