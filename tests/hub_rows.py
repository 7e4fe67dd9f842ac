"""Rows as the data sets on the hub have them, made here: what presets are tried with."""

import io
from unittest.mock import Mock

from PIL import Image

from easyrl.data import datasets

GSM8K = [
    {
        "question": f"Ann has {number} apples and buys {number + 1} more. How many has she?",
        "answer": f"She has {number}+{number + 1}=<<{number}+{number + 1}={2 * number + 1}>>"
        f"{2 * number + 1} apples.\n#### {2 * number + 1}",
    }
    for number in range(1, 9)
]
MATH_500 = [
    {"problem": f"What is $\\frac{{{number}}}{{7}}$ of $14$?", "answer": str(2 * number)}
    for number in range(1, 7)
]
DEEPSCALER = [
    {"problem": f"Compute $\\frac{{1}}{{{number}}}$.", "answer": f"\\frac{{1}}{{{number}}}"}
    for number in range(2, 12)
]
AIME = [
    {"problem": f"What is ${number}^2$ modulo $1000$?", "answer": f"{number**2:03}"}
    for number in range(10, 13)
]


def _png(width, height):
    drawing = io.BytesIO()
    Image.new("RGB", (width, height), "white").save(drawing, "PNG")
    return drawing.getvalue()


GEOMETRY_3K = [
    {
        "images": [{"bytes": _png(60 + number, 90), "path": None}],
        "problem": f"<image>Find $x$ if the other leg is {number}.",
        "answer": f"{number} \\sqrt {{ 3 }}",
    }
    for number in range(1, 300)
]
ROWS = {
    "openai/gsm8k:main:train": GSM8K,
    "openai/gsm8k:main:test": GSM8K[:2],
    "agentica-org/DeepScaleR-Preview-Dataset": DEEPSCALER,
    "HuggingFaceH4/MATH-500::test": MATH_500,
    "HuggingFaceH4/aime_2024": AIME,
    "hiyouga/geometry3k::train": GEOMETRY_3K,
}


def put_in_place_of_the_hub(monkeypatch):
    open_hub = Mock(side_effect=ROWS.__getitem__)
    monkeypatch.setattr(datasets, "open_hub", open_hub)
    return open_hub
