"""Built-in reward functions that read a completion's text or length, and the game Countdown.

All reward functions have TRL's signature, `f(prompts, completions, completion_ids, **columns)`:
lists of G entries, a column's value repeated for each completion. A completion is a string, or for
a chat prompt `[{"role": "assistant", "content": "..."}]`. Parameters before the `/` are bound from
the settings (`builtin.BUILT_IN`); they are positional-only so that a column may have the same name.
"""

import ast
import inspect
import re
from collections.abc import Callable, Hashable, Sequence
from contextlib import suppress
from fractions import Fraction
from operator import add, mul, sub, truediv
from typing import Any

from easyrl.data.reasoning_gym import is_never_right, library_data
from easyrl.data.values import answers_of, is_missing
from easyrl.events import FailedCall
from easyrl.types import Messages, text_of

RewardFunction = Callable[..., Any]
"""Returns a list of numbers or None (does not apply), or an awaitable of such a list."""
Completions = Sequence[str | Messages]  # [G]

NO_TAG = r"((?:(?!</?(?:think|answer)>).)*)"
ANSWER = re.compile(rf"<answer>{NO_TAG}</answer>", re.DOTALL)
FORMAT = re.compile(rf"(?:<think>)?{NO_TAG}</think>\s*{ANSWER.pattern}", re.DOTALL)

COUNTDOWN_CHARACTERS = re.compile(r"[0-9+\-*/() \t]+")
COUNTDOWN_MAX_LENGTH = 500  # longest expression that is parsed, in characters: parsers recurse
OPERATIONS = {ast.Add: add, ast.Sub: sub, ast.Mult: mul, ast.Div: truediv}


class RewardError(RuntimeError):
    """A reward call failed, and `reward.on_error` is `stop`. `key`: of its group, if it has one."""

    def __init__(self, call: FailedCall, key: Hashable = None) -> None:
        super().__init__(str(call))
        self.call = call
        self.key = key


class GroupLost(RuntimeError):
    """A group cannot be scored, though nothing has failed. It ends no run."""


def final_text(completion: str | Messages) -> str:
    """Return the text after the thinking; after thinking that is not closed there is none."""
    return text_of(completion).rpartition("</think>")[2].partition("<think>")[0]


def exact_match(completions: Completions, answer: Sequence[Any], **_: Any) -> list[float | None]:
    """Score 1.0 where all of the completion after the thinking equals the answer, ignoring
    surrounding white space; else 0.0. None where the row has no answer."""
    return [*map(_exact_match_score, completions, answer)]


def _exact_match_score(completion: str | Messages, answer: Any) -> float | None:
    accepted = [each.strip() for each in answers_of(answer)]
    if not accepted:
        return None
    text = final_text(completion).strip()
    return float(text in accepted)


def regex(pattern: str, /, completions: Completions, **_: Sequence[Any]) -> list[float]:
    """Score 1.0 where `pattern` is found in the completion, else 0.0."""
    compiled = re.compile(pattern)
    scores = []
    for completion in completions:
        match = compiled.search(text_of(completion))
        scores.append(float(match is not None))
    return scores


def format_(completions: Completions, **_: Sequence[Any]) -> list[float]:
    """Score 1.0 where the completion is `<think> ... </think> <answer> ... </answer>` and nothing
    else, with each tag once; else 0.0. `<think>` may be missing, since chat templates open it.

    The format reward of DeepSeek-R1 (arXiv 2501.12948, section 2.2).
    """
    scores = []
    for completion in completions:
        match = FORMAT.fullmatch(text_of(completion).strip())
        scores.append(float(match is not None))
    return scores


