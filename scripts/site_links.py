"""A hook of mkdocs: links from a page to a file outside docs/ lead to the repository."""

from __future__ import annotations

import posixpath
import re
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
LINK = re.compile(r"(\]\()((?:\.\./)+[^)#\s]+)")


def on_page_markdown(markdown: str, page: Any, config: Any, files: Any) -> str:
    """Called by mkdocs for each page, before it renders it."""

    def lead(found: re.Match[str]) -> str:
        path = posixpath.normpath(posixpath.join("docs", posixpath.dirname(page.file.src_uri), found[2]))
        # mkdocs itself checks the links that stay inside
        if path.startswith("docs/") or not (ROOT / path).exists():
            return found[0]
        return f"{found[1]}{config.repo_url}/blob/main/{path}"

    return LINK.sub(lead, markdown)
