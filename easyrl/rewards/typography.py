r"""Write the numbers and the ends of mathematical answers in one form.

    12\,345   12{,}345   12 345   12,\!345      ─►  12345
    \boxed{5.}   $5.$   \(5. \)   5。           ─►  the same without the full stop
    **1/2**                                     ─►  1/2

`math` and `gsm8k` pass what the model has written and the row's answer through `in_one_form`. So a
verdict does not depend on how a number is typeset.
"""

import re

UNICODE_SPACES = "\u00a0\u2000-\u200a\u202f\u205f\u3000"  # for a character class
SPACING_COMMAND = r"\\[,;:>!\ ]|\\(?:thin|med|thick|en)space(?![A-Za-z])|\\q?quad(?![A-Za-z])"
THIN_SPACE = rf"""(?:[ ]?
    (?: \\[,;:>!\ ] | \\(?:thin|med|thick)space(?![A-Za-z]) | ~ | [{UNICODE_SPACES}]
      | ,\\! | \{{(?:,|\\,|\\;|[ ])\}}
    )[ ]?)"""
GROUP_SEPARATOR = rf"(?:{THIN_SPACE}|[ ])"
"""What stands between the thousands of a number, except the plain comma."""
THOUSANDS = re.compile(
    rf"""
    (?<![\w.:/^])(?<!\d[ ])  # no part of an exponent, a fraction, a time, or a list: `5 12 345`
    [1-9]\d{{0,2}}
    (?:(?:,|{GROUP_SEPARATOR})\d{{3}}(?!\d))++
    (?!{GROUP_SEPARATOR}\d|[ ]?/)  # no list as in `12 345 6`, no mixed number as in `3 125/1000`
    """,
    re.VERBOSE,
)
SEPARATOR = re.compile(GROUP_SEPARATOR, re.VERBOSE)
DECIMALS = re.compile(
    rf"(?<=\d\.)\d{{3}}(?:{THIN_SPACE}\d{{1,3}}(?!\d))++(?!/)", re.VERBOSE
)  # 0.123\,4
SPACE_BETWEEN_DIGITS = re.compile(rf"(?<=[\d,])\s?(?:{SPACING_COMMAND})\s?(?=\d)")
EMPTY_TEXT = re.compile(r"\\(?:text|mbox|mathrm)\{[\s.]*\}")
STOP = r"[,，;；。．｡]|(?<!\.)\.(?!\.)"
ENDING = re.compile(
    rf"""
    (?<![\s,，;；。．｡.\\~{{])(?<!\\left)(?<!\\right)  # where the end begins; `\right.` has none
    (?:(?<=\d)(?:\.\.\.|…))?+
    (?:\s++|{STOP}|{SPACING_COMMAND}|~|\\\\){{0,20}}+  # bounded: the search takes linear time
    (?=\\?\}}|\\\)|\\\]|\Z)
    """,
    re.VERBOSE,
)
"""Full stops, commas and spaces between an answer and the brace or bracket behind it."""
BOLD = re.compile(r"(?<![\w)*])\*\*(?=[^\s*])([^*\n]+)(?<=\S)\*\*(?![\w(*])")  # not `2**3 + 4**5`
DOLLARS = re.compile(r"\$\$(.+?)\$\$|\$([^$]+)\$", re.DOTALL)


def in_one_form(text: str) -> str:
    """Return the text with numbers without spaces, and answers without a full stop at their end."""
    text = BOLD.sub(r"\1", text)  # math-verify takes the second `**` of `**1/2**` for a power
    text = EMPTY_TEXT.sub(" ", text)
    text = THOUSANDS.sub(_joined, text)
    text = DECIMALS.sub(_joined, text)
    text = re.sub(f"[{UNICODE_SPACES}]", " ", text)
    text = re.sub(r"(?<=[\w)}])~(?=\\)", " ", text)  # `5~\text{cm}`
    text = DOLLARS.sub(_without_ending, text)
    return ENDING.sub("", text)


def spaces_between_digits(text: str) -> str:
    r"""Return the text with a plain space for LaTeX's between digits: `1\,2` are two numbers."""
    return SPACE_BETWEEN_DIGITS.sub(" ", text)


def _joined(number: re.Match[str]) -> str:
    digits = SEPARATOR.sub("", number[0])
    return number[0] if "," in digits else digits  # commas and spaces: a list of such numbers


def _without_ending(formula: re.Match[str]) -> str:
    mark = "$$" if formula[1] is not None else "$"
    content = formula[1] or formula[2]
    shortened = ENDING.sub("", content)
    if shortened and content[-1].isspace():  # `$5. $6` are amounts, no formula
        shortened += " "
    return mark + shortened + mark
