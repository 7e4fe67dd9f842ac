r"""Write the numbers and the ends of mathematical answers in one form.

    12\,345   12{,}345   12 345   12,\!345      ─►  12345
    \boxed{5.}   $5.$   \(5. \)   5。           ─►  the same without the full stop
    **1/2**                                     ─►  1/2
    3 1/2   3\,1/2   3\frac{1}{2}   3½           ─►  7/2

`math` and `gsm8k` pass what the model has written and the row's answer through `in_one_form`. So a
verdict does not depend on how a number is typeset.
"""

import re
import unicodedata

UNICODE_SPACES = "\u00a0\u2000-\u200a\u202f\u205f\u3000"  # for a character class
INVISIBLE = re.compile("[\u00ad\u200b-\u200d\u2060\ufeff]")
"""Soft hyphens, and spaces and joiners without a width."""
SPACE_ENTITY = re.compile(
    r"&(?:nbsp|ensp|emsp|thinsp|hairsp|#160|#8194|#8195|#8201|#8202|#8239|#x(?:a0|200[239a]|202f));",
    re.IGNORECASE,
)
"""A space of HTML, which chat models write in tables."""
THIN_LENGTH = r"(?:0?\.\d+[ ]?[a-z]{2}|[1-5](?:\.\d+)?[ ]?(?:mm|pt|mu))"
"""Length of a space within a number: `0.1em`, `2pt`; 5mu are LaTeX's widest one, `\\;`."""
LENGTH_COMMANDS = r"\\(?:[hm]space\*?\{%s\}|(?:hskip|mskip|kern|mkern)[ ]?%s[ ]?)"
THIN_COMMAND = (
    r"\\[,;:>!\ ]|\\(?:thin|med|thick|nobreak)space(?![A-Za-z])|\\allowbreak(?![A-Za-z])|"
    + LENGTH_COMMANDS % (THIN_LENGTH, THIN_LENGTH)
)
WIDE_COMMAND = r"\\(?:enspace|q?quad|hfill)(?![A-Za-z])|" + LENGTH_COMMANDS % (
    r"[^{}]{0,20}",
    r"[\d.]{1,9}[ ]?[a-z]{2}",
)
SPACING_COMMAND = f"{THIN_COMMAND}|{WIDE_COMMAND}"
ONE_SPACE = rf"(?:{THIN_COMMAND}|~|[{UNICODE_SPACES}]|\{{\}})"
BRACED_COMMA = r"(?:\\(?:text|mbox|mathrm|mathord|mathpunct))?\{(?:\\!)?,(?:\\!)?\}"
THIN_SPACE = rf"""(?:[ ]?
    (?: {ONE_SPACE}{{1,3}} | ,\\! | {BRACED_COMMA}(?:\\!)? | \{{(?:[ ]|{ONE_SPACE})\}} )
    [ ]?)"""
