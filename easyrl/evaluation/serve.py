"""`easyrl agent serve`: the endpoint that agents get, without training, to try one first."""

import time
from concurrent.futures import Future
from dataclasses import replace
from itertools import count
from multiprocessing.connection import wait
from pathlib import Path
from tempfile import TemporaryDirectory
from types import SimpleNamespace
from typing import Any

from easyrl.agents.endpoint import Endpoint
from easyrl.agents.episodes import AgentEpisodes
from easyrl.agents.protocols.base import Request
from easyrl.agents.sequences import Episode, Group
from easyrl.config import Config, ConfigError
from easyrl.engines.embedded import EmbeddedEngine
from easyrl.model.export import find_model
from easyrl.model.loading import load_policy, picture_input
from easyrl.model.prompt_renderer import PromptRenderer
from easyrl.observe.text import say
from easyrl.runtime.placement import device_name, place_evaluation
from easyrl.runtime.resolve import episodes_of, resolve
from easyrl.types import Prompt
from easyrl.workers.rollout import sampling_settings

NUM_ROWS = 16  # requests at a time


class _Requests(AgentEpisodes):
    """Every request, with any key, is an episode of its own."""

    _numbers = count()

    def _accept(self, request: Request) -> None:
        number = next(self._numbers)
        request.key = f"\0{number}"  # no client has such a key
        prompt = Prompt(0, "", {})
        group = Group((number,), prompt, 1, started=time.monotonic())
        episode = Episode(group, 0, request.key, Future())
        self._episodes[request.key] = episode
        super()._accept(request)

    def advance(self) -> list[Any]:
        finished = super().advance()
        for episode in list(self._episodes.values()):
            if not (episode.waiting or episode.answering):
                self._close(episode)
                self._engine.shown.forget(episode.group.key)
        return finished


def serve(config: Config, port: int) -> None:
    """Serve a config's model on one of `devices.infer` until interrupted. Raises ConfigError."""
    source = find_model(config.model.path)
    spec = resolve(config)
    episodes = episodes_of(config, spec.rewards)
    endpoint = Endpoint(episodes, spec.sampling, port)
    endpoint.takes_any_key = True
    with_base = replace(spec, model=replace(spec.model, path=source.base))
    placement = place_evaluation(with_base, NUM_ROWS, 1)
    trust = spec.model.trust_remote_code
    device = device_name(placement.accelerator, placement.indices_of("rollout", 0)[:1])
    with TemporaryDirectory() as scratch:
        path = source.make(Path(scratch) / "model", trust=trust)
        model = replace(spec.model, path=path)
        renderer = PromptRenderer.of(model)
        policy = load_policy(
            path,
            device,
            trust_remote_code=trust,
            dtype=model.dtype,
            pictures=picture_input(model),
        )
    if policy.no_packing_reason is not None:
        raise ConfigError(f"model.path: '{spec.model.path}': {policy.no_packing_reason}")
    policy.stop_at(renderer.tokenizer.eos_token_id)
    sampling = sampling_settings(spec.engine, spec.limits, spec.sampling, has_branches=True)
    engine = EmbeddedEngine(policy, sampling, num_rows=NUM_ROWS, tokenizer=renderer.tokenizer)
    no_agents: Any = SimpleNamespace(report=say, connections=(), poll=int, loaded=int)
    requests = _Requests(episodes, no_agents, endpoint, max_open_groups=0)
    requests.bind(engine, renderer, NUM_ROWS)
    say(f"serving {spec.model.path}: OPENAI_BASE_URL={endpoint.url} OPENAI_API_KEY=any")
    while True:
        if engine.can_step:
            requests.take(engine.step())
        else:
            wait(requests.wakers)
        requests.advance()
