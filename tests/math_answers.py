r"""Completions with the score that `math` and `gsm8k` give them, checked by hand.

(the row's answer, the completion, the score)
"""

from decimal import Decimal

MATH = [
    # what math-verify is for
    (r"\frac{1}{2}", "The answer is 1/2.", 1),
    ("x^2+2x+1", r"\boxed{(x+1)^2}", 1),
    (r"\text{east}", r"\boxed{\text{west}}", 0),
    ("1,234,567", "The answer is 1,234,567.", 1),
    # money and percent
    (r"\$36", r"\boxed{36}", 1), ("€42", r"\boxed{42}", 1),
    (r"\$18.90", r"The answer is \$18.90.", 1), (r"\$32,\!348", r"\boxed{32348}", 1),
    # position of the answer
    ("4", r"The answer is \boxed{4}. It was hard, I tried 17 times.", 1),
    ("4", r"At first $\boxed{3}$, but looking again it is $\boxed{4}$.", 1),
    ("3", r"At first $\boxed{3}$, but looking again it is $\boxed{4}$.", 0),
    ("4", r"<think>Is it \boxed{5}?</think> The answer is $4$.", 1),
    ("4", r"Is it \boxed{4}?</think> \boxed{5}", 0),
    ("5", r"<think>Is it \boxed{5}?", 0),
    ("42", r"It is \fbox{42}, in 7 lines.", 1), ("42", r"It is \boxed 42, in 7 lines.", 1),
    # answer tags
    ("42", "<think>x</think><answer>42</answer>", 1),
    ("42", "<answer>The answer is **42**.</answer>", 1),
    ("1", "<answer>1</answer> no, <answer>2</answer>", 0),
    ("42", "42 <answer></answer>", 0),
    (r"Adding up, we get $2+2=\boxed{4}$.", r"\boxed{4}", 1),
    # no answer
    ("4", "", 0),
]  # fmt: skip

# Verdicts of math-verify that are wrong, or (from 50 % on) debatable.
MATH += [
    ("1500", r"\boxed{1.5e3}", 0),
    ("BDAC", r"\boxed{ABCD}", 1), ("1011_2", r"\boxed{1011_3}", 1),
    (r"\emptyset", r"\boxed{\varnothing}", 0),
    ("0.0000004", r"\boxed{0.0000003}", 1), ("50", r"\boxed{50\%}", 1),
    ("4", r"First \boxed{3}, no: \boxed{4}", 0), ("1,2,3", r"\boxed{3,2,1}", 1),
    (r"(-\infty, 3]", r"\boxed{x \le 3}", 0), ("y = 2x+3", r"\boxed{2x+3}", 1),
    (r"\begin{pmatrix}1\\2\end{pmatrix}", r"\boxed{(1,2)}", 0),
    ("B", "The answer is B.", 0), ("east", r"\boxed{East}", 0), ("4", r"\boxed{4", 0),
]  # fmt: skip

