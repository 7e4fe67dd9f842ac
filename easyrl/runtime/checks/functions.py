"""The user's functions: environments, agents, rewards, losses and trackers, loaded and tried."""

from collections.abc import Sequence
from typing import NamedTuple

from easyrl.agents.pool import check_agent
from easyrl.config import ConfigError
from easyrl.config.spec import EpisodeSpec, RunSpec
from easyrl.data.streams import PromptStream
from easyrl.environments.loading import Interfaces
from easyrl.environments.pool import check_environments
from easyrl.formatting import require
from easyrl.model.files import fingerprint
from easyrl.model.reward_model import check_reward_models
from easyrl.rewards.builtin import BUILT_IN
from easyrl.rewards.loading import check_rewards, digest_code
from easyrl.rewards.pool import try_rewards
from easyrl.types import Prompt


class FoundInterfaces(NamedTuple):
    interfaces: Interfaces  # empty for a run without environments, and for an agent
    warnings: Sequence[str]


def find_interfaces(episodes: EpisodeSpec | None, example: Prompt | None) -> FoundInterfaces:
    """Load the environments or the agent, and try them on a prompt, if there is one. Raises
    ConfigError."""
    if episodes is None:
        return FoundInterfaces({}, ())
    if episodes.agent is not None:
        check_agent(episodes, example)
        return FoundInterfaces({}, ())
    return FoundInterfaces(*check_environments(episodes, example))


def check_reward_functions(spec: RunSpec, example: Prompt | None) -> Sequence[str]:
    """Try the reward functions and models on a prompt; without one, only load the functions."""
    check_reward_models(spec.rewards, example)
    return try_rewards(spec.rewards, example)


def check_sources(spec: RunSpec, prompts: PromptStream) -> Sequence[str]:
    """Try the rewards on every source of a mixture. Rewards get None for columns that a source
    lacks, but a built-in function that is alone must have its column."""
    warnings = []
    rewards = spec.rewards
    is_built_in = len(rewards.functions) == 1 and rewards.functions[0] in BUILT_IN
    tried = prompts.prompt(0)
    for name, own, example in prompts.first_of_each():
        try:
            if (example.content, example.columns) != (tried.content, tried.columns):
                warnings += [f"{text} ('{name}')" for text in try_rewards(rewards, example)]
            if is_built_in:
                check_rewards(rewards, own)
        except ConfigError as error:
            raise ConfigError(f"'{name}': {error}") from None
    return warnings


def check_loss(spec: RunSpec) -> None:
    """Load a loss of the user's own. Raises ConfigError."""
    if spec.loss.is_own:
        from easyrl.algorithm.losses import load_loss

        load_loss(spec.loss)


def check_trackers(spec: RunSpec) -> None:
    """Raise ConfigError for a tracker that is not installed."""
    for name in spec.trackers:
        require(name, f"output.log_to: '{name}'")


def warn_of_biased_sampling(spec: RunSpec) -> Sequence[str]:
    top_k = spec.sampling.top_k
    top_p = spec.sampling.top_p
    if (top_k, top_p) == (0, 1.0):
        return ()
    return [
        f"warning: with rollout.top_k={top_k}, rollout.top_p={top_p} completions are not sampled "
        "from the trained distribution, so the gradient is biased"
    ]


def identify_code(spec: RunSpec) -> dict[str, str]:
    """Digest the user's files, and the reward models, by the keys that name them."""
    digests = digest_code(spec.code, spec.rewards.options.judge)
    key = "reward.functions"
    of_models = [fingerprint(path) for path in spec.rewards.models]
    digests[key] = " ".join([digests[key], *of_models]).strip()
    return digests
