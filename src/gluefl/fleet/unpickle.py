"""Pickles of numbers from untrusted files.

A pickle is a program. This interpreter supports only the instructions that build dict, list, str, int and float, so
that a file can neither name nor call a function."""

import io
import pickle
from pathlib import Path
from typing import Any, NoReturn

from gluefl.errors import DataError

MAX_BYTES = 256 << 20

_INSTRUCTIONS = (
    pickle.PROTO + pickle.FRAME + pickle.STOP + pickle.MARK
    + pickle.EMPTY_DICT + pickle.DICT + pickle.SETITEM + pickle.SETITEMS
    + pickle.EMPTY_LIST + pickle.LIST + pickle.APPEND + pickle.APPENDS
    + pickle.STRING + pickle.BINSTRING + pickle.SHORT_BINSTRING
    + pickle.UNICODE + pickle.BINUNICODE + pickle.SHORT_BINUNICODE + pickle.BINUNICODE8
    + pickle.INT + pickle.BININT + pickle.BININT1 + pickle.BININT2 + pickle.LONG + pickle.LONG1 + pickle.LONG4
    + pickle.FLOAT + pickle.BINFLOAT
    + pickle.PUT + pickle.BINPUT + pickle.LONG_BINPUT + pickle.GET + pickle.BINGET + pickle.LONG_BINGET
    + pickle.MEMOIZE
)  # fmt: skip
_CALLS = (
    pickle.GLOBAL + pickle.STACK_GLOBAL + pickle.INST + pickle.OBJ + pickle.NEWOBJ + pickle.NEWOBJ_EX
    + pickle.REDUCE + pickle.BUILD + pickle.EXT1 + pickle.EXT2 + pickle.EXT4
    + pickle.PERSID + pickle.BINPERSID
)  # fmt: skip


class _Numbers(pickle._Unpickler):
    # The interpreter written in Python, because its table of instructions can be restricted (and because the one in C
    # allocates as much memory as the file requests).
    dispatch = {code: pickle._Unpickler.dispatch[code] for code in _INSTRUCTIONS}  # noqa: RUF012

    def find_class(self, module: str, name: str) -> NoReturn:
        # Not reachable, because no supported instruction calls it: a second line of defence.
        raise KeyError(pickle.GLOBAL[0])


def fail(path: str, problem: str, needed: str, do: str) -> NoReturn:
    """Raise an error that says what is wrong with a file."""
    raise DataError(f"{path}: found {problem}; needed {needed}. {do}")


def read_bytes(path: str) -> bytes:
    """The content of a trace file, if it is not too large."""
    try:
        with Path(path).open("rb") as file:
            data = file.read(MAX_BYTES + 1)
    except OSError as error:
        fail(path, error.strerror or str(error), "a trace file", "Give the path of a .csv or pickle file.")
    if len(data) > MAX_BYTES:
        fail(path, f"more than {MAX_BYTES >> 20} MB", "a smaller trace", "Keep only the clients you simulate.")
    return data


def load_numbers(path: str) -> dict[object, object]:
    """The dict in a pickle of plain numbers and text: `load_numbers("client_device_capacity")`."""
    needed = "a pickled dict of client -> dict, made of dict, list, str, int and float only"
    again = "Save it again from plain Python values, or as CSV."
    data = read_bytes(path)
    try:
        value: Any = _Numbers(io.BytesIO(data)).load()
    except KeyError as error:
        code = error.args[0] if isinstance(error.args[0], int) else -1
        if code in _CALLS:
            fail(path, "a pickle that names or calls a class or function (it was not executed)", needed, again)
        if code in pickle._Unpickler.dispatch:
            fail(path, f"a pickle of other values (instruction {code:#04x})", needed, again)
        fail(path, "a file that is no pickle, or a broken one", needed, again)
    except Exception as error:  # a broken pickle can fail in any way
        problem = f"a truncated or broken pickle ({type(error).__name__}: {str(error)[:80]})"
        fail(path, problem, needed, "Copy or download it again.")
    if not isinstance(value, dict) or not value:
        fail(path, "an empty dict" if value == {} else f"a {type(value).__name__}", needed, again)
    return value
