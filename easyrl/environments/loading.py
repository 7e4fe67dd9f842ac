"""Resolve `rollout.environment` and `rollout.tools` in the process that runs them.

    tools    reset(**row) -> str | None; every other public method is a tool (TRL's interface)
    game     reset(**row) -> str | None; step(text) -> tuple[str, bool], and no tool
    both     optionally get_reward() -> float

A tool is described to the model by its type hints and its docstring in Google's style.
"""

import inspect
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from easyrl.config import ConfigError
from easyrl.config.hints import did_you_mean
from easyrl.config.spec import EpisodeSpec
from easyrl.user_code import load_function, user_traceback

KEY = "rollout.environment (--environment)"
TOOLS_KEY = "rollout.tools"
BUILT_IN = {"guess": "easyrl.environments.guess:Guess"}
FORMS = f"one of {', '.join(BUILT_IN)}, or file.py:Class, or package.module:Class"
NOT_TOOLS = ("reset", "get_reward")


class Interface(NamedTuple):
    """What a rollout worker has to know of an environment."""

    schemas: list[dict[str, Any]]  # of its tools, in the form that chat templates take
    is_game: bool
    has_reward: bool


Interfaces = Mapping[str, Interface]  # by the names of the environments


class Environment(NamedTuple):
    """One entry of `rollout.environment`; `make` and `first` are None with tools alone."""

    make: Callable[[], Any] | None
    first: Any  # the instance that its tools were found in
    tools: Mapping[str, Callable[..., Any]]  # `rollout.tools`, which all environments have
    methods: tuple[str, ...]  # of an instance that are tools
    interface: Interface


def load_environments(spec: EpisodeSpec, *, with_schemas: bool) -> dict[str, Environment]:
    """Load all environments and tools by name. Makes one instance of each environment.
    `with_schemas`: of the tools; transformers, which makes them, imports torch."""
    tools: dict[str, Callable[..., Any]] = {}
    schemas: list[dict[str, Any]] = []
    for tool in spec.tools:
        function = load_function(tool, TOOLS_KEY)
        tools[tool.rpartition(":")[2]] = function
        if with_schemas:
            schemas.append(_schema(TOOLS_KEY, tool, function))
    found: dict[str, Environment] = {}
    for name, environment in spec.environments.items():
        found[name] = _load(environment, tools, schemas, with_schemas)
    return found


def _load(
    spec: str | None,
    tools: Mapping[str, Callable[..., Any]],
    schemas: list[dict[str, Any]],
    with_schemas: bool,
) -> Environment:
    if spec is None:
        return Environment(None, None, tools, (), Interface(schemas, False, False))
    forms = FORMS + did_you_mean(spec, BUILT_IN)
    make = load_function(BUILT_IN.get(spec, spec), KEY, forms, "class")
    try:
        instance = make()
    except (Exception, SystemExit) as error:
        raise ConfigError(
            f"{KEY}: '{spec}' failed; it is called without arguments:\n{user_traceback(error)}"
        ) from error
    if not callable(getattr(instance, "reset", None)):
        raise ConfigError(f"{KEY}: expected '{spec}' to have a method reset")
    methods = _methods_of(type(instance))
    step = getattr(instance, "step", None)
    is_game = callable(step) and set(methods) <= {"step"} and _is_of_game(step)
    if is_game and tools:
        raise ConfigError(f"{TOOLS_KEY}: expected none beside '{spec}', a game without tools")
    if is_game:
        methods = ()
    all_schemas = list(schemas)
    if with_schemas:
        for name in methods:
            all_schemas.append(_schema(KEY, f"{spec}.{name}", getattr(instance, name)))
    has_reward = callable(getattr(instance, "get_reward", None))
    interface = Interface(all_schemas, is_game, has_reward)
    return Environment(make, instance, tools, methods, interface)


def _methods_of(environment: type) -> tuple[str, ...]:
    """Return the names of public methods that are tools. As in TRL class methods are among them,
    but no static ones."""
    found: list[str] = []
    for name, value in inspect.getmembers_static(environment):
        is_method = inspect.isfunction(value) or isinstance(value, classmethod)
        if is_method and not name.startswith("_") and name not in NOT_TOOLS:
            found.append(name)
    return tuple(found)


def _is_of_game(step: Callable[..., Any]) -> bool:
    """Whether it returns a tuple, by its type hints, or has none: then it cannot be a tool."""
    returned = inspect.signature(step).return_annotation
    return "tuple" in str(returned).lower() or not step.__annotations__


def _schema(key: str, spec: str, function: Callable[..., Any]) -> dict[str, Any]:
    from transformers.utils.chat_template_utils import get_json_schema

    try:
        return dict(get_json_schema(function))
    except Exception as error:  # of several types: a missing type hint, docstring or description
        reason = " ".join(str(error).split())
        if function.__name__ == "step":
            reason += "; the step of a game without tools needs the hint `-> tuple[str, bool]`"
        raise ConfigError(
            f"{key}: tool '{spec}': {reason}; a tool needs type hints, and a docstring with the "
            "section `Args:` that describes every argument"
        ) from None