GSM8K_ROW = "Natalia sold 48/2 = <<48/2=24>>24 clips in May.\n#### "
GSM8K = [
    (GSM8K_ROW + "18", "#### 18", 1),
    (GSM8K_ROW + "18", "#### 18\n#### 19", 0),
    (GSM8K_ROW + "18", "#### eighteen, that is 18", 1),
    (GSM8K_ROW + "18", "She makes 18 dollars in 2 days.", 0),
    (GSM8K_ROW + "18", r"She makes \boxed{18} dollars in 2 days.", 1),
    (GSM8K_ROW + "18", r"\boxed{18", 1),
    (GSM8K_ROW + "1234", "#### 1,234", 1),
    (GSM8K_ROW + "-5", "#### -5", 1),
    (GSM8K_ROW + "0.5", "#### .5", 1),
    (GSM8K_ROW + "1500", "#### 1.5e3", 1),
    (GSM8K_ROW + "18", "#### 1e9999999999999999999999", 0),
    ("18", "#### 18", 1),
    # headings of Markdown
    (GSM8K_ROW + "18", "#### Step 1: count\n9\n#### Step 2: multiply\nSo \\boxed{18}.", 1),
    (GSM8K_ROW + "1", "#### 1. Count\nShe has 18.", 0),
    (GSM8K_ROW + "18", "\\boxed{17}\n#### **18** (9 * 2)", 1),
    # boxes: one number, and no part of an expression
    (GSM8K_ROW + "18", r"\boxed{\frac{36}{2}}", 1),
    (GSM8K_ROW + "10", r"\boxed{2^{10}}", 0),
    *((GSM8K_ROW + "18", text, 1) for text in (
        r"\boxed{18 \text{ ft}^2}", r"\boxed{18\,\text{cm}^2}", r"\boxed{18\ \mathrm{m}^{3}}",
        "#### 18 ft^2", "#### 18 m²", r"\boxed{18 \text{ inches}^3}", r"\boxed{\approx 18}",
        "#### 18 m^2 of cloth", "#### ≈ 18", r"\boxed{+18}", r"\boxed{\large 18}",
        r"\boxed{\displaystyle 18}",
    )),
    *((GSM8K_ROW + "18", text, 0) for text in (
        r"\boxed{18^2}", "#### 18x^2", r"\boxed{18 + 2}", r"\boxed{18 m^2 + 3}", "#### 2 m^18",
        "#### 18 m^2-3", "#### 18 in^2 x 3 in",
    )),
    (GSM8K_ROW + "5", "#### 5-3", 0), (GSM8K_ROW + "18", "#### 18 dollars in 2 days", 1),
    *((GSM8K_ROW + "18", f"#### 18 {text}", 1) for text in (
        "days, 8 in April and 10 in May", "eggs for 2 to 3 weeks", "dollars, or $126 per week",
        "to be exact", "cents is 1/4 of a dollar and 5 nickels", "hours from 9-5",
    )),
    *((GSM8K_ROW + "5", f"#### {text}", 0) for text in ("5 - 10 minutes", "5 to 12", "5 or 6")),
    (GSM8K_ROW + "2 days and 3 hours", "#### 2", 0),
    (GSM8K_ROW + "2 days and 3 hours", "#### 2 days and 3 hours", 1),
    # thinking and answer tags
    (GSM8K_ROW + "18", r"<think>Is it #### 5 or \boxed{6}?</think>She earns 18.", 1),
    (GSM8K_ROW + "18", "<answer>18</answer> in 2 days", 1),
    # fractions, and answers that are no numbers
    ("3/4", r"\boxed{\frac{3}{4}}", 1),
    ("1/2", r"\boxed{\frac12}", 1),
    ("1/20", r"\boxed{\dfrac1{20}}", 1),
    ("1/23", r"\boxed{\frac123}", 0),
    ("1/2", "The answer is 2", 0),
    ("2:30", "It starts at 30", 0),
    (GSM8K_ROW + "30", "It starts at 2:30", 0),
]  # fmt: skip

NAN = float("nan")
TYPED = [
    # (reward, the row's answer, the completion, the score)
    ("math", ["4", 5.0], r"\boxed{5}", 1),
    ("math", "}{", r"\boxed{5}", 0),
    ("math", [None, ""], "5", None),
    ("gsm8k", 18.0, "#### 18", 1),
    ("exact_match", 18.0, "18", 1),
    *((name, Decimal("18.00"), "#### 18", 1) for name in ("gsm8k", "math")),
    ("exact_match", Decimal("12345678901234567890.00"), "12345678901234567890", 1),
    ("exact_match", Decimal("1E+2"), "100", 1),
    ("exact_match", b"caf\xc3\xa9", "café", 1),
    ("exact_match", "18.00", "18", 0),
    ("exact_match", "1e-05", "0.00001", 1),
    ("exact_match", "007", "7", 0),
    ("exact_match", ["a", " b"], "<think>x</think> b", 1),
    ("easyrl.data.tasks:score", 109.0, "#109", 1),
    ("easyrl.data.tasks:score", 109, "109", 0),
]

FORMULA_FORMS = [
    r"\boxed{%s}", r"\boxed{%s}.", r"The answer is $\boxed{%s}$.", "$%s$", "$$%s$$",
    "So we get $%s$.",
    r"\(%s\)", r"\[%s\]", r"\[ %s \]", "<answer>%s</answer>", "<answer>$%s$</answer>",
    r"<answer>\boxed{%s}</answer>",
]  # fmt: skip
FORMS = [
    *FORMULA_FORMS, "%s", "The answer is %s", "The final answer is: %s", "Answer: %s", "#### %s",
    "The answer is **%s**", "**Answer: %s**",
]  # fmt: skip
"""How an answer is marked: of the model's completion, and of the row."""

