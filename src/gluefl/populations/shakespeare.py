"""The next character by role: who speaks is the client (LEAF's task, on the text of karpathy/char-rnn).

Reads a CSV (or csv.gz) with the columns role and text, or the plain play, where a speech is the line "ROLE:"
and the lines up to a blank one."""

import csv
import gzip
import io
import os
import zlib
from pathlib import Path

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view

from gluefl.errors import DataError, UsageError
from gluefl.populations import files
from gluefl.populations.grouped import Grouped, enough, first

HOW = "curl -O https://raw.githubusercontent.com/karpathy/char-rnn/master/data/tinyshakespeare/input.txt"
PAUSE = "\n\n"  # between two speeches of a role


def load(
    path: str | os.PathLike[str] | None = None,
    *,
    clients: int | None = None,
    seed: int = 0,
    min_characters: int = 1000,
    window: int = 80,
    stride: int = 8,
    test_fraction: float = 0.1,
) -> Grouped:
    """`load("input.txt")`: a sample is `window` characters and the one that follows, one every `stride`.

    The test set is the last `test_fraction` of every role's words: windows overlap, so a random share would
    be known by heart. Nothing is drawn: `seed` changes nothing.
    """
    file = files.find(path, "shakespeare", HOW)
    roles = _read(file)
    if min(window, stride) < 1 or not 0 < test_fraction < 1:
        raise UsageError("window and stride must be 1 or more, and test_fraction between 0 and 1")
    if round(min_characters * (1 - test_fraction)) <= window:
        raise UsageError(f"roles of {min_characters} characters are too short for windows of {window}")
    names, texts = list(roles), list(roles.values())
    lengths = np.array([len(text) for text in texts])
    spoken = np.array([len(text.replace(PAUSE, "")) for text in texts])  # pauses are our own
    kept = first(enough(spoken, min_characters), clients, f"{file} of at least {min_characters} characters")
    # The alphabet is that of the whole file: it must not depend on the number of clients.
    codes = np.frombuffer("".join(texts).encode("utf-32-le"), np.uint32)
    alphabet, tokens = np.unique(codes, return_inverse=True)
    tokens = tokens.astype(np.uint8 if len(alphabet) <= 256 else np.int32)
    train, test, begins = [], [], np.cumsum(lengths) - lengths
    for role in kept:
        begin, end = begins[role], begins[role] + lengths[role]
        cut = begin + round(lengths[role] * (1 - test_fraction))
        train.append(np.arange(begin, cut - window, stride))
        test.append(np.arange(cut - window, end - window, stride))  # predicts from the cut on
    test_rows = np.concatenate(test)
    if not len(test_rows):
        raise DataError(f"{file}: nothing is left for a test set; raise test_fraction above {test_fraction}")
    return Grouped(
        inputs=sliding_window_view(tokens, window)[:-1],  # a view: no copy of the text per window
        labels=tokens[window:],
        rows=np.concatenate(train),
        offsets=np.concatenate([[0], np.cumsum([len(rows) for rows in train])]).astype(np.int64),
        test_rows=test_rows,
        classes=len(alphabet),
        shape=(window,),
        names=tuple(names[role] for role in kept),
        label_names=tuple(map(chr, alphabet)),
    )


def _read(file: Path) -> dict[str, str]:
    """Role to all its words, in the order of the file."""
    roles: dict[str, list[str]] = {}
    try:
        raw = file.read_bytes()
        text = (gzip.decompress(raw) if file.suffix == ".gz" else raw).decode()
    except (OSError, EOFError, UnicodeDecodeError, zlib.error) as error:
        raise DataError(f"{file}: not a readable text ({error})") from error
    if ".csv" in file.suffixes:
        speeches = _csv_rows(text, file)
    else:
        blocks = (block.partition(":\n") for block in text.split(PAUSE))
        speeches = [(role.strip(), words) for role, colon, words in blocks if colon]
    for role, words in speeches:
        roles.setdefault(role, []).append(words)
    if not roles:
        raise DataError(f"{file}: no role speaks in it")
    return {role: PAUSE.join(words) for role, words in roles.items()}


def _csv_rows(text: str, file: Path) -> list[tuple[str, str]]:
    limit = csv.field_size_limit(max(len(text), 131_072))  # a role's text is one long field
    try:
        reader = csv.DictReader(io.StringIO(text, newline=""), strict=True)
        if not {"role", "text"} <= set(reader.fieldnames or ()):
            raise DataError(f"{file}: has the columns {reader.fieldnames}, but role and text are needed")
        return [(row["role"], row["text"] or "") for row in reader]
    except csv.Error as error:
        raise DataError(f"{file}: not a readable CSV ({error})") from error
    finally:
        csv.field_size_limit(limit)
