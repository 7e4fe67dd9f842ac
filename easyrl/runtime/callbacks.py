"""The callbacks of a Python program: called in the controller, between two iterations.

    controller                         callbacks, one after the other
    ──────────────────────────────────────────────────────────────────
    before the workers start ────────► on_start
    after an evaluation ─────────────► on_evaluation
    after an iteration ──────────────► on_checkpoint, for each that was written meanwhile
                                       on_iteration
    after all workers have ended ────► on_end

The run waits meanwhile. What a callback does wrong ends the run with a checkpoint.
"""

import inspect
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from easyrl.config import ConfigError
from easyrl.config.hints import did_you_mean
from easyrl.user_code import user_traceback

STOP = "stop"
METHODS = {
    "on_start": 1,
    "on_iteration": 2,
    "on_evaluation": 2,
    "on_checkpoint": 2,
    "on_end": 2,
}
"""Methods of a callback, with the number of their arguments: the run, and what has happened."""
KEY = "callbacks"


class CallbackFailure(RuntimeError):
    """A callback raised an exception, which is the cause, or returned something else than None or
    "stop" (`is_user_error`)."""

    def __init__(self, message: str, *, is_user_error: bool = False) -> None:
        super().__init__(message)
        self.is_user_error = is_user_error


class Callbacks:
    """The callbacks of one run."""

    def __init__(
        self, given: Sequence[Any] = (), open_run: Callable[[], Any] = lambda: None
    ) -> None:
        """`open_run`: returns the first argument of all methods, once the run's folder exists.
        Raises ConfigError for objects that are no callbacks."""
        self._open_run = open_run
        self._run: Any = None
        self.error: BaseException | None = None  # what one of them has raised
        self.has_started = False
        self._callbacks = [*given]
        for callback in self._callbacks:
            _check(callback)

    def start(self) -> str:
        """Each method returns the name of the method that returned "stop", or "". Raises
        CallbackFailure."""
        self.has_started = True
        self._run = self._open_run()
        return self._call("on_start")

    def iteration(self, metrics: Mapping[str, Any]) -> str:
        return self._call("on_iteration", dict(metrics))

    def evaluation(self, metrics: Mapping[str, Any]) -> str:
        return self._call("on_evaluation", dict(metrics))

    def checkpoint(self, path: Path) -> str:
        return self._call("on_checkpoint", str(path))

    def end(self, status: str) -> str:
        return self._call("on_end", status)

    def _call(self, method: str, *arguments: Any) -> str:
        stopped_by = ""
        for callback in self._callbacks:
            function = getattr(callback, method, None)
            if function is None:
                continue
            name = f"callback {type(callback).__name__}.{method}"
            try:
                returned = function(self._run, *arguments)
            except Exception as error:
                self.error = error
                raise CallbackFailure(f"{name} failed:\n{user_traceback(error)}") from error
            if returned is not None and not (isinstance(returned, str) and returned == STOP):
                raise CallbackFailure(
                    f'{name}: expected None or "{STOP}", got {returned!r:.200}', is_user_error=True
                )
            if returned is not None and not stopped_by:
                stopped_by = name
        return stopped_by


def _check(callback: Any) -> None:
    """Raise ConfigError for what has no method of a callback, or one with other arguments."""
    name = type(callback).__name__
    expected = f"expected objects with methods {', '.join(METHODS)} (easyrl.Callback)"
    if isinstance(callback, type):
        raise ConfigError(
            f"{KEY}: {expected}, got the class {callback.__name__}; use {callback.__name__}()"
        )
    found = [method for method in METHODS if hasattr(callback, method)]
    others = [each for each in dir(callback) if each.startswith("on_") and each not in METHODS]
    if others:
        hint = did_you_mean(others[0], METHODS)
        raise ConfigError(f"{KEY}: {expected}, got {name} with {others[0]}{hint}")
    if not found:
        raise ConfigError(f"{KEY}: {expected}, got {callback!r:.200}")
    for method in found:
        function = getattr(callback, method)
        if inspect.iscoroutinefunction(function):
            raise ConfigError(f"{KEY}: expected a plain function, got async {name}.{method}")
        try:
            inspect.signature(function).bind(*range(METHODS[method]))
        except (TypeError, ValueError) as error:
            second = {"on_checkpoint": "path", "on_end": "status"}.get(method, "metrics")
            form = "self, run" if METHODS[method] == 1 else f"self, run, {second}"
            raise ConfigError(
                f"{KEY}: expected def {method}({form}), got {name}.{method}: {error}"
            ) from None
