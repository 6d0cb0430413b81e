"""Google Speech Commands v2 (Warden, 2018): 35 words by speaker, as 32×32 log-mel features.

Reads the unpacked archive: WORD/SPEAKER_nohash_NUMBER.wav (16 kHz, mono, 16 bit) and testing_list.txt, whose
clips are the test set. Clips of validation_list.txt are training data: nothing here is tuned on them."""

import math
import os
import re
import wave
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from gluefl.errors import DataError
from gluefl.populations import files
from gluefl.populations.grouped import Grouped, Selection, Source, cached_source, grouped, source

HOW = (
    "curl -O http://download.tensorflow.org/data/speech_commands_v0.02.tar.gz && mkdir speech && "
    "tar xzf speech_commands_v0.02.tar.gz -C speech, and path = that folder"
)
# fmt: off
WORDS = (
    "backward", "bed", "bird", "cat", "dog", "down", "eight", "five", "follow", "forward", "four", "go",
    "happy", "house", "learn", "left", "marvin", "nine", "no", "off", "on", "one", "right", "seven", "sheila",
    "six", "stop", "three", "tree", "two", "up", "visual", "wow", "yes", "zero",
)
# fmt: on
RATE = 16_000
WINDOW, HOP, MELS = 1024, 512, 32  # one second gives 1 + 16000 // 512 = 32 frames
FLOOR_DB = -80.0
CLIP_NAME = re.compile(r"([0-9a-f]+)_nohash_\d+\.wav")


def load(
    path: str | os.PathLike[str] | None = None,
    *,
    clients: int | None = None,
    seed: int = 0,
    min_samples: int = 22,
    held_out: str = "official",
    test_fraction: float = 0.1,
    skip_broken: bool = False,
    progress: files.Progress | None = None,
) -> Grouped:
    """`load("speech", held_out="samples")`: every speaker is a client; by default those tested on are not."""
    root = files.find(path, "speech", HOW)
    data = cached_source(
        "speech",
        [root],
        {"skip_broken": skip_broken},
        lambda: _read(root, files.Broken(skip_broken), progress),
    )
    return grouped(
        data,
        root,
        Selection(
            clients=clients,
            seed=seed,
            min_samples=min_samples,
            held_out=held_out,
            test_fraction=test_fraction,
        ),
        classes=len(WORDS),
        label_names=WORDS,
    )


def logmel(waves: Tensor) -> NDArray[np.uint8]:
    """Clips (M, 16000) to log-mel images (M, 32, 32): 255 is the clip's peak, 0 is 80 dB or more below."""
    spectrum = torch.stft(waves, WINDOW, HOP, window=torch.hann_window(WINDOW), return_complex=True)
    power = _mel_filters() @ spectrum.abs().square()
    peak = power.amax(dim=(1, 2), keepdim=True)
    decibel = 10 * torch.log10((power / peak.clamp_min(1e-30)).clamp_min(1e-30))
    levels = (1 - decibel.clamp_min(FLOOR_DB) / FLOOR_DB) * 255
    return levels.round().to(torch.uint8).numpy()


def read_wave(path: Path) -> NDArray[np.float32]:
    """One second of a clip, centred: padded with silence or cut. ValueError says what is wrong with it."""
    try:
        with wave.open(str(path), "rb") as clip:
            rate, width, tracks = clip.getframerate(), clip.getsampwidth(), clip.getnchannels()
            if (rate, width, tracks) != (RATE, 2, 1):
                raise ValueError(f"is {rate} Hz, {8 * width} bit, {tracks} channel(s), not 16000 Hz, 16 bit, 1")
            samples = np.frombuffer(clip.readframes(clip.getnframes()), "<i2")
    except (OSError, EOFError, wave.Error) as error:
        raise ValueError(f"is not a readable WAV file ({error})") from error
    if not len(samples):
        raise ValueError("holds no sound")
    surplus = len(samples) - RATE
    if surplus > 0:
        samples = samples[surplus // 2 : surplus // 2 + RATE]
    else:
        samples = np.pad(samples, (-surplus // 2, -surplus - -surplus // 2))
    return samples.astype(np.float32) / np.float32(32768)


def _read(root: Path, broken: files.Broken, progress: files.Progress | None) -> Source:
    listed = files.need(root / "testing_list.txt", "speech", HOW)
    try:
        official = set(listed.read_text(encoding="utf-8").split())
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"{listed}: not a readable text ({error}). To get it: {HOW}") from error
    clips = _clips(root, broken)
    if not clips:
        raise DataError(f"{root}: holds no WORD/SPEAKER_nohash_NUMBER.wav. To get them: {HOW}")
    features, kept = [], []
    for begin in range(0, len(clips), 256):
        waves = []
        for clip in clips[begin : begin + 256]:
            try:
                waves.append(read_wave(root / clip[1] / clip[2]))
                kept.append(clip)
            except ValueError as error:
                broken.report(root / clip[1] / clip[2], error)
        if waves:
            features.append(logmel(torch.from_numpy(np.stack(waves))))
        if progress:
            progress(min(begin + 256, len(clips)), len(clips))
    if not kept:
        raise DataError(f"{root}: no clip could be read ({broken.count} broken)")
    return source(
        np.concatenate(features),
        np.array([WORDS.index(word) for _, word, _ in kept]),
        np.array([speaker for speaker, _, _ in kept]),
        np.array([f"{word}/{name}" in official for _, word, name in kept]),
        broken.count,
    )


def _clips(root: Path, broken: files.Broken) -> Sequence[tuple[str, str, str]]:
    """Speaker, word and file name of every clip, speaker by speaker."""
    clips = []
    for folder in sorted(entry for entry in root.iterdir() if entry.is_dir() and entry.name[0] not in "_."):
        names = [name for name in os.listdir(folder) if name.endswith(".wav")]
        if folder.name not in WORDS:
            broken.report(folder, "is not one of the 35 words of version 2")
            continue
        for name in names:
            if match := CLIP_NAME.fullmatch(name):
                clips.append((match[1], folder.name, name))
            else:
                broken.report(folder / name, "is not named SPEAKER_nohash_NUMBER.wav")
    return sorted(clips)


def _mel_filters() -> Tensor:
    """Triangles, evenly spaced in mel from 0 to 8 kHz, of equal area: (32, 513)."""
    highest = 2595 * math.log10(1 + RATE / 2 / 700)
    edges = 700 * (torch.pow(10.0, torch.linspace(0, highest, MELS + 2) / 2595) - 1)
    bins = torch.linspace(0, RATE / 2, WINDOW // 2 + 1)
    low, middle, high = edges[:-2, None], edges[1:-1, None], edges[2:, None]
    triangles = torch.minimum((bins - low) / (middle - low), (high - bins) / (high - middle)).clamp_min(0)
    return triangles * 2 / (high - low)
