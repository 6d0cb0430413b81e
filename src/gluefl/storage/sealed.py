"""JSON objects with a checksum: the last key, `crc`, is the CRC-32 of the text of the object without it."""

import json
import re
import zlib
from collections.abc import Mapping
from typing import Any

KEY = "crc"
_END = re.compile(rb', "crc": "([0-9a-f]{8})"}\Z')
_END_BYTES = len(b', "crc": "00000000"}')


def seal(fields: Mapping[str, Any], allow_nan: bool = False) -> bytes:
    """An object that is not empty as one line, with its checksum."""
    text = json.dumps(fields, allow_nan=allow_nan).encode()
    return text[:-1] + f', "{KEY}": "{zlib.crc32(text):08x}"}}\n'.encode()


def unseal(line: bytes) -> tuple[dict[str, Any], bool]:
    """The object of a line without its checksum, and whether it had one; `ValueError` if it is damaged."""
    if not line.endswith(b"\n"):
        raise ValueError("its end is missing")
    text = line[:-1]
    end = _END.search(text[-_END_BYTES:])
    if end is not None:
        text = text[:-_END_BYTES] + b"}"
        if zlib.crc32(text) != int(end[1], 16):
            raise ValueError("its checksum differs")
    try:
        fields = json.loads(text)
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error
    if not isinstance(fields, dict):
        raise ValueError("it is no object")
    return fields, end is not None