GROUP_SEPARATOR = rf"(?:{THIN_SPACE}|[ '\u2019])"
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
FRACTION_SIGN = "\u00bc-\u00be\u2150-\u215e"  # ½, for a character class
WHOLE_PART = r"(?P<whole>\d{1,3}(?:,\d{3}){1,4}|\d{1,15})"
ALONE = re.compile(
    r"""
    (?:[ ~]|\\[,;:!\ ])*+
    (?:
        \Z|[})\]$*+<=>≈,;?!|"'`\u2019\u2013\u2014-]|[.:](?!\d)|\n|°|\\?%
        |\\(?:[)\]\\]|text|mathrm|mbox|right|times|cdot|approx|leq?|geq?|q?quad)
        |[mLlhgst](?![\w^²³(])  # a unit
        |(?<=\s)\(?[A-Za-z]{2}
    )
    """,
    re.VERBOSE,
)
"""What may stand behind `7/2`. Where something else does, the number is written `(7/2)`, because
`7/2 x` would be read as 7/(2x)."""
MIXED_NUMBER = re.compile(
    rf"""
    (?<![\w.:^'\u2019)}}])
    (?:
        (?<!\d[,/]){WHOLE_PART}
        (?:
            (?:[ ]|[ ]?{ONE_SPACE}[ ]?)(?P<numerator>\d{{1,3}})/(?P<denominator>\d{{1,4}})
            |[ ]?(?P<sign>[{FRACTION_SIGN}])
        )
        |(?P<sign_alone>[{FRACTION_SIGN}])
    )
    (?!\d)
    """,
    re.VERBOSE,
)
"""`3 1/2`, `3½`, and ½ alone. math-verify takes the first for (3 + 1)/2."""
MIXED_FORMULA = re.compile(
    rf"""
    (?<![\w.,:/^'\u2019)}}])
    {WHOLE_PART}(?:[ ]|{ONE_SPACE}){{0,3}}\\[dt]?frac[ ]*
    (?:\{{(?P<numerator>\d{{1,3}})\}}|(?P<one_digit>\d))[ ]*
    (?:\{{(?P<denominator>\d{{1,4}})\}}|(?P<other_digit>\d))
    (?!\d)
    """,
    re.VERBOSE,
)
r"""`3\frac{1}{2}`. Only within a formula math-verify reads it as it is meant."""
BEFORE_PART_OF_LIST = re.compile(rf"\d(?:[ ]|{ONE_SPACE})*\Z", re.VERBOSE)
BEFORE_ARGUMENT = re.compile(r"(?:[\^_]|\\(?:[dt]?frac|sqrt|log|ln|lg|exp|sin|cos|tan))[ ]*\Z")
r"""What takes only the first of two numbers: `\sqrt 2 1/2`."""
BEFORE_DIVISOR = re.compile(r"(?:[/÷]|\\div)[ ]*\Z")
NUM_CHARACTERS_BEFORE = 20  # that are looked at before a mixed number
SPACE_BETWEEN_DIGITS = re.compile(rf"(?<=[\d,])\s?(?:{SPACING_COMMAND})\s?(?=\d)")
EMPTY_TEXT = re.compile(r"\\(?:text(?:bf|it|rm)?|mbox|math(?:bf|it|rm))\{[\s.]*\}")
STOP = r"[,，;；。．｡]|(?<!\.)\\?\.(?!\.)|\{\.\}"
END_OF_PROOF = r"\\(?:blacksquare|square|Box|qed|qedsymbol)(?![A-Za-z])"
ENDING = re.compile(
    rf"""
    (?<![\s,，;；。．｡.\\~{{])(?<!\\left)(?<!\\right)  # where the end begins; `\right.` has none
    (?:(?<=\d)(?:\.\.\.|…))?+
    # Bounded, so that the search takes linear time:
    (?:\s++|{STOP}|{SPACING_COMMAND}|{END_OF_PROOF}|~|\\\\){{0,20}}+
    (?=\\?\}}|\\\)|\\\]|\Z)
    """,
    re.VERBOSE,
)
"""Full stops, commas and spaces between an answer and the brace or bracket behind it."""
BOLD = re.compile(r"(?<![\w)*])\*\*(?=[^\s*])([^*\n]+)(?<=\S)\*\*(?![\w(*])")  # not `2**3 + 4**5`
DOLLARS = re.compile(r"\$\$(.+?)\$\$|\$([^$]+)\$", re.DOTALL)


def in_one_form(text: str) -> str:
    """Return the text with numbers without spaces, and answers without a full stop at their end."""
    text = SPACE_ENTITY.sub("\u202f", INVISIBLE.sub("", text))
    text = MIXED_NUMBER.sub(_improper_fraction, text)
    text = MIXED_FORMULA.sub(_improper_fraction, text)
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


def _improper_fraction(number: re.Match[str]) -> str:
    """3 1/2 -> 7/2. What is no mixed number stays as it is."""
    before = number.string[max(0, number.start() - NUM_CHARACTERS_BEFORE) : number.start()]
    if BEFORE_PART_OF_LIST.search(before) or BEFORE_ARGUMENT.search(before):
        return number[0]
    parts = number.groupdict()
    whole = parts["whole"] or "0"
    sign = parts.get("sign") or parts.get("sign_alone")
    if sign is not None:
        # ½ is 1 FRACTION SLASH 2.
        numerator, _, denominator = unicodedata.normalize("NFKC", sign).partition("\u2044")
    else:
        numerator = parts["numerator"] or parts["one_digit"]
        denominator = parts["denominator"] or parts["other_digit"]
    if int(numerator) >= int(denominator):
        return number[0]
    whole_number = int(whole.replace(",", ""))
    fraction = f"{whole_number * int(denominator) + int(numerator)}/{denominator}"
    is_divisor = BEFORE_DIVISOR.search(before) is not None
    if ALONE.match(number.string, number.end()) is not None and not is_divisor:
        return fraction
    # Within a formula math-verify reads LaTeX's mixed numbers as they are meant.
    return number[0] if "\\frac" in number[0] else f"({fraction})"


def _without_ending(formula: re.Match[str]) -> str:
    mark = "$$" if formula[1] is not None else "$"
    content = formula[1] or formula[2]
    shortened = ENDING.sub("", content)
    if shortened and content[-1].isspace():  # `$5. $6` are amounts, no formula
        shortened += " "
    return mark + shortened + mark
