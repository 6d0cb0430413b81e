"""The clients of journal lines as columns in a file beside the journal, of one to eight bytes a number.

A line then holds, in place of its clients, where their block begins, its columns and its CRC-32. The block is written
before its line: a line whose block is missing or damaged is a damaged line.
"""

import os
import zlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

import numpy as np

SUFFIX = ".bin"  # in place of that of the journal
MISREAD = (KeyError, TypeError, AttributeError, OverflowError, IndexError)


def path_of(journal: Path) -> Path:
    """The file beside a journal."""
    return journal.with_suffix(SUFFIX)


def append(journal: Path, at: int, table: Mapping[str, list[Any]]) -> dict[str, Any]:
    """Write the block of a line behind those of the lines before it, which end `at`; returns what the line holds."""
    columns, parts = dict[str, Any](), list[bytes]()
    for name, values in table.items():
        texts = list(dict.fromkeys(value for value in values if isinstance(value, str)))
        stored = [0 if value is None else 1 + (texts.index(value) if texts else value) for value in values]
        kind = np.dtype(f"<u{_width(max(stored, default=0))}")
        columns[name] = texts or kind.itemsize
        parts.append(np.array(stored, kind).tobytes())
    block = b"".join(parts)
    path = path_of(journal)
    with open(path, "r+b" if path.exists() else "wb") as file:
        file.seek(at)
        file.write(block)
        file.truncate()  # a killed process may have left a block without a line
    count = len(next(iter(table.values()), ()))
    return {"at": at, "count": count, "columns": columns, "crc": f"{zlib.crc32(block):08x}"}


def cut(journal: Path, end: int) -> None:
    """Keep the blocks that end here."""
    path = path_of(journal)
    if path.exists():
        os.truncate(path, end)


def place_in(line: Mapping[str, Any]) -> dict[str, Any] | None:
    """What a line holds in place of its clients, None if they are in the line or nowhere."""
    clients = line.get("clients")
    return clients if isinstance(clients, dict) and "at" in clients else None


def end_of(line: Mapping[str, Any]) -> int:
    """Where the block of a line ends, 0 if it has none; `ValueError` if it cannot be understood."""
    place = place_in(line)
    if place is None:
        return 0
    try:
        return int(place["at"] + place["count"] * sum(map(_bytes_each, place["columns"].values())))
    except MISREAD as error:
        raise ValueError(f"the place of its clients cannot be read ({error})") from error


@contextmanager
def reading(journal: Path) -> Iterator[IO[bytes] | None]:
    """The file beside a journal, None if there is none."""
    path = path_of(journal)
    if not path.exists():
        yield None
        return
    with open(path, "rb") as file:
        yield file


def resolved(line: dict[str, Any], file: IO[bytes] | None) -> dict[str, Any]:
    """A line with its clients, as lists; `ValueError` if its block is missing or damaged."""
    place, end = place_in(line), end_of(line)
    if place is None:
        return line
    if file is None or not 0 <= place["at"] <= end <= os.fstat(file.fileno()).st_size:
        raise ValueError("its clients are missing")
    try:
        file.seek(place["at"])
        block = file.read(end - place["at"])
        if zlib.crc32(block) != int(place["crc"], 16):
            raise ValueError("the checksum of its clients differs")
        return line | {"clients": _unpacked(place, block)}
    except MISREAD as error:
        raise ValueError(f"its clients cannot be read ({error})") from error


def _unpacked(place: Mapping[str, Any], block: bytes) -> dict[str, list[Any]]:
    table, begin = dict[str, list[Any]](), 0
    for name, kind in place["columns"].items():
        width = _bytes_each(kind)
        stored = np.frombuffer(block, f"<u{width}", place["count"], begin).tolist()
        values = [None if number == 0 else number - 1 for number in stored]
        table[name] = values if isinstance(kind, int) else [None if at is None else kind[at] for at in values]
        begin += width * place["count"]
    return table


def _bytes_each(kind: int | list[str]) -> int:
    """Of a column of numbers, which says so, or of texts, which lists them. Zero is none, one the first of them."""
    return kind if isinstance(kind, int) else _width(len(kind))


def _width(most: int) -> int:
    return int(np.min_scalar_type(most).itemsize)
