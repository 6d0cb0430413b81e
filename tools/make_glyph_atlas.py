"""Draws the glyph atlas of the default population: python tools/make_glyph_atlas.py [--sheet sheet.png]

A pen has one width, a printed letter has not. So the atlas holds no letters but their centre lines: each
character is drawn large, thinned to its skeleton, and stored as the distance of every pixel to that skeleton.
A pen of any width is then a threshold, and the picture stays smooth under every distortion.

The fonts come with matplotlib, and no font file is shipped with gluefl. Their licences allow such use:
  DejaVu             Bitstream Vera licence, changes in the public domain
  STIX               SIL Open Font License 1.1
  Computer Modern    BaKoMa Fonts Licence (TrueType version by Basil K. Malyshev): use without notice
"""

import argparse
from pathlib import Path

import matplotlib
import numpy as np
from PIL import Image, ImageDraw, ImageFont

CHARACTERS = "0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz"
# DejaVu's bold fonts are left out, their skeletons repeat the regular ones; cmmi10, for old-style digits.
FONTS = {
    "DejaVuSans": "Bitstream Vera",
    "DejaVuSans-Oblique": "Bitstream Vera",
    "DejaVuSerif": "Bitstream Vera",
    "DejaVuSerif-Italic": "Bitstream Vera",
    "DejaVuSansMono": "Bitstream Vera",
    "STIXGeneral": "OFL-1.1",
    "STIXGeneralItalic": "OFL-1.1",
    "STIXGeneralBol": "OFL-1.1",
    "STIXGeneralBolIta": "OFL-1.1",
    "STIXGeneral/sans": "OFL-1.1",
    "STIXGeneral/mono": "OFL-1.1",
    "STIXGeneralBolIta/script": "OFL-1.1",
    "cmr10": "BaKoMa",
    "cmb10": "BaKoMa",
    "cmss10": "BaKoMa",
    "cmtt10": "BaKoMa",
    "cmti10": "BaKoMa",
}
# First letter and first digit of the mathematical alphabets of Unicode that STIX carries.
ALPHABETS = {"sans": (0x1D5A0, 0x1D7E2), "mono": (0x1D670, 0x1D7F6), "script": (0x1D4D0, ord("0"))}

SIDE = 48  # pixels of an atlas cell
FINE = 4  # drawn this many times larger before thinning
CAP = 26  # height of an H in atlas pixels
BASELINE = 36  # its foot, so that capitals are centred and a descender fits below
STEP = 1 / 32  # pixels per grey level: 255 is the skeleton, 0 is 8 pixels or more away


def letters(alphabet: str) -> str:
    """The 62 characters as one font variant spells them."""
    if not alphabet:
        return CHARACTERS
    letter, digit = ALPHABETS[alphabet]
    return "".join(chr(digit + i) for i in range(10)) + "".join(chr(letter + i) for i in range(52))


def draw(name: str) -> np.ndarray:
    """All characters of one font, large and black and white: (62, SIDE * FINE, SIDE * FINE) bool."""
    file, _, alphabet = name.partition("/")
    path = Path(matplotlib.get_data_path()) / "fonts" / "ttf" / f"{file}.ttf"
    spelled = letters(alphabet)
    known = matplotlib.ft2font.FT2Font(str(path)).get_charmap()
    missing = [c for c in spelled if ord(c) not in known]
    if missing:
        raise SystemExit(f"{name} has no {missing}")
    probe = ImageFont.truetype(str(path), 1000)
    _, top, _, foot = probe.getbbox("H", anchor="ls")
    font = ImageFont.truetype(str(path), round(1000 * CAP * FINE / (foot - top)))
    cells = []
    for character in spelled:
        left, _, right, _ = font.getbbox(character, anchor="ls")
        cell = Image.new("L", (SIDE * FINE, SIDE * FINE))
        ImageDraw.Draw(cell).text(
            (SIDE * FINE / 2 - (left + right) / 2, BASELINE * FINE),
            character,
            fill=255,
            font=font,
            anchor="ls",
        )
        cells.append(np.asarray(cell) > 127)
    return np.stack(cells)


def thin(ink: np.ndarray) -> np.ndarray:
    """The skeletons of many pictures at once (Zhang and Suen 1984)."""
    ink = np.pad(ink, ((0, 0), (1, 1), (1, 1)))
    while True:
        before = ink.sum()
        for first in (True, False):
            # The eight neighbours, clockwise from the north.
            around = [(-1, 0), (-1, 1), (0, 1), (1, 1), (1, 0), (1, -1), (0, -1), (-1, -1)]
            p = [np.roll(ink, (-dy, -dx), axis=(1, 2)) for dy, dx in around]
            count = sum(q.astype(np.int8) for q in p)
            rises = sum((~a & b).astype(np.int8) for a, b in zip(p, p[1:] + p[:1]))
            north, east, south, west = p[0], p[2], p[4], p[6]
            if first:
                open_side = ~(north & east & south) & ~(east & south & west)
            else:
                open_side = ~(north & east & west) & ~(north & south & west)
            # The dot of an i shrinks to 2 x 2 pixels, which the rule would delete whole: its first one stays.
            square = east & p[3] & south & (count == 3)
            for dy, dx in ((0, 1), (1, 1), (1, 0)):
                square &= np.roll(count, (-dy, -dx), axis=(1, 2)) == 3
            ink = ink & ~((count >= 2) & (count <= 6) & (rises == 1) & open_side & ~square)
        if ink.sum() == before:
            return ink[:, 1:-1, 1:-1]


def distance(skeleton: np.ndarray) -> np.ndarray:
    """How far each atlas pixel is from the skeleton, as grey levels (bright is near)."""
    points = (np.argwhere(skeleton) + 0.5) / FINE
    centres = np.stack(np.meshgrid(np.arange(SIDE) + 0.5, np.arange(SIDE) + 0.5, indexing="ij"), axis=-1)
    squared = ((centres.reshape(-1, 1, 2) - points) ** 2).sum(axis=2).min(axis=1)
    grey = 255 - np.sqrt(squared) / STEP
    return np.asarray(np.clip(np.rint(grey), 0, 255), np.uint8).reshape(SIDE, SIDE)


def sheet(atlas: np.ndarray) -> Image.Image:
    """A contact sheet: a row per font, drawn with a pen."""
    pen = np.clip((atlas.astype(float) - 255) * STEP + 2.2, 0, 1) * 255
    fonts, classes = pen.shape[:2]
    rows = pen.reshape(fonts, classes, SIDE, SIDE).transpose(0, 2, 1, 3).reshape(fonts * SIDE, classes * SIDE)
    return Image.fromarray(rows.astype(np.uint8))


def main() -> None:
    """Draw, thin, measure, write."""
    parser = argparse.ArgumentParser(description="Draw the glyph atlas.")
    default = Path(__file__).parents[1] / "src" / "gluefl" / "populations" / "glyphs_atlas.npz"
    parser.add_argument("--out", type=Path, default=default)
    parser.add_argument("--sheet", type=Path, help="also write a contact sheet to look at")
    arguments = parser.parse_args()
    atlas = np.stack([[distance(skeleton) for skeleton in thin(draw(name))] for name in FONTS])
    np.savez_compressed(
        arguments.out, glyphs=atlas, fonts=np.array(list(FONTS)), licences=np.array(list(FONTS.values()))
    )
    print(f"{arguments.out}: {atlas.shape}, {arguments.out.stat().st_size:,} bytes")
    if arguments.sheet:
        sheet(atlas).save(arguments.sheet)


if __name__ == "__main__":
    main()
