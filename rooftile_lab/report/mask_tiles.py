"""Pictures of masks as tiles."""

from __future__ import annotations

from collections.abc import Sequence

from rooftile.drawing.svg import svg
from rooftile_lab.report.tiles import TileMap, Visit


def mask_tiles(tile_map: TileMap, *, title: str, side: float = 160) -> str:
    """Draws the computed tiles of a mask: queries down, keys across."""
    return draw_tiles(tile_map.visits, tile_map.N, title=title, side=side)


def draw_tiles(visits: Sequence[Visit], N: int, *, title: str, side: float = 160) -> str:
    """Draws the computed tiles of N queries and keys: queries down, keys across."""
    scale = side / N
    paths: dict[bool, list[str]] = {False: [], True: []}
    hatch = []
    for t, t_stop, s, s_stop, is_masked in visits:
        x, y, width, height = (value * scale for value in (s, t, s_stop - s, t_stop - t))
        gap = min(0.8, width / 8, height / 8)
        paths[is_masked].append(f"M{x + gap / 2:.2f} {y + gap / 2:.2f}h{width - gap:.2f}v{height - gap:.2f}h{gap - width:.2f}z")
        if is_masked:
            # colour alone would not distinguish a masked tile from an unmasked one
            hatch.append(f"M{x + gap:.2f} {y + height - gap:.2f}L{x + width - gap:.2f} {y + gap:.2f}")
    parts = [
        f'<rect class="tile skipped" width="{side:g}" height="{side:g}"/>',
        f'<path class="tile full" d="{"".join(paths[False])}"/>',
        f'<path class="tile masked" d="{"".join(paths[True])}"/>',
        f'<path class="hatch" d="{"".join(hatch)}"/>',
    ]
    return svg(title, "tiles computed, masked and skipped", parts, width=side, height=side)
