"""The task `picture-sums`: numbers written below each other in a picture are added.

    picture                    completion of the built-in model
    ┌──────────┐
    │   1 7    │               17+50=67+8=75
    │      5 8 │               75+30=105+4=109
    │  3 4     │               #109
    └──────────┘

It is `arithmetic` whose numbers have to be read first. The picture has a grid of cells, a digit in
a cell. A number stands anywhere in its row, its digits anywhere in their cells, and each picture
has colors of its own.
"""

import io
import random
from collections.abc import Sequence
from typing import Any

import numpy as np

from easyrl.data.tasks import Arithmetic
from easyrl.formatting import require

DIGITS = (
    ".###. #...# #..## #.#.# ##..# #...# .###.",
    "..#.. .##.. ..#.. ..#.. ..#.. ..#.. .###.",
    ".###. #...# ....# ..##. .#... #.... #####",
    "####. ....# ....# .###. ....# ....# ####.",
    "...#. ..##. .#.#. #..#. ##### ...#. ...#.",
    "##### #.... ####. ....# ....# #...# .###.",
    "..##. .#... #.... ####. #...# #...# .###.",
    "##### ....# ...#. ..#.. .#... .#... .#...",
    ".###. #...# #...# .###. #...# #...# .###.",
    ".###. #...# #...# .#### ....# ...#. .##..",
)
"""The digits from 0 to 9, each as seven rows of five pixels."""
GLYPH_HEIGHT = 7
GLYPH_WIDTH = 5
CELL = 8  # pixels of a side
NUM_CELLS = 5  # of a row and of a column
SIZE = CELL * NUM_CELLS
"""Pixels of a side of the picture."""
QUESTION = "Sum?"
LIGHT = range(170, 256)  # a color of the paper
DARK = range(91)  # a color of the ink


class PictureSums(Arithmetic):
    """Problems are tuples of the numbers to add, two to four of two digits."""

    seed_prefix = "picture sums "
    num_held_out = 256

    def draw(self, rng: random.Random) -> tuple[int, ...]:
        count = rng.randint(2, 4)
        return tuple(rng.randint(10, 99) for _ in range(count))

    def row(self, problem: Sequence[int]) -> dict[str, Any]:
        # The same problem always has the same picture.
        rng = random.Random(self.seed_prefix + self.key(problem))
        return {
            "prompt": QUESTION,
            "image": {"bytes": png_file(draw_numbers(problem, rng))},
            "answer": str(sum(problem)),
        }


def draw_numbers(numbers: Sequence[int], rng: random.Random) -> np.ndarray:
    """Return a picture of numbers below each other, [SIZE, SIZE, 3] uint8 (RGB).

    Numbers have at most NUM_CELLS digits, and there are at most NUM_CELLS of them."""
    paper = [rng.choice(LIGHT) for _ in range(3)]
    ink = [rng.choice(DARK) for _ in range(3)]
    pixels = np.empty((SIZE, SIZE, 3), dtype=np.uint8)
    pixels[:] = paper
    first_row = rng.randint(0, NUM_CELLS - len(numbers))
    for row, number in enumerate(numbers, first_row):
        digits = [int(digit) for digit in str(number)]
        first_column = rng.randint(0, NUM_CELLS - len(digits))
        for column, digit in enumerate(digits, first_column):
            # A glyph is smaller than its cell.
            down = rng.randint(0, CELL - GLYPH_HEIGHT)
            right = rng.randint(0, CELL - GLYPH_WIDTH)
            top = CELL * row + down
            left = CELL * column + right
            place = pixels[top : top + GLYPH_HEIGHT, left : left + GLYPH_WIDTH]
            place[_glyph(digit)] = ink
    return pixels


def _glyph(digit: int) -> np.ndarray:
    """Return where a digit has ink, [GLYPH_HEIGHT, GLYPH_WIDTH] bool."""
    rows = DIGITS[digit].split()
    return np.array([[pixel == "#" for pixel in row] for row in rows])


def png_file(pixels: np.ndarray) -> bytes:
    """Return the PNG file of a picture [height, width, 3] uint8. Raises ConfigError without
    Pillow."""
    require("vision", "picture-sums")
    from PIL import Image

    file = io.BytesIO()
    Image.fromarray(pixels).save(file, format="PNG")
    return file.getvalue()


PICTURE_SUMS = PictureSums()
