"""The user's agent: a function or a command, called in the processes of `pool`.

A function is called as `solve(row, client, base_url, api_key)`, with those of these arguments that
it takes. It returns a number, {name: number}, or None.

In the words of a command `{column}` is replaced by the row's value. It finds the endpoint in
OPENAI_BASE_URL and OPENAI_API_KEY, or the same of ANTHROPIC, and writes its reward to
EASYRL_REWARD_FILE or as the last line of its output.
"""

import contextlib
import ctypes
import functools
import inspect
import json
import math
import os
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from datetime import date, time
from decimal import Decimal
from pathlib import Path
from string import Formatter
from typing import Any, NamedTuple

from easyrl.agents.protocols.base import MODEL
from easyrl.config import ConfigError
from easyrl.config.spec import EpisodeSpec
from easyrl.data.pictures import data_address, with_images
from easyrl.devices import LOOPBACK
from easyrl.formatting import require
from easyrl.rewards.loading import accepted_arguments
from easyrl.types import Picture
from easyrl.user_code import load_function

KEY = "rollout.agent (--agent)"
FORMS = 'file.py:function, package.module:function, or a command, as in "python run.py {column}"'
MAX_LOGGED_CHARACTERS = 100_000  # of a command's standard error
MAX_LAST_LINES = 10
MAX_LAST_CHARACTERS = 2000
MAX_ROW_CHARACTERS = 500
"""What is shown of a command that has failed: the last lines that it has printed, and its row."""
LIBC = ctypes.CDLL(None)
PR_SET_PDEATHSIG = 1  # option of prctl


class Value(NamedTuple):
    """The reward of an episode."""

    total: float | None  # None: the agent gives no reward
    parts: dict[str, float]  # named rewards, whose sum is `total`; {} if they have no names


class Agent:
    """The agent of a process: call it with the arguments of an episode."""

    def __init__(self, episodes: EpisodeSpec) -> None:
        """Raises ConfigError for a function that cannot be loaded or asks for other arguments."""
        spec = episodes.agent or ""
        require("agents", KEY)
        for name in ("NO_PROXY", "no_proxy"):  # of this process and its commands
            hosts = [host for host in (os.environ.get(name), LOOPBACK) if host]
            os.environ[name] = ",".join(hosts)
        self.words = episodes.agent_words  # of a command; (): it is a function
        self._openai: Any = None  # the client whose connections all episodes share
        if self.words:
            if shutil.which(self.words[0]) is None:
                raise ConfigError(f"{KEY}: expected {FORMS}, got {spec!r}: no such program")
            return
        self._solve = load_function(spec, KEY, FORMS)
        signature = inspect.signature(self._solve)
        given = dict.fromkeys(("row", "client", "base_url", "api_key"))
        try:
            signature.bind(**accepted_arguments(self._solve, given))
        except TypeError as error:
            raise ConfigError(f"{KEY}: '{spec}': {error}; it gets {', '.join(given)}") from None
        self._kind = ""  # class of the client; "": the function takes none
        if "client" in signature.parameters:
            self._kind = "AsyncOpenAI" if inspect.iscoroutinefunction(self._solve) else "OpenAI"

    def run(
        self, row: Mapping[str, Any], base_url: str, api_key: str, awaited: Callable[[Any], Any]
    ) -> Value:
        """Run an episode. `awaited` returns the result of a coroutine. Raises what the agent
        raises, and ValueError for a result that is no reward."""
        if self.words:
            return self._execute(row, base_url, api_key)
        shown = {name: with_images(value) for name, value in row.items()}
        given: dict[str, Any] = {"row": shown, "base_url": base_url, "api_key": api_key}
        if self._kind:
            given["client"] = self._client(base_url, api_key)
        returned = self._solve(**accepted_arguments(self._solve, given))
        if isinstance(returned, Awaitable):
            returned = awaited(returned)
        return as_value(returned)

    def _client(self, base_url: str, api_key: str) -> Any:
        import openai  # takes long

        endpoint = {"base_url": base_url, "api_key": api_key}
        if self._openai is None or self._openai.is_closed():
            client_class = getattr(openai, self._kind)
            self._openai = client_class(**endpoint, timeout=None, max_retries=0)
        client = self._openai.with_options(**endpoint)
        completions = client.chat.completions
        completions.create = _without_conversion(completions.create)
        return client

    def _execute(self, row: Mapping[str, Any], base_url: str, api_key: str) -> Value:
        with tempfile.TemporaryDirectory() as folder:
            reward_file = Path(folder) / "reward"
            output_file = Path(folder) / "output"
            error_file = Path(folder) / "errors"
            variables = {
                "OPENAI_BASE_URL": base_url,
                "OPENAI_API_KEY": api_key,
                "OPENAI_MODEL": MODEL,
                "ANTHROPIC_BASE_URL": base_url.removesuffix("/v1"),  # its client adds it
                "ANTHROPIC_API_KEY": api_key,
                "EASYRL_REWARD_FILE": str(reward_file),
            }
            end_with_parent = functools.partial(LIBC.prctl, PR_SET_PDEATHSIG, signal.SIGKILL)
            words = fill_in(self.words, row)
            with output_file.open("wb") as output, error_file.open("wb") as errors:
                process = subprocess.Popen(
                    words,
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=errors,
                    env={**os.environ, **variables},
                    start_new_session=True,
                    preexec_fn=end_with_parent,  # noqa: PLW1509  it ends with its thread here
                )
            code = process.wait()
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)  # what it has left
            error_lines = error_file.read_text("utf-8", "replace")
            sys.stderr.write(error_lines[-MAX_LOGGED_CHARACTERS:])
            if code:
                printed = error_lines or output_file.read_text("utf-8", "replace")
                raise RuntimeError(_failure(words, code, printed, row))
            text = reward_file.read_text("utf-8") if reward_file.exists() else ""
            if not text:
                lines = output_file.read_text("utf-8", "replace").rstrip()
                text = lines.rpartition("\n")[2]
        try:
            return as_value(json.loads(text.strip() or "null"))
        except ValueError as error:
            raise ValueError(f"in EASYRL_REWARD_FILE or the last line: {error}") from None


