"""Spoken words by speaker, as log-mel features: AudioMNIST (Becker et al., 2018; 60 speakers, 10 digits)
and Arabic speech commands (Ghandoura et al., 2021; 30 speakers, 40 words).

An npz file with x (M, 32, 32) uint8, y (M,), speaker (M,) and, for commands, words (classes,)."""

import os

from gluefl.errors import DataError
from gluefl.populations import files
from gluefl.populations.grouped import Grouped, Selection, grouped, source

HOW = (
    "docs/data.md, 'Spoken words', makes the npz file from a folder of WAV files "
    "(github.com/soerenab/AudioMNIST or github.com/abdulkaderghandoura/arabic-speech-commands-dataset)"
)
DIGITS = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")


def spoken_digits(
    path: str | os.PathLike[str] | None = None,
    *,
    clients: int | None = None,
    seed: int = 0,
    min_samples: int = 22,
    held_out: str = "samples",
    test_fraction: float = 0.1,
) -> Grouped:
    """`spoken_digits("audiomnist_logmel32.npz")`: ten digits by 60 speakers."""
    return _load("spoken_digits", path, DIGITS, clients, seed, min_samples, held_out, test_fraction)


def commands(
    path: str | os.PathLike[str] | None = None,
    *,
    clients: int | None = None,
    seed: int = 0,
    min_samples: int = 22,
    held_out: str = "samples",
    test_fraction: float = 0.1,
) -> Grouped:
    """`commands("arabic_commands_logmel32.npz")`: 40 words by 30 speakers."""
    return _load("commands", path, None, clients, seed, min_samples, held_out, test_fraction)


def _load(
    population: str,
    path: str | os.PathLike[str] | None,
    words: tuple[str, ...] | None,
    clients: int | None,
    seed: int,
    min_samples: int,
    held_out: str,
    test_fraction: float,
) -> Grouped:
    file = files.find(path, population, HOW)
    names = ("x", "y", "speaker") if words else ("x", "y", "speaker", "words")
    data = files.read_npz(file, names)
    for name in names[1:]:
        if data[name].ndim != 1:
            raise DataError(f"{file}: {name} has the shape {data[name].shape}; needed: one dimension")
    words = words or tuple(data["words"].tolist())
    if data["x"].ndim != 3 or not len(data["x"]) == len(data["y"]) == len(data["speaker"]):
        raise DataError(f"{file}: x, y and speaker do not fit together, or x is not (samples, mel, frames)")
    return grouped(
        source(data["x"], data["y"], data["speaker"]),
        file,
        Selection(
            clients=clients,
            seed=seed,
            min_samples=min_samples,
            held_out=held_out,
            test_fraction=test_fraction,
        ),
        classes=len(words),
        label_names=words,
    )
