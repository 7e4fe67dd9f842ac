"""The environments of a rollout worker, in host processes, and their check before a run."""

from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from contextlib import closing
from typing import Any

from easyrl.config import ConfigError
from easyrl.config.spec import EpisodeSpec
from easyrl.data.row_form import ENVIRONMENT_COLUMN
from easyrl.environments.host import EnvironmentHost, Key, Loaded
from easyrl.environments.host_pool import FAILURES, HostPool, TimeLimit
from easyrl.environments.loading import KEY, Interface, Interfaces
from easyrl.environments.tool_calls.calls import Calls
from easyrl.rewards.worker import Call
from easyrl.types import Prompt


class EnvironmentPool(HostPool):
    host_class = EnvironmentHost
    repeats_calls = True

    def __init__(self, spec: EpisodeSpec, sources: Mapping[str, str]) -> None:
        seconds = spec.tool_timeout_seconds
        limit = TimeLimit(seconds, "rollout.tool_timeout_seconds")
        super().__init__(spec, sources, call_limit=limit, silence_seconds=seconds)

    def loaded(self) -> Loaded:
        """Wait until all is loaded. Raises ConfigError."""
        interfaces, reward_functions = self._wait_until_loaded()
        named = {name: Interface(*fields) for name, fields in interfaces.items()}
        return Loaded(named, reward_functions)

    def start(
        self, key: Key, name: str, row: Mapping[str, Any], seeds: Sequence[int]
    ) -> list[Future[str | None]]:
        """Start the episodes of a group, one for each seed; return their observations."""
        self._open(key)
        futures = []
        for index, seed in enumerate(seeds):
            futures.append(self._call(key, "reset", index, name, row, seed))
        return futures

    def act(self, key: Key, index: int, action: Calls | str) -> Future[Any]:
        """Send a turn's tool calls to its episode, or its text to a game. The result has the fields
        of `host.Acted`."""
        return self._call(key, "act", index, action)

    def judge(self, key: Key, call: Call) -> Future[Any]:
        """Score a group by functions that need its environments. The result has the fields of
        `Scored`."""
        rewards = self._spec.rewards
        is_own = rewards.options.timeout_seconds is not None
        key_of_limit = "reward.timeout_seconds" if is_own else "runtime.timeout_seconds"
        limit = TimeLimit(rewards.timeout_seconds, key_of_limit)
        return self._call(key, "judge", call, limit=limit)


def check_environments(spec: EpisodeSpec, example: Prompt | None) -> tuple[Interfaces, list[str]]:
    """Load all environments in a process of their own, and reset that of a prompt, if there is one
    (`reward.check`). Return their interfaces, and warnings. Raises ConfigError."""
    with closing(EnvironmentPool(spec, {})) as pool:
        interfaces = pool.loaded().interfaces
        if spec.rewards.options.check and example is not None:
            name = name_of(example, interfaces)
            (observation,) = pool.start((0,), name, row_of(example, name), [0])
            try:
                pool.wait_for(observation)
            except FAILURES as error:
                raise ConfigError(f"{KEY}: reset failed on the first row:\n{error}") from None
    is_used = "environment" in spec.rewards.functions
    has_reward = any(each.has_reward for each in interfaces.values())
    if is_used and not has_reward:
        raise ConfigError(
            "reward.functions (--reward): expected reward functions, because the environment has "
            "no method get_reward, got none"
        )
    warnings = []
    if has_reward and not is_used:
        warnings.append(
            "warning: get_reward is not used; to use it: 'environment' in reward.functions"
        )
    return interfaces, warnings


def name_of(prompt: Prompt, interfaces: Interfaces) -> str:
    """Return the name of a prompt's environment; the only one has the name ""."""
    return "" if "" in interfaces else str(prompt.columns[ENVIRONMENT_COLUMN])


def row_of(prompt: Prompt, name: str = "") -> dict[str, Any]:
    """Return the arguments of `reset`: the row, without the column that names its environment."""
    row = {"prompt": prompt.content, **prompt.columns}
    if name:
        del row[ENVIRONMENT_COLUMN]
    return row