def _failure(words: Sequence[str], code: int, printed: str, row: Mapping[str, Any]) -> str:
    """Return what is to be known of a command that has failed."""
    last_lines = "\n".join(printed.rstrip().splitlines()[-MAX_LAST_LINES:])
    message = f"{shlex.join(words)} ended with code {code}; its last lines:\n"
    message += last_lines[-MAX_LAST_CHARACTERS:]
    log = Path("/proc/self/fd/2").resolve()  # standard error of this process
    if log.is_file():
        message += f"\nits log: {log}"
    return f"{message}\nits row: {row!r:.{MAX_ROW_CHARACTERS}}"


def _without_conversion(create: Callable[..., Any]) -> Callable[..., Any]:
    """Send plain JSON as it is: openai's `create` takes 0.3 ms a message to convert types."""

    @functools.wraps(create)
    def call(*, messages: Any, **rest: Any) -> Any:
        with contextlib.suppress(TypeError, ValueError):  # objects of the client's classes
            json.dumps(messages)
            rest["extra_body"] = {"messages": messages} | (rest.get("extra_body") or {})
            messages = ()
        return create(messages=messages, **rest)

    return call


def fill_in(words: Sequence[str], row: Mapping[str, Any]) -> list[str]:
    """Replace `{column}` in each word of a command. Raises ConfigError for an unknown column."""
    try:
        return [Formatter().vformat(word, (), _Texts(row)) for word in words]
    except (LookupError, ValueError, AttributeError, TypeError) as error:
        raise ConfigError(
            f"{KEY}: expected names of columns in braces ({', '.join(row)}; {{{{ and }}}} are "
            f"braces), got {shlex.join(words)}: {error!r}"
        ) from None


class _Texts(Mapping[str, str]):
    """A row's values as words of a command: those that are no text as JSON."""

    def __init__(self, row: Mapping[str, Any]) -> None:
        self._row = row

    def __getitem__(self, name: str) -> str:
        value = self._row[name]
        if isinstance(value, (str, Decimal, date, time)):
            return str(value)
        try:
            if isinstance(value, Picture):
                return data_address(value)
            return json.dumps(value, default=_as_json)
        except TypeError as error:
            raise ValueError(f"column '{name}': {error}") from None

    def __iter__(self) -> Iterator[str]:
        return iter(self._row)

    def __len__(self) -> int:
        return len(self._row)


def _as_json(value: Any) -> Any:
    """Return JSON for a picture, a value of numpy, a decimal number or a date. Raises TypeError for
    other values that JSON lacks."""
    if isinstance(value, Picture):
        return data_address(value)
    if hasattr(value, "tolist"):  # of numpy
        return value.tolist()
    if isinstance(value, (Decimal, date, time)):
        return str(value)
    raise TypeError(f"expected a value of JSON, got {value!r:.80}")


def as_value(returned: Any) -> Value:
    """Convert what an agent returned. Raises ValueError."""
    if returned is None:
        return Value(None, {})
    has_names = isinstance(returned, Mapping)
    rewards: dict[Any, Any] = dict(returned) if has_names else {"": returned}
    numbers: dict[str, float] = {}
    for name, reward in rewards.items():
        is_number = hasattr(reward, "__float__") and math.isfinite(reward)
        if not (isinstance(name, str) and is_number):
            raise _no_reward(returned)
        numbers[name] = float(reward)
    if not numbers:
        raise _no_reward(returned)
    return Value(sum(numbers.values()), numbers if has_names else {})


def _no_reward(returned: Any) -> ValueError:
    expected = "expected finite numbers by name, one number, or None"
    return ValueError(f"{expected}, got {returned!r:.80}")
