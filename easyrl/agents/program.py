"""The user's agent: a function or a command, called in the processes of environments (`host`).

solve(row, client, base_url, api_key) -> number | {name: number} | None
a command: {column} of its words is replaced; OPENAI_BASE_URL and OPENAI_API_KEY lead to the
endpoint; its reward is in EASYRL_REWARD_FILE or in the last line of its output
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
import tempfile
from collections.abc import Awaitable, Callable, Mapping, Sequence
from pathlib import Path
from string import Formatter
from typing import Any

from easyrl.config import ConfigError
from easyrl.config.spec import EpisodeSpec
from easyrl.devices import LOOPBACK
from easyrl.formatting import require
from easyrl.rewards.loading import accepted_arguments
from easyrl.user_code import load_function

KEY = "rollout.agent (--agent)"
FORMS = 'file.py:function, package.module:function, or a command, as in "python run.py {column}"'
MODEL = "policy"  # name of the model at the endpoint; requests may have any
LIBC = ctypes.CDLL(None)
Value = tuple[float | None, dict[str, float]]
"""An episode's reward, if there is one, and the named ones that it is the sum of."""


class Agent:
    """The agent of a process: call it with the arguments of an episode."""

    def __init__(self, episodes: EpisodeSpec) -> None:
        """Raises ConfigError for a function that cannot be loaded or asks for other arguments."""
        spec = episodes.agent or ""
        require("agents", KEY)
        for name in ("NO_PROXY", "no_proxy"):  # of this process and its commands
            os.environ[name] = ",".join(filter(None, (os.environ.get(name), LOOPBACK)))
        self.words = episodes.agent_words
        self._openai: Any = None  # the client whose connections all episodes share
        if self.words:
            if shutil.which(self.words[0]) is None:
                raise ConfigError(f"{KEY}: expected {FORMS}, got {spec!r}: no such program")
            return
        self._solve = load_function(spec, KEY, FORMS)
        given = dict.fromkeys(("row", "client", "base_url", "api_key"))
        try:
            inspect.signature(self._solve).bind(**accepted_arguments(self._solve, given))
        except TypeError as error:
            raise ConfigError(f"{KEY}: '{spec}': {error}; it gets {', '.join(given)}") from None
        self._kind = ""
        if "client" in inspect.signature(self._solve).parameters:
            self._kind = "AsyncOpenAI" if inspect.iscoroutinefunction(self._solve) else "OpenAI"

    def run(
        self, row: Mapping[str, Any], base_url: str, api_key: str, awaited: Callable[[Any], Any]
    ) -> Value:
        """Run an episode. `awaited` returns the result of a coroutine. Raises what the agent
        raises, and ValueError for a result that is no reward."""
        if self.words:
            return self._execute(row, base_url, api_key)
        given: dict[str, Any] = {"row": dict(row), "base_url": base_url, "api_key": api_key}
        if self._kind:
            given["client"] = self._client(base_url, api_key)
        returned = self._solve(**accepted_arguments(self._solve, given))
        if isinstance(returned, Awaitable):
            returned = awaited(returned)
        return as_value(returned)

    def _client(self, base_url: str, api_key: str) -> Any:
        import openai  # takes long

        where = {"base_url": base_url, "api_key": api_key}
        if self._openai is None or self._openai.is_closed():
            self._openai = getattr(openai, self._kind)(**where, timeout=None, max_retries=0)
        client = self._openai.with_options(**where)
        completions = client.chat.completions
        completions.create = _without_conversion(completions.create)
        return client

    def _execute(self, row: Mapping[str, Any], base_url: str, api_key: str) -> Value:
        own = {"OPENAI_BASE_URL": base_url, "OPENAI_API_KEY": api_key, "OPENAI_MODEL": MODEL}
        with tempfile.TemporaryDirectory() as folder:
            reward, output = (Path(folder) / name for name in ("reward", "output"))
            with output.open("wb") as stdout:
                process = subprocess.Popen(
                    fill_in(self.words, row),
                    stdin=subprocess.DEVNULL,
                    stdout=stdout,
                    env={**os.environ, **own, "EASYRL_REWARD_FILE": str(reward)},
                    start_new_session=True,
                    # PR_SET_PDEATHSIG: it ends with its thread of the host.
                    preexec_fn=functools.partial(LIBC.prctl, 1, signal.SIGKILL),  # noqa: PLW1509
                )
            code = process.wait()
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)  # what it has left
            if code:
                raise RuntimeError(f"'{self.words[0]}' ended with code {code}")
            text = reward.read_text("utf-8") if reward.exists() else ""
            text = text or output.read_text("utf-8", "replace").rstrip().rpartition("\n")[2]
        try:
            return as_value(json.loads(text.strip() or "null"))
        except ValueError as error:
            raise ValueError(f"in EASYRL_REWARD_FILE or the last line: {error}") from None


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
    texts = {name: x if isinstance(x, str) else json.dumps(x) for name, x in row.items()}
    try:
        return [Formatter().vformat(word, (), texts) for word in words]
    except (LookupError, ValueError, AttributeError) as error:
        raise ConfigError(
            f"{KEY}: expected names of columns in braces ({', '.join(row)}; {{{{ and }}}} are "
            f"braces), got {shlex.join(words)}: {error!r}"
        ) from None


def as_value(returned: Any) -> Value:
    """Convert what an agent returned. Raises ValueError."""
    if returned is None:
        return None, {}
    named = dict(returned) if isinstance(returned, Mapping) else {"": returned}
    are_finite = (hasattr(x, "__float__") and math.isfinite(x) for x in named.values())
    if not (named and all(isinstance(name, str) for name in named) and all(are_finite)):
        problem = "expected finite numbers by name, one number, or None"
        raise ValueError(f"{problem}, got {returned!r:.80}")
    numbers = {name: float(value) for name, value in named.items()}
    return sum(numbers.values()), numbers if isinstance(returned, Mapping) else {}
