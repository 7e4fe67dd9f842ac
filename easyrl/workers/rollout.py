"""The rollout worker: prompts in; completions, rewards, advantages; groups into the ring.

    controller ──Generate──► engine ──completions──► reward processes
                               ▲                          │ rewards
    train worker ──weights─────┘                          ▼
                                    ring ◄── group ◄── advantages

With environments (`episodes`) they act between two turns of a completion. The loop alternates
between one engine step and everything else.
"""

import time
import zlib
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from typing import Any, cast

import numpy as np

from easyrl import events
from easyrl.algorithm.advantages import group_advantages
from easyrl.channels.ring_buffer import RingPort
from easyrl.config import ConfigError
from easyrl.config.rollout import SamplingChoice
from easyrl.config.spec import EngineSpec, RolloutSpec, TokenLimits
from easyrl.data.chat import render_prompt
from easyrl.engines.base import Engine, GroupRequest
from easyrl.engines.embedded import EmbeddedEngine
from easyrl.engines.generate import GenerateEngine
from easyrl.engines.sampling import SamplingSettings
from easyrl.environments.base import Episodes
from easyrl.environments.episodes import EnvironmentEpisodes
from easyrl.environments.pool import EnvironmentPool
from easyrl.environments.single_turn import SingleTurns
from easyrl.layout.row import group_tree
from easyrl.model.files import tokenizer_of
from easyrl.model.loading import load_policy
from easyrl.processes import maybe_sleep, pin
from easyrl.rewards.pool import POLL_SECONDS, RewardPool, weighted_sum
from easyrl.rewards.worker import Call, Scored, TrainerState
from easyrl.types import (
    BrokenInvariant,
    Completion,
    Float32,
    IndexedPrompt,
    Messages,
    Prompt,
    RolloutGroup,
)
from easyrl.workers.core_sharing import WorkerCores
from easyrl.workers.settings import WorkerSettings
from easyrl.workers.timeline import Timeline

TRAIN, EVALUATE = 0, 1
Key = tuple[int, int, int]
"""(TRAIN, iteration, prompt index) or (EVALUATE, round, prompt index): it seeds sampling."""


@dataclass(slots=True)
class _Group:
    """A group of this worker, from its command until its report."""

    index: int  # in its iteration
    prompt: Prompt
    known: int | None  # checksum of what a dead worker has delivered
    # Once it is generated and being scored:
    prompt_ids: Sequence[int] = ()
    completions: Sequence[Completion] = ()  # [G]
    text: str = ""  # of the prompt, with the first episode's observation
    texts: Sequence[str] = ()  # of its completions; of episodes, the conversations
    scoring_started: float = 0.0
    episodes: Mapping[str, Sequence[Any]] = field(default_factory=dict)  # lists [G] by key


