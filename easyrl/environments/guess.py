"""The game `guess`: find a number by "higher" and "lower"."""

from typing import Any

MAX_GUESSES = 12


class Guess:
    """The model writes a number; the answer is `higher`, `lower` or, at the end, `yes`.

    The reward is 1 for the number at the first guess and falls by 1 / MAX_GUESSES with each further
    one; it is 0 if the number is not found or an answer is not a number.
    """

    def reset(self, secret: int, **_: Any) -> str | None:
        self.secret = secret
        self.num_guesses = 0
        self.is_found = False
        return None

    def step(self, text: str) -> tuple[str, bool]:
        self.num_guesses += 1
        if not text.strip().isdecimal():
            return "not a number", True
        guess = int(text)
        self.is_found = guess == self.secret
        if self.is_found:
            return "yes", True
        answer = "higher" if self.secret > guess else "lower"
        return answer, self.num_guesses >= MAX_GUESSES

    def get_reward(self) -> float:
        if not self.is_found:
            return 0.0
        return 1.0 - (self.num_guesses - 1) / MAX_GUESSES