TYPESET = [
    # (a number, what is written in a form, whether they are equal)
    # full stops and what else ends an answer
    *(("5", f"5{ending}", 1) for ending in (
        "", ".", " .", ". ", "。", "．", ",", ";", "...", "…", r"\\", r".\\", r"\,", r"\,.", r".\ ",
        r"\quad", r".\quad", r"\text{.}", " apples.", r"\text{ apples.}", r"\,\text{cm}.",
        r"~\text{cm}", r"\textbf{.}", "{.}", r"\.", ".\u200b", ".\ufeff", ".&nbsp;",
        r".\quad\blacksquare", r". \square", r".\hfill\qed", r".\hspace{1em}", r"\hspace{1em}.",
        r".\kern 2pt",
    )),
    ("5.5", "5.5.", 1), ("3.5", "3.50.", 1), ("0.5", ".5.", 1), ("-5", "-5.", 1), ("5", "5%.", 1),
    ("5", r"5\%.", 1), ("1/2", "1/2.", 1), ("1/2", r"\frac{1}{2}.", 1),
    ("12345.67", "12,345.67.", 1),
    ("5", "5.5", 0), ("5", "6.", 0), ("5", ".5.", 0), ("5", "-5.", 0), ("55", "5.5", 0),
    ("5.5", "5.", 0),
    ("1/2", "2/1.", 0), ("50", "5.0.", 0),
    # spaces in numbers
    *(("12345", f"12{space}345", 1) for space in (
        r"\,", r"\ ", r"\;", r"\:", r"\!", r"\, ", r"\thinspace ", "{,}", ",", r",\!", "~", " ",
        r"{\,}",
        "\u2009", "\u202f", "\u00a0", "\u2007", r"\text{ }",
        r"\hspace{0.1em}", r"\hspace*{1mm}", r"\hskip 2pt ", r"\mskip3mu ", r"\mspace{3mu}",
        r"\kern.2em ", r"\allowbreak ", r"\nobreakspace ", r"\,\,", "\u2009\u2009", r"\ \!",
        r"\,{}", "{}", "{~}", r"{\ }", r"{\thinspace}", r"{,}\!", r"{\!,}", r"\mathord{,}",
        r"\text{,}", "\u200b", "\u2060", "\ufeff", "\u00ad", "&thinsp;", "&nbsp;", "&#8239;",
        "&#x2009;", "'", "\u2019",
    )),
    ("1234567", r"1\,234\,567", 1), ("1234567", "1 234 567.", 1), ("-12345", r"-12\,345", 1),
    ("12345.5", r"12\,345.5", 1), ("12345", r"12\,345.", 1), ("36000", r"36\,000\,\text{m}", 1),
    ("0.123456", r"0.123\,456", 1), ("3.1415926", "3.141\u2009592\u20096.", 1),
    *((number, f"12{space}345", 0) for number in ("12", "345") for space in (r"\,", " ",
    "\u202f", "{,}")),
    # two numbers
    *(("12345", text, 0) for text in (
        "12, 345", r"12,\ 345", r"12,\,345", r"12\quad 345", "12; 345", "1 2345", r"1\,2345",
        "12\t345", r"12\hspace{1cm}345", r"12\hskip 2em 345", r"12\,\quad 345", "12' 345",
    )),
    *(("12", f"1{space}2", 0) for space in (" ", r"\,", r"\ ", "\u2009", "~")),
    ("512345", "5 12 345", 0), ("123456", "12 345 6", 0), ("10000", r"1\,0000", 0),
    # mixed numbers
    *(("3.5", text, 1) for text in (
        "3 1/2", "3 1/2.", r"3\,1/2", r"3\ 1/2", "3~1/2", "3\u20091/2", r"3\frac{1}{2}",
        r"3\frac12", r"3 \frac{1}{2}", r"3\tfrac12", r"3\,\dfrac{1}{2}", r"3 \, \frac{1}{2}",
        r"3 \, 1/2", "3½", "3 ½", "3&nbsp;1/2", "7/2", "3 1/2 apples", "3 1/2 m", "3½ m",
    )),
    ("0.5", "½", 1), ("0.5", "½.", 1), ("-0.5", "-½", 1), ("0.5", "-½", 0),
    ("-2.75", "-2 3/4", 1), ("-2.75", "-2¾", 1), ("1234.5", "1,234 1/2", 1),
    ("1.5", "1 1/2", 1), ("3.125", "3 125/1000", 1), ("21.3", "21 3/10", 1),
    *((number, text, 0) for number, text in (
        ("2", "3 1/2"), ("3", "3 1/2"), ("1/2", "3 1/2"), ("15.5", "3 1/2"), ("1", "1 1/2"),
        ("5/4", "2 3/4"), ("0.5", "1½"), ("3", "3½"), ("6.5", "5 3/2"), ("3.5", r"2\;3\;1/2"),
        ("5", "3" * 5000 + " 1/2"), ("5", "3" * 5000 + r"\frac{1}{2}"), ("5", "3" * 5000 + "½"),
    )),
    ("3125/1000", "3 125/1000", 1), ("1000", r"10^1\,000", 0), ("2345", r"\frac12\,345", 0),
]  # fmt: skip
TYPESET_FORMULAS = [
    # mixed numbers beside something else
    *((number, text, 0) for number, text in (
        (r"\frac{7}{2\pi}", r"3\frac{1}{2}\pi"), (r"\frac{5}{2\sqrt2}", r"2\frac12\sqrt{2}"),
        (r"\frac{7}{3(x+1)}", r"2\frac{1}{3}(x+1)"), (r"\frac{1}{2\pi}", r"½\pi"),
        (r"\frac{1}{2x}", "½x"), ("1", r"6 \div 1\frac{1}{2}"), ("0.5", "1/½"), ("2", "3 1/2 m"),
        ("2", r"\left(3 1/2\right)"), ("3", "3½ m"),
    )),
    *((number, text, 1) for number, text in (
        ("4", r"6 \div 1\frac{1}{2}"), ("4", r"6 \div 1 1/2"), ("2", "1/½"),
        (r"\frac{\sqrt2}{2}", r"\sqrt 2\frac12"), (r"\frac{\pi^2}{6}", r"\pi^ 2\frac{1}{6}"),
        ("7", r"2 \cdot 3 1/2"), ("1.5", "5 - 3 1/2"), (r"\frac{\pi}{2}", r"½\pi"),
        (r"\frac{x}{2}", "½x"), (r"\frac{7x}{2}", "3½x"), (r"\frac{7x}{2}", "3 1/2 x"),
        (r"\frac{7\pi}{2}", r"3 1/2 \pi"), ("1/6", "½/3"), ("9/2", "½*9"),
        ("x=3.5", "x=3 1/2"), ("3.5", r"3 1/2\text{ cm}"), ("3.5", "3 1/2 m"), ("3.5", "3½ m"),
        ("3.5", r"3 1/2\,"), ("(2,1.5)", r"\left(2, 1½\right)"), ("(1/2,3)", "(½,3)"),
        ("3.5", r"\left(3 1/2\right)"),
    )),
    ("x", "x.", 1), ("x+1", "x+1.", 1), ("1,2", "1, 2.", 1), ("(1,2)", "(1,2).", 1), ("x", "y.", 0),
    (r"\left(1,2\right)", r"\left(1,2\right).", 1), (r"\{1,2\}", r"\{1, 2.\}", 1), ("B", "B.", 1),
    ("12345, 6789", r"12\,345, 6\,789.", 1), ("120", "5!.", 1), ("5", "5!.", 0),
    ("100200", "(100, 200).", 0),
    (r"\left.x^2\right|_0^1", r"\left.x^2\right|_0^1.", 1), ("1,2", "1, 2, 3.", 0),
    ("x=5", "x=5.", 1),
    (r"\begin{pmatrix}1\\2\end{pmatrix}", r"\begin{pmatrix}1\\2\end{pmatrix}.", 1),
    ("6250", r"2 \cdot 3\,125", 1),
]  # fmt: skip
