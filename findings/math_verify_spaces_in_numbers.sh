#!/usr/bin/env bash
# math-verify reads a space in a number as arithmetic: all multiples of a thousand that are typeset
# with LaTeX's thin space are equal, and three and a half are two.
#
# Versions: Python 3.11, math-verify 0.9.0, latex2sympy2_extended 1.11.0, sympy 1.14.0.
# Behaviour: `12\,000`, which is how many style guides write twelve thousand, is 12 times 000, which
# is 0; and so is `7\,000`. With the comma in braces, `12{,}000`, it is a number. The mixed number
# `3 1/2` is (3 + 1)/2, while `3\frac{1}{2}` is 7/2. Nothing is printed. As a reward, the first gives
# full marks to every such number, and the second none to a right answer.
#
# Output seen (the row's answer, the model's, the verdict):
#   \boxed{12\,000}  \boxed{7\,000}  equal
#   \boxed{12\,000}  \boxed{0}  equal
#   \boxed{12\,000}  \boxed{12000}  different
#   \boxed{12{,}000}  \boxed{12000}  equal
#   \boxed{3 1/2}  \boxed{2}  equal
#   \boxed{3 1/2}  \boxed{3.5}  different
#   \boxed{2 3/4}  \boxed{5/4}  equal
#   \boxed{3\frac{1}{2}}  \boxed{3.5}  equal
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet math-verify==0.9.0 latex2sympy2_extended==1.11.0 sympy==1.14.0 \
  antlr4-python3-runtime==4.13.2
"$folder/venv/bin/python" - <<'PYTHON'
import sys

from math_verify import parse, verify

SEEN = [
    (r"12\,000", r"7\,000", True),
    (r"12\,000", "0", True),
    (r"12\,000", "12000", False),
    (r"12{,}000", "12000", True),
    ("3 1/2", "2", True),
    ("3 1/2", "3.5", False),
    ("2 3/4", "5/4", True),
    (r"3\frac{1}{2}", "3.5", True),
]
verdicts = []
for answer, given, _ in SEEN:
    boxes = [rf"\boxed{{{number}}}" for number in (answer, given)]
    right, said = map(parse, boxes)
    verdicts.append(verify(right, said))
    print(*boxes, "equal" if verdicts[-1] else "different", sep="  ")
sys.exit(verdicts != [equal for _, _, equal in SEEN])
PYTHON