class RolloutWorker:
    def __init__(
        self, settings: WorkerSettings, port: RingPort | None, control: Connection
    ) -> None:
        """`port` is None in an evaluation, which has no ring."""
        self.settings = settings
        assert isinstance(settings.spec, RolloutSpec)
        self.spec = settings.spec
        self.port = port
        self.sampling = self.spec.sampling
        self.control = control
        self.timeline = Timeline(control.send, settings.clock_offset_seconds)

        def report(text: str) -> None:
            control.send(events.Note(f"{settings.name}: {text}"))

        # It starts meanwhile.
        of_models = settings.reward_environment
        self.reward_pool = RewardPool(self.spec.rewards, settings.sources or {}, report, of_models)
        self.episodes = self._make_episodes(report)
        self.cores = WorkerCores(settings.num_threads, settings.cores, settings.core_sharing)
        pin(settings.cores)  # after these processes: they may run on any core
        control.send(events.Starting("loading the model"))
        try:
            self.tokenizer, self.engine = self._load()
            self.engine.report, self.engine.use_cores = report, self.cores.use_available
            num_rows = settings.max_concurrent_groups * self.sampling.num_samples
            self.episodes.bind(self.engine, self.tokenizer, num_rows)
        except BaseException:
            self._close_pools()
            raise
        self.policy_version = -1
        self._channel_error = ""  # why the worker is not in the weight channel
        self._deferred: deque[events.Command] = deque()  # received during an exchange
        self._iteration = -1
        self._busy_seconds = 0.0  # of the engine, in this iteration
        self._is_last_round = False
        self._groups: dict[Key, _Group] = {}
        self._outbox: deque[tuple[RolloutGroup, events.GroupScored | None]] = deque()
        """Groups for the ring, with their reports if these have not been sent."""

    def _make_episodes(self, report: Callable[[str], None]) -> Episodes:
        """Start the processes of environments or an agent, if there are any."""
        spec = self.spec.episodes
        if spec is None:
            return SingleTurns(self.spec.chat_template_kwargs)
        sources = self.settings.sources or {}
        most = self.settings.max_concurrent_groups
        if spec.agent is None:
            environments = EnvironmentPool(spec, sources)
            environments.report = report
            return EnvironmentEpisodes(spec, environments, max_open_groups=most)
        from easyrl.agents.endpoint import Endpoint  # of the extra `agents`
        from easyrl.agents.episodes import AgentEpisodes
        from easyrl.agents.pool import AgentPool

        agents = AgentPool(spec, sources)
        agents.report = report
        endpoint = Endpoint(spec, self.sampling)
        return AgentEpisodes(spec, agents, endpoint, max_open_groups=most)

    def _load(self) -> tuple[Any, Engine]:
        spec, model = self.spec, self.spec.model
        tokenizer = tokenizer_of(model)
        has_branches = spec.episodes is not None and spec.episodes.agent is not None
        sampling = sampling_settings(
            spec.engine, spec.limits, self.sampling, has_branches=has_branches
        )
        if self.settings.engine == "vllm":
            return tokenizer, self._start_vllm(tokenizer, sampling)
        trusted, device = model.trust_remote_code, self.settings.device
        policy = load_policy(model.path, device, trust_remote_code=trusted, dtype=model.dtype)
        policy.stop_at(tokenizer.eos_token_id)
        self.control.send(events.Starting("preparing the engine"))
        if policy.no_packing_reason is not None:  # the train worker reports it
            if spec.episodes is not None:
                raise ConfigError(
                    f"{spec.episodes.key}: expected a model that the embedded engine or "
                    f"vLLM can serve, got {model.path}: {policy.no_packing_reason}"
                )
            return tokenizer, GenerateEngine(policy, sampling, tokenizer=tokenizer)
        num_rows = self.settings.max_concurrent_groups * self.sampling.num_samples
        return tokenizer, EmbeddedEngine(policy, sampling, num_rows=num_rows, tokenizer=tokenizer)

    def _start_vllm(self, tokenizer: Any, sampling: SamplingSettings) -> Engine:
        from easyrl.engines.vllm.engine import VllmEngine

        self.control.send(events.Starting("starting vLLM"))
        settings, spec = self.settings, self.spec.engine
        return VllmEngine(
            self.spec.model,
            sampling,
            device=settings.device,
            stop_at=tokenizer.eos_token_id,
            max_concurrent_groups=settings.max_concurrent_groups,
            num_generations=self.sampling.num_samples,
            memory_fraction=settings.memory_fraction or spec.memory_fraction or 0.9,
            is_device_shared=settings.memory_fraction is not None,
            tensor_parallel_size=spec.tensor_parallel_size,
            log_file=settings.log_file,
            is_deterministic=spec.is_deterministic,
            number=settings.owner_id,
        )

    def run(self) -> None:
        try:
            while True:
                self._wait_for_work()
                if self._deferred or self.control.poll():
                    command = self._deferred.popleft() if self._deferred else self.control.recv()
                    if not self._obey(command):
                        return
                if self.engine.can_step and not self._outbox:
                    self._generate()
                for finished in self.episodes.advance():
                    self._score(*finished)
                for key, scored in self.reward_pool.finished():
                    self._finish_group(cast(Key, key), scored)
                self._publish()
        finally:
            self.engine.close()
            self._close_pools()

    def _close_pools(self) -> None:
        self.reward_pool.close()
        self.episodes.close()

    def _wait_for_work(self) -> None:
        if self._deferred or (self.engine.can_step and not self._outbox):
            return
        wakers: list[Connection | int] = [self.control, self.reward_pool.fileno()]
        wakers += self.episodes.wakers
        is_scoring = any(group.completions for group in self._groups.values())
        is_short = self.episodes.has_work  # `advance` looks for calls that take too long
        if self._outbox:
            assert self.port is not None
            wakers.append(self.port.writable_fd)
        acts = self.engine.has_work and not self.engine.can_step  # all wait for environments
        shown_as: events.SpanKind = "score" if is_scoring or acts else "wait"
        measured = self.timeline.measure("wait", shown_as=shown_as, is_short=is_short)
        with self.cores.idle(), measured:
            # Record one span for all wake-ups: each report resets the watchdog.
            while not wait(wakers, POLL_SECONDS if is_scoring or is_short else None):
                if self.reward_pool.is_broken or is_short:
                    break

    def _obey(self, command: events.Command) -> bool:
        match command:
            case events.InitWeightChannel(rank, world_size, generation):
                self._join_weights(rank, world_size, generation)
            case events.ExchangeWeights(version):
                self._receive_weights(version)
            case events.Generate(iteration, prompts, is_last_round, known):
                if iteration != self._iteration:
                    self._iteration, self._busy_seconds = iteration, 0.0
                self._is_last_round = is_last_round  # rounds do not overlap
                num_generations = self.sampling.num_samples
                self._submit(TRAIN, iteration, prompts, num_generations, known)
            case events.Evaluate(round_, prompts, num_samples, known):
                self._submit(EVALUATE, round_, list(enumerate(prompts)), num_samples, known)
            case events.Stop():
                return False
        return True

    def _join_weights(self, rank: int, world_size: int, generation: int) -> None:
        endpoint = self.settings.weight_endpoint(rank, world_size, generation)
        try:
            self.engine.join_weights(endpoint, self._is_cancelled)
            self._channel_error = ""
        except (ConnectionError, TimeoutError) as error:
            self._channel_error = str(error)

    def _receive_weights(self, version: int) -> None:
        if self._groups or self._outbox:
            raise BrokenInvariant(
                f"received weights {version} while groups of the old policy are in progress"
            )
        if not self._channel_error:
            try:
                with self.timeline.measure("weights"):
                    self.engine.receive_weights(version)
                self.policy_version = version
            except (ConnectionError, TimeoutError) as error:
                self._channel_error = str(error)
        self.control.send(events.WeightsExchanged(version, self._channel_error))

    def _is_cancelled(self) -> bool:
        while self.control.poll():
            self._deferred.append(self.control.recv())
        return any(isinstance(each, events.CancelExchange | events.Stop) for each in self._deferred)

    def _submit(
        self,
        kind: int,
        number: int,
        prompts: Sequence[IndexedPrompt],
        num_generations: int,
        known: Mapping[int, int],
    ) -> None:
        for group_index, prompt in prompts:
            key = kind, number, prompt.index
            self._groups[key] = _Group(group_index, prompt, known.get(prompt.index))
            self.episodes.submit(key, prompt, num_generations)

    def _render(self, content: str | Messages) -> list[int]:
        return render_prompt(content, self.tokenizer, self.spec.chat_template_kwargs)

    def _generate(self) -> None:
        started = self.timeline.begin("generate")
        maybe_sleep()
        self.cores.use_available()
        num_prompt_tokens = self.engine.num_prompt_tokens
        num_completion_tokens = self.engine.num_completion_tokens
        finished = self.engine.step()
        num_prefilled = self.engine.num_prompt_tokens - num_prompt_tokens
        num_generated = self.engine.num_completion_tokens - num_completion_tokens
        kind: events.SpanKind = "prefill" if num_prefilled > num_generated else "generate"
        self._busy_seconds += self.timeline.add(kind, started, num_generated)
        for request, completions in self.episodes.take(finished):
            self._score(request, completions)

    def _score(self, request: GroupRequest, completions: list[Completion]) -> None:
        """Send a group to the rewards; drop it if a dead worker has delivered it."""
        key = cast(Key, request.key)
        group = self._groups[key]
        content, answers = self.episodes.finish(key, completions)
        if group.known is not None:
            del self._groups[key]
            self.episodes.forget(key)
            if checksum(completions) != group.known:
                raise BrokenInvariant(
                    f"group {group.index} of iteration {key[1] + 1} (prompt {group.prompt.index}) "
                    "was generated again after its worker's death, and differs"
                )
            self.control.send(events.GroupRecomputed(group.prompt.index))
            return
        group.prompt_ids, group.completions = request.prompt_ids, completions
        group.text, group.texts = _as_text(content), [_as_text(each) for each in answers]
        group.scoring_started = time.monotonic()
        ids = [each.token_ids[each.is_sampled].tolist() for each in completions]
        state = TrainerState(self.policy_version, self.spec.num_updates)
        call = Call(content, answers, ids, group.prompt.columns, state)
        elsewhere = self.episodes.judge(key, call)
        self.reward_pool.submit(key, call, elsewhere)

    def _finish_group(self, key: Key, scored: Scored) -> None:
        kind, number, _ = key
        group = self._groups.pop(key)
        self.timeline.add("score", group.scoring_started)
        metrics, group.episodes = self.episodes.forget(key)
        scored = scored._replace(metrics=scored.metrics | metrics)
        rewards = np.full(len(group.texts), np.nan, dtype=np.float32)  # of a skipped one
        if scored.scores:
            rewards = weighted_sum(scored.scores, self.spec.rewards.weights)
        if kind == TRAIN:
            self._deliver(number, group, scored, rewards)
            return
        answer = events.PromptEvaluated(
            number,
            group.prompt.index,
            self._samples(group, scored, rewards, np.zeros_like(rewards), is_kept=True),
            group.text,
            errors=scored.errors,
            logged=scored.metrics,
            checksum=checksum(group.completions),
        )
        self.control.send(answer)

    def _deliver(self, iteration: int, own: _Group, scored: Scored, rewards: Float32) -> None:
        """Put a scored group into the outbox, or reject an unwanted one: another prompt replaces
        it. In the last round none is rejected: completions count in the loss's denominator."""
        how, completions = self.spec.advantages, own.completions
        is_skipped = not scored.scores
        trained_rewards = np.zeros_like(rewards) if is_skipped else rewards
        has_equal_rewards = bool((trained_rewards == trained_rewards[0]).all())
        is_unwanted = is_skipped or (how.dynamic_sampling and has_equal_rewards)
        is_rejected = is_unwanted and not self._is_last_round
        content = own.prompt.teacher_content
        of_teacher = [] if content is None else self._render(content)
        if len(of_teacher) > (longest := self.spec.limits.max_prompt_length):
            raise ConfigError(
                f"data.max_prompt_length: expected prompts of the teacher of at most {longest} "
                f"tokens, got {len(of_teacher)} in prompt {own.prompt.index}"
            )
        tree = group_tree(len(own.prompt_ids), completions)
        group = RolloutGroup(
            iteration=iteration,
            policy_version=self.policy_version,
            group_index=own.index,
            prompt_index=own.prompt.index,
            prompt_ids=np.array(own.prompt_ids, dtype=np.int32),
            teacher_prompt_ids=np.array(of_teacher, dtype=np.int32),
            completion_lengths=np.array([len(c.token_ids) for c in completions], dtype=np.int32),
            completion_ids=np.concatenate([completion.token_ids for completion in completions]),
            rollout_logprobs=np.concatenate([completion.logprobs for completion in completions]),
            loss_mask=np.concatenate([completion.is_sampled for completion in completions]),
            rewards=trained_rewards,
            advantages=group_advantages(
                trained_rewards * how.has_rewards,
                how.scale,
                how.estimator,
            ),
            truncated=np.array([c.finish_reason == "length" for c in completions]),
            node_lengths=tree.lengths.astype(np.int32),
            node_parents=tree.parents.astype(np.int32),
        )
        kept = self.spec.num_samples_kept
        is_sample = (kept is None or own.index < kept) and not is_rejected
        samples = self._samples(own, scored, rewards, group.advantages, is_kept=is_sample)
        report = events.GroupScored(
            iteration=iteration + 1,
            group_index=own.index,
            prompt_index=own.prompt.index,
            rewards=rewards.tolist(),
            rewards_by_function=scored.scores,
            completion_lengths=[completion.num_sampled for completion in completions],
            num_truncated=int(group.truncated.sum()),
            busy_seconds=self._busy_seconds,
            errors=scored.errors,
            is_skipped=is_skipped,
            is_unwanted=is_unwanted,
            is_rejected=is_rejected,
            logged=scored.metrics,
            prompt=own.text,
            columns=own.prompt.references() if is_sample else {},
            samples=samples if is_sample else (),
            shown=samples[0],
            checksum=checksum(completions),
            num_inserted_tokens=sum(completion.num_inserted for completion in completions),
            num_prompt_tokens=sum(c.num_read_before(len(own.prompt_ids)) for c in completions),
        )
        if is_rejected:
            self.control.send(report)
        else:
            self._outbox.append((group, report))

    def _samples(
        self, group: _Group, scored: Scored, rewards: Float32, advantages: Float32, *, is_kept: bool
    ) -> list[events.Sample]:
        """Return the completions of a group as samples.jsonl keeps them, with all tokens of prompt
        and completion as texts. Where it keeps none: the first completion, without these."""
        names = self.spec.rewards.names
        scores = scored.scores or [[None] * len(rewards)] * len(names)  # [] if it is skipped
        decode = self.tokenizer.decode
        prompt = decode(group.prompt_ids) if is_kept else ""
        return [
            events.Sample(
                group.texts[n],
                float(rewards[n]),
                float(advantages[n]),
                {name: values[n] for name, values in scored.columns.items()},
                {name: of_all[n] for name, of_all in zip(names, scores, strict=True)},
                completion.num_sampled,
                completion.finish_reason == "length",
                (prompt, decode(completion.token_ids.tolist())) if is_kept else (),
                {key: values[n] for key, values in group.episodes.items()},
                completion.num_inserted,
            )
            for n, completion in enumerate(group.completions if is_kept else group.completions[:1])
        ]

    def _publish(self) -> None:
        """Put finished groups into the ring while it has free slots. Each is reported before: if
        this worker dies, the controller knows all groups that the ring may have."""
        while self._outbox:
            assert self.port is not None
            group, report = self._outbox[0]
            if report is not None:
                if not wait([self.port.writable_fd], timeout=0.0):
                    return
                maybe_sleep()
                self.control.send(report)
                self._outbox[0] = group, None
            if not self.port.put(group):  # another worker was faster
                return
            self._outbox.popleft()


def sampling_settings(
    engine: EngineSpec, limits: TokenLimits, choice: SamplingChoice, *, has_branches: bool
) -> SamplingSettings:
    """Return the settings of an engine. `has_branches`: prompts may have what others sampled."""
    longest, most = limits.max_prompt_length, choice.max_completion_length
    return SamplingSettings(
        max_prompt_length=longest + most * has_branches,
        max_completion_length=most,
        max_length=longest + most,
        temperature=choice.temperature,
        top_k=choice.top_k,
        top_p=choice.top_p,
        stop=engine.stop,
        seed=engine.seed,
    )


def checksum(completions: Sequence[Completion]) -> int:
    """Return the CRC-32 of a group's token ids, log-probabilities and trees."""
    arrays = list[np.ndarray[Any, Any]]()
    for each in completions:
        arrays += [each.token_ids, each.logprobs]
        if each.tree is not None:
            arrays += [each.tree.lengths, each.tree.parents]
    return zlib.crc32(b"".join(array.tobytes() for array in arrays))


def _as_text(content: str | Messages) -> str:
    if isinstance(content, str):
        return content
    return "\n".join(f"{message['role']}: {message['content']}" for message in content)