def length_penalty(
    max_completion_length: int, /, completion_ids: Sequence[Sequence[int]], **_: Sequence[Any]
) -> list[float]:
    """Score 0 up to `max_completion_length - cache` tokens, falling to -1 at the maximum length.

    The soft overlong punishment of DAPO (arXiv 2503.14476, equation 13), with its cache of a fifth;
    lengths include the end-of-sequence token.
    """
    cache = max(1, max_completion_length // 5)
    threshold = max_completion_length - cache
    scores = []
    for ids in completion_ids:
        excess = max(0, len(ids) - threshold)
        scores.append(-min(1.0, excess / cache))
    return scores


def countdown(
    completions: Completions, nums: Sequence[Any], target: Sequence[Any], **_: Any
) -> list[float | None]:
    """Score 1.0 where the last `<answer>` is an expression that uses each of `nums` exactly once
    and equals `target`, else 0.0, also where this is no number; None where the row has no numbers
    or no target.

    The rule of TinyZero. The expression may contain whole numbers, + - * / and parentheses. It is
    parsed, never evaluated as code, and computed in exact fractions.
    """
    scores: list[float | None] = []
    for completion, numbers, goal in zip(completions, nums, target, strict=True):
        if is_missing(numbers) or is_missing(goal):
            scores.append(None)
        else:
            scores.append(float(_solves(completion, numbers, goal)))
    return scores


def _solves(completion: str | Messages, nums: Any, target: Any) -> bool:
    """`nums`: a list of numbers, or its text; `target`: a number, or its text."""
    number_texts = re.findall(r"\d+\.?\d*", str(nums))
    numbers = sorted(map(Fraction, number_texts))
    answers = ANSWER.findall(final_text(completion))
    if not answers:
        return False
    expression = answers[-1].strip()
    if len(expression) > COUNTDOWN_MAX_LENGTH:
        return False
    if not COUNTDOWN_CHARACTERS.fullmatch(expression):
        return False
    used: list[int] = []
    try:
        tree = ast.parse(expression, mode="eval")
        value = _evaluate(tree.body, used)
        return value == Fraction(str(target)) and sorted(used) == numbers
    except (ValueError, SyntaxError, ZeroDivisionError, MemoryError, RecursionError):
        return False


def _evaluate(node: ast.expr, used: list[int]) -> Fraction:
    """Return the exact value; append each number of the expression to `used`."""
    match node:
        case ast.Constant(value=int(number)):
            used.append(number)
            return Fraction(number)
        case ast.BinOp(left=left, op=op, right=right) if type(op) in OPERATIONS:
            compute = OPERATIONS[type(op)]
            return Fraction(compute(_evaluate(left, used), _evaluate(right, used)))
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            return -_evaluate(operand, used)
    raise ValueError("not an arithmetic expression")


def none(completions: Completions, **_: Any) -> list[float]:
    """Score 0.0: rows without a reward, in a run with `algorithm.teacher` alone."""
    return [0.0] * len(completions)


def reasoning_gym(
    completions: Completions, entry: Sequence[Any], task: Sequence[Any], **_: Any
) -> list[float | None]:
    """Score the last `<answer>`, else the text after the thinking, by the task's own scorer; 0.0
    where that fails. None where the row is of no task."""
    scores: list[float | None] = []
    for completion, entry_of_row, task_of_row in zip(completions, entry, task, strict=True):
        if is_missing(task_of_row):
            scores.append(None)
            continue
        name, options = task_of_row
        data = library_data(name, options)
        text = final_text(completion)
        tagged = ANSWER.findall(text)
        answer = (tagged[-1] if tagged else text).strip()
        score = 0.0
        if not is_never_right(name, answer):
            with suppress(Exception):
                score = float(data.score_answer(answer, entry_of_row))
        scores.append(score)
    return scores


def agent(completions: Completions, **_: Any) -> list[float | None]:
    """Stand for what the agent returns, which the rollout worker knows."""
    return [None] * len(completions)


async def environment(environments: Sequence[Any], **_: Any) -> list[float | None]:
    """Score each episode by its environment's own `get_reward`, which may be asynchronous; None
    where it has none. All are called before one is awaited."""
    begun = []
    for each in environments:
        get_reward = getattr(each, "get_reward", lambda: None)
        begun.append(get_reward())
    scores = []
    for score in begun:
        if inspect.isawaitable(score):
            score = await score  # noqa: PLW2901
        scores.append(score)
    return scores
