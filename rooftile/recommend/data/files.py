"""Reads users' ratings and reviews from a folder or a file, as MovieLens and Amazon give them.

A file's form follows from its first line: fields between `::` (`ratings.dat`) or tabs (`u.data`), a table with a head
(`userId,movieId,rating,timestamp`), or lines of JSON. A table without a head names its columns by `columns=`, since Amazon
has had users first in one year and items first in another.
"""

from __future__ import annotations

import csv
import gzip
import json
import math
import os
import zlib
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain
from pathlib import Path
from typing import IO, Any

import torch

from rooftile.errors import InvalidInput
from rooftile.recommend.data.events import Events, packed
from rooftile.runtime.arguments import check_number, shown

# the names of a field in the files that there are
USERS = ("user", "userid", "user_id", "reviewerid")
ITEMS = ("item", "movieid", "item_id", "parent_asin", "asin")
TIMES = ("timestamp", "time", "unixreviewtime")
RATINGS = ("rating", "overall")
FILES = ("ratings.dat", "ratings.csv", "u.data")
# a moment in milliseconds is above it, one in seconds below
MOST_SECONDS = 1 << 34


def read_events(
    path: str | os.PathLike[str], *, columns: Sequence[str] | None = None, least_rating: float | None = None
) -> Events:
    """Reads the events of a file, or of a folder with ratings.dat, ratings.csv or u.data.

    Args:
        path: the folder or file; `.gz` is unpacked.
        columns: the names of a table's columns that has no head, among them user, item and timestamp, such as
            ("item", "user", "rating", "timestamp"). Not for lines of JSON, which name their fields.
        least_rating: events with a lower rating are left out; None keeps all, and is due where events have no ratings.

    Returns:
        The events, sorted by user and time. Times in milliseconds, microseconds or nanoseconds become seconds.

    Raises:
        InvalidInput: there is no such file, its columns are not known, or a line cannot be read; names the line.

    Example:
        >>> read_events("ml-1m").item_count
        3706
    """
    if not isinstance(path, (str, os.PathLike)):
        raise InvalidInput(f"path is {shown(path)}; must be a file or a folder")
    if least_rating is not None:
        check_number("least_rating", least_rating)
    _check_columns(columns)
    file = _file_of(Path(path))
    users: dict[str, int] = {}
    items: dict[str, int] = {}
    rows: list[tuple[int, int, int]] = []
    for line, fields in enumerate(_readable(_fields(file, columns), file), 1):
        try:
            user, item, moment, rating = (_one(fields, names) for names in (USERS, ITEMS, TIMES, RATINGS))
            if least_rating is not None and rating is None:
                raise ValueError(f"it has no rating, and least_rating is {least_rating}; leave least_rating out")
            if least_rating is not None and math.isnan(float(rating)):
                raise ValueError("its rating is NaN")
            if least_rating is not None and float(rating) < least_rating:
                continue
            if user is None or item is None or moment is None:
                raise ValueError("it has no user, item or timestamp")
            seconds = int(float(moment))
            if abs(seconds) >= 1 << 62:
                raise ValueError(f"its timestamp is {moment}")
        except (TypeError, ValueError, OverflowError) as error:
            raise InvalidInput(f"{file}: event {line} cannot be read: {error}") from None
        while seconds >= MOST_SECONDS:
            seconds //= 1000
        rows.append((users.setdefault(str(user), len(users)), items.setdefault(str(item), len(items)), seconds))
    table = torch.tensor(rows, dtype=torch.int64).view(-1, 3)
    return packed(*table.unbind(1))


def _file_of(path: Path) -> Path:
    if path.is_file():
        return path
    found = [path / name for name in FILES if (path / name).is_file()]
    if not found:
        what = f"a folder without {', '.join(FILES)}; name its file" if path.is_dir() else "not there"
        raise InvalidInput(f"{path} is {what}")
    return found[0]


def _check_columns(columns: Any) -> None:
    if columns is None:
        return
    if isinstance(columns, str) or not isinstance(columns, Sequence) or not all(isinstance(name, str) for name in columns):
        raise InvalidInput(f"columns is {shown(columns)}; must be names such as ('user', 'item', 'rating', 'timestamp')")
    if len({name.lower() for name in columns}) < len(columns):
        raise InvalidInput(f"columns is {shown(columns)}; must name each column once")


def _readable(fields: Iterator[dict[str, Any]], file: Path) -> Iterator[dict[str, Any]]:
    """Yields fields, and says which file is damaged or of another kind."""
    try:
        yield from fields
    except (UnicodeDecodeError, csv.Error, OSError, EOFError, zlib.error) as error:
        raise InvalidInput(
            f"{file} cannot be read: {error}; must be text in UTF-8, packed by gzip if its name ends in .gz"
        ) from None


def _fields(file: Path, columns: Sequence[str] | None) -> Iterator[dict[str, Any]]:
    """Yields the fields of each event by their names in small letters."""
    with _opened(file) as lines:
        first = next(lines, "")
        rest = chain([first], lines) if first else lines
        if first.lstrip().startswith("{"):
            if columns is not None:
                raise InvalidInput(f"columns came, and {file} has lines of JSON, which name their fields; leave columns out")
            yield from _objects(rest, file)
            return
        separator = "::" if "::" in first else "\t" if "\t" in first else ","
        cells = (line.rstrip("\n").split("::") for line in rest) if separator == "::" else csv.reader(rest, delimiter=separator)
        yield from _named(cells, file, columns, separator)


def _opened(file: Path) -> IO[str]:
    # spreadsheets write a byte order mark, which would be a part of the first user's name
    return gzip.open(file, "rt", encoding="utf-8-sig") if file.suffix == ".gz" else file.open(encoding="utf-8-sig")


def _objects(lines: Iterable[str], file: Path) -> Iterator[dict[str, Any]]:
    for n, line in enumerate((line for line in lines if line.strip()), 1):
        try:
            fields = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise InvalidInput(f"{file}: event {n} cannot be read: {error}") from None
        if not isinstance(fields, dict):
            raise InvalidInput(f"{file}: event {n} is {line.strip()[:60]!r}; must be an object of JSON")
        yield {str(name).lower(): value for name, value in fields.items()}


def _named(
    cells: Iterator[list[str]], file: Path, columns: Sequence[str] | None, separator: str
) -> Iterator[dict[str, Any]]:  # fmt: skip
    names = None if columns is None else [name.lower() for name in columns]
    for n, row in enumerate(row for row in cells if any(cell.strip() for cell in row)):
        if n == 0 and names is None:
            head = [cell.strip().lower() for cell in row]
            if any(name in USERS for name in head):
                names = head
                continue
            if separator == ",":
                raise InvalidInput(
                    f"{file} begins with {','.join(row)[:60]!r}, which is no head; name the columns, as in "
                    "columns=('user', 'item', 'rating', 'timestamp')"
                )
            # MovieLens has these in all files without a head
            names = ["user", "item", "rating", "timestamp"]
        assert names is not None
        if len(row) != len(names):
            raise InvalidInput(f"{file}: event {n + 1} has {len(row)} fields; the columns are {', '.join(names)}")
        yield dict(zip(names, row, strict=True))


def _one(fields: dict[str, Any], names: Sequence[str]) -> Any:
    return next((fields[name] for name in names if fields.get(name) not in (None, "")), None)
