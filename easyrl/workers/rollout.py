"""The rollout worker: prompts in; completions, rewards, advantages; groups into the ring.

    controller ──Generate──► engine ──completions──► reward processes
                               ▲                          │ rewards
    train worker ──weights─────┘                          ▼
                                    ring ◄── group ◄── advantages

What happens between two turns of a completion is up to its episodes (`environments.base`). The loop
alternates between one engine step and everything else.
"""

import time
import zlib
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from typing import Any, NamedTuple, cast

import numpy as np

from easyrl import events
from easyrl.algorithm.advantages import group_advantages
from easyrl.channels.ring_buffer import RingPort
from easyrl.config import ConfigError
from easyrl.config.rollout import SamplingChoice
from easyrl.config.spec import EngineSpec, RolloutSpec, TokenLimits
from easyrl.data.chat import render_prompt, special_stops
from easyrl.data.pictures import thumbnail
from easyrl.engines.base import Engine, GroupRequest
from easyrl.engines.embedded import EmbeddedEngine
from easyrl.engines.generate import GenerateEngine
from easyrl.engines.sampling import SamplingSettings
from easyrl.engines.shown import with_placeholders
from easyrl.environments.base import Episodes
from easyrl.environments.episodes import EnvironmentEpisodes
from easyrl.environments.pool import EnvironmentPool
from easyrl.environments.single_turn import SingleTurns
from easyrl.layout.row import group_tree
from easyrl.model.loading import load_policy, picture_input
from easyrl.model.prompt_renderer import PromptRenderer
from easyrl.processes import maybe_sleep, pin
from easyrl.rewards.functions import RewardError
from easyrl.rewards.pool import POLL_SECONDS, RewardPool, ScoredGroup, weighted_sum
from easyrl.rewards.worker import Call, TrainerState
from easyrl.types import (
    BrokenInvariant,
    Completion,
    Float32,
    GroupKey,
    IndexedPrompt,
    Int32,
    PlacedPictures,
    Prompt,
    RolloutGroup,
    as_text,
    no_tokens,
)
from easyrl.workers.core_sharing import WorkerCores
from easyrl.workers.settings import WorkerSettings
from easyrl.workers.timeline import Timeline

TRAIN = 0
EVALUATE = 1
DEFAULT_MEMORY_FRACTION = 0.9  # of a device that an engine has for itself


@dataclass(slots=True)
class _Group:
    """A group of this worker, from its command until its report."""

    index: int  # in its iteration
    prompt: Prompt
    known_checksum: int | None  # of the group as a dead worker reported it; None: none did
    # Set once the group is generated and is being scored:
    prompt_ids: Sequence[int] = ()
    pictures: Sequence[PlacedPictures] = ()  # in the prompt and the completions
    completions: Sequence[Completion] = ()  # [G]
    text: str = ""  # of the prompt, with the first episode's observation
    texts: Sequence[str] = ()  # of its completions; of episodes, the conversations
    scoring_started: float = 0.0
    episodes: Mapping[str, Sequence[Any]] = field(default_factory=dict)
    """What is shown of its episodes, as {"ended_by": ["answer", "length"]}: [G] each."""


@dataclass(slots=True)
class _Outgoing:
    """A group for the ring."""

    group: RolloutGroup
    report: events.GroupScored | None  # None: it has been sent


class _GroupFiles(NamedTuple):
    """The image files of a group, and the places where they are shown, as in `RolloutGroup`."""

    files: list[bytes]
    numbers: list[int]
    starts: list[int]
    stops: list[int]


class _Judged(NamedTuple):
    """A scored group, and what is done with it."""

    rewards: Float32  # [G]; NaN in a skipped group
    is_skipped: bool
    is_unwanted: bool  # another prompt should replace it
    is_rejected: bool  # another prompt replaces it


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

        # The processes of rewards and environments start while this one loads the model.
        of_models = settings.reward_environment
        self.reward_pool = RewardPool(self.spec.rewards, settings.sources or {}, report, of_models)
        self.episodes = self._make_episodes(report)
        self.cores = WorkerCores(settings.num_threads, settings.cores, settings.core_sharing)
        pin(settings.cores)  # after these processes have started: they may run on any core
        control.send(events.Starting("loading the model"))
        try:
            self.renderer = PromptRenderer.of(self.spec.model)
            self.tokenizer = self.renderer.tokenizer
            self.engine = self._make_engine()
            self.engine.report = report
            self.engine.use_cores = self.cores.use_available
            self.episodes.bind(self.engine, self.renderer, self._num_rows)
        except BaseException:
            self._close_pools()
            raise
        self.policy_version = -1
        self._channel_error = ""  # why the worker is not in the weight channel
        self._deferred: deque[events.Command] = deque()  # received during an exchange
        self._iteration = -1
        self._busy_seconds = 0.0  # of the engine, in this iteration
        self._is_last_round = False
        self._groups: dict[GroupKey, _Group] = {}
        self._outbox: deque[_Outgoing] = deque()

    @property
    def _num_rows(self) -> int:
        """Most sequences that the engine generates at a time."""
        return self.settings.max_concurrent_groups * self.sampling.num_samples

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

    def _make_engine(self) -> Engine:
        """Load the model into an engine. Raises ConfigError."""
        spec = self.spec
        model = spec.model
        has_branches = spec.episodes is not None and spec.episodes.agent is not None
        sampling = sampling_settings(
            spec.engine, spec.limits, self.sampling, has_branches=has_branches
        )
        if self.settings.has_vllm:
            return self._start_vllm(sampling)
        policy = load_policy(
            model.path,
            self.settings.device,
            trust_remote_code=model.trust_remote_code,
            dtype=model.dtype,
            pictures=picture_input(model),
        )
        policy.stop_at(self.tokenizer.eos_token_id)
        self.control.send(events.Starting("preparing the engine"))
        reason = policy.no_packing_reason
        if reason is None:
            return EmbeddedEngine(
                policy, sampling, num_rows=self._num_rows, tokenizer=self.tokenizer
            )
        if spec.episodes is not None:
            raise ConfigError(
                f"{spec.episodes.key}: expected a model that the embedded engine or "
                f"vLLM can serve, got {model.path}: {reason}"
            )
        if self.settings.owner_id == 0:
            one_by_one = "so the embedded engine completes prompts one by one, which is slower"
            self.control.send(events.Note(f"rollout.engine: {reason}, {one_by_one}"))
        return GenerateEngine(policy, sampling, tokenizer=self.tokenizer)

    def _start_vllm(self, sampling: SamplingSettings) -> Engine:
        from easyrl.engines.vllm.engine import VllmEngine

        self.control.send(events.Starting("starting vLLM"))
        settings = self.settings
        spec = self.spec.engine
        own_fraction = spec.memory_fraction or DEFAULT_MEMORY_FRACTION
        return VllmEngine(
            self.spec.model,
            sampling,
            device=settings.device,
            stop_at=self.tokenizer.eos_token_id,
            special_stops=special_stops(self.tokenizer, sampling.stop),
            max_concurrent_groups=settings.max_concurrent_groups,
            num_generations=self.sampling.num_samples,
            memory_fraction=settings.memory_fraction or own_fraction,
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
                    command = self._take_command()
                    if isinstance(command, events.Stop):
                        return
                    self._obey(command)
                try:
                    self._advance()
                except RewardError as error:
                    self._report_failed_reward(error)
                    return
        finally:
            self.engine.close()
            self._close_pools()

    def _advance(self) -> None:
        """Do what can be done without waiting: one engine step, and everything between two. Raises
        RewardError for a failed call that is to end the run."""
        if self.engine.can_step and not self._outbox:
            self._generate()
        for request, completions in self.episodes.advance():
            self._score(request, completions)
        for key, scored in self.reward_pool.finished():
            self._finish_group(cast(GroupKey, key), scored)
        self._publish()

    def _report_failed_reward(self, error: RewardError) -> None:
        """Report a call that ends the run, and wait for the end: the run may still have to write a
        checkpoint."""
        key = cast(GroupKey | None, error.key)
        iteration = None
        if key is not None and key.kind == TRAIN:
            iteration = key.number + 1
        prompt_index = None if key is None else key.prompt_index
        self.control.send(events.RewardFailed(error.call, iteration, prompt_index))
        while not isinstance(self._take_command(), events.Stop):
            pass

    def _close_pools(self) -> None:
        self.reward_pool.close()
        self.episodes.close()

    def _take_command(self) -> events.Command:
        if self._deferred:
            return self._deferred.popleft()
        command: events.Command = self.control.recv()
        return command

    def _wait_for_work(self) -> None:
        """Wait until there is something to do, with the cores lent to others."""
        if self._deferred or (self.engine.can_step and not self._outbox):
            return
        wakers: list[Connection | int] = [self.control, self.reward_pool.fileno()]
        wakers += self.episodes.wakers
        if self._outbox:
            assert self.port is not None
            wakers.append(self.port.writable_fd)
        is_scoring = any(group.completions for group in self._groups.values())
        is_short = self.episodes.has_work  # `advance` looks for calls that take too long
        timeout = POLL_SECONDS if is_scoring or is_short else None
        all_are_suspended = self.engine.has_work and not self.engine.can_step
        shown_as: events.SpanKind = "score" if is_scoring or all_are_suspended else "wait"
        measured = self.timeline.measure("wait", shown_as=shown_as, is_short=is_short)
        with self.cores.idle(), measured:
            # Record one span for all wake-ups: each report resets the watchdog.
            while not wait(wakers, timeout):
                if self.reward_pool.is_broken or is_short:
                    break

    def _obey(self, command: events.Command) -> None:
        match command:
            case events.InitWeightChannel(rank, world_size, generation):
                self._join_weights(rank, world_size, generation)
            case events.ExchangeWeights(version):
                self._receive_weights(version)
            case events.Generate(iteration, prompts, is_last_round, known):
                if iteration != self._iteration:
                    self._iteration = iteration
                    self._busy_seconds = 0.0
                self._is_last_round = is_last_round  # rounds do not overlap
                num_generations = self.sampling.num_samples
                self._submit(TRAIN, iteration, prompts, num_generations, known)
            case events.Evaluate(round_, prompts, num_samples, known):
                self._submit(EVALUATE, round_, list(enumerate(prompts)), num_samples, known)

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
        ending = events.CancelExchange | events.Stop
        return any(isinstance(command, ending) for command in self._deferred)

    def _submit(
        self,
        kind: int,
        number: int,
        prompts: Sequence[IndexedPrompt],
        num_generations: int,
        known: Mapping[int, int],
    ) -> None:
        for group_index, prompt in prompts:
            key = GroupKey(kind, number, prompt.index)
            self._groups[key] = _Group(group_index, prompt, known.get(prompt.index))
            self.episodes.submit(key, prompt, num_generations)

    def _generate(self) -> None:
        """Make one step of the engine."""
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
        key = GroupKey(*request.key)
        group = self._groups[key]
        texts = self.episodes.finish(key, completions)
        if group.known_checksum is not None:
            self._drop_known(key, group, completions)
            return
        group.prompt_ids = request.prompt_ids
        # They are forgotten when the group is.
        group.pictures = self.engine.shown.placed(request.prompt_ids, completions)
        if request.media is not None:
            of_row = PlacedPictures(request.media.pictures, 0, len(request.prompt_ids))
            group.pictures = [of_row, *group.pictures]
        group.completions = completions
        group.text = as_text(texts.prompt)
        group.texts = [as_text(answer) for answer in texts.answers]
        group.scoring_started = time.monotonic()
        sampled_ids = [each.token_ids[each.is_sampled].tolist() for each in completions]
        state = TrainerState(self.policy_version, self.spec.num_updates)
        call = Call(texts.prompt, texts.answers, sampled_ids, group.prompt.columns, state)
        self.reward_pool.submit(key, call, self.episodes.judge(key, call))

    def _drop_known(self, key: GroupKey, group: _Group, completions: list[Completion]) -> None:
        """Drop a group that a dead worker has delivered. Raises BrokenInvariant if it differs."""
        del self._groups[key]
        self.episodes.forget(key)
        if checksum(completions) != group.known_checksum:
            raise BrokenInvariant(
                f"group {group.index} of iteration {key.number + 1} (prompt {group.prompt.index}) "
                "was generated again after its worker's death, and differs"
            )
        self.control.send(events.GroupRecomputed(group.prompt.index))

    def _finish_group(self, key: GroupKey, scored: ScoredGroup) -> None:
        """Deliver a scored group: to the ring, or as a part of an evaluation."""
        group = self._groups.pop(key)
        self.timeline.add("score", group.scoring_started)
        record = self.episodes.forget(key)
        group.episodes = record.columns
        scored = scored._replace(metrics=scored.metrics | record.metrics)
        judged = self._judge(scored, len(group.texts))
        if key.kind == TRAIN:
            self._deliver(key.number, group, scored, judged)
            return
        no_advantages = np.zeros_like(judged.rewards)
        answer = events.PromptEvaluated(
            key.number,
            group.prompt.index,
            self._samples(group, scored, judged.rewards, no_advantages, is_kept=True),
            group.text,
            pictures=_thumbnails(group.prompt),
            errors=scored.errors,
            logged=scored.metrics,
            checksum=checksum(group.completions),
        )
        self.control.send(answer)

    def _judge(self, scored: ScoredGroup, num_completions: int) -> _Judged:
        """Decide what is done with a group. In the last round none is rejected: completions count
        in the loss's denominator."""
        is_skipped = not scored.scores
        if is_skipped:
            rewards = np.full(num_completions, np.nan, dtype=np.float32)
        else:
            rewards = weighted_sum(scored.scores, self.spec.rewards.weights)
        has_equal_rewards = bool((rewards == rewards[0]).all())
        is_unwanted = is_skipped or (has_equal_rewards and self.spec.advantages.dynamic_sampling)
        is_rejected = is_unwanted and not self._is_last_round
        return _Judged(rewards, is_skipped, is_unwanted, is_rejected)

    def _deliver(self, iteration: int, own: _Group, scored: ScoredGroup, judged: _Judged) -> None:
        """Put a group into the outbox with its report; if it is rejected, only report it."""
        group = self._as_rollout_group(iteration, own, judged)
        num_kept = self.spec.num_samples_kept
        is_sample = (num_kept is None or own.index < num_kept) and not judged.is_rejected
        shown_rewards = judged.rewards
        if self.spec.rewards.scores_nothing:  # evaluations count such answers as wrong instead
            shown_rewards = np.full_like(judged.rewards, np.nan)
        samples = self._samples(own, scored, shown_rewards, group.advantages, is_kept=is_sample)
        num_prompt = len(own.prompt_ids)
        report = events.GroupScored(
            iteration=iteration + 1,
            group_index=own.index,
            prompt_index=own.prompt.index,
            rewards=judged.rewards.tolist(),
            rewards_by_function=scored.scores,
            completion_lengths=[each.num_sampled for each in own.completions],
            num_truncated=int(group.truncated.sum()),
            busy_seconds=self._busy_seconds,
            errors=scored.errors,
            is_skipped=judged.is_skipped,
            is_unwanted=judged.is_unwanted,
            is_rejected=judged.is_rejected,
            logged=scored.metrics,
            prompt=own.text,
            columns=own.prompt.references() if is_sample else {},
            samples=samples if is_sample else (),
            pictures=_thumbnails(own.prompt) if is_sample else (),
            shown=samples[0],
            checksum=checksum(own.completions),
            num_inserted_tokens=sum(each.num_inserted for each in own.completions),
            num_prompt_tokens=sum(each.num_read_before(num_prompt) for each in own.completions),
        )
        if judged.is_rejected:
            self.control.send(report)
        else:
            self._outbox.append(_Outgoing(group, report))

    def _as_rollout_group(self, iteration: int, own: _Group, judged: _Judged) -> RolloutGroup:
        """Return a group as the train workers get it."""
        options = self.spec.advantages
        completions = own.completions
        rewards = np.zeros_like(judged.rewards) if judged.is_skipped else judged.rewards
        # Without rewards a teacher is the only signal.
        scored = rewards if options.has_rewards else np.zeros_like(rewards)
        tree = group_tree(len(own.prompt_ids), completions)
        lengths = [len(each.token_ids) for each in completions]
        pictures = self._files_of(own)
        placeholder_id = min(self.renderer.placeholder_ids, default=0)
        prompt_ids = np.array(own.prompt_ids, dtype=np.int32)
        completion_ids = np.concatenate([each.token_ids for each in completions])
        return RolloutGroup(
            iteration=iteration,
            policy_version=self.policy_version,
            group_index=own.index,
            prompt_index=own.prompt.index,
            prompt_ids=with_placeholders(prompt_ids, placeholder_id),
            teacher_prompt_ids=self._teacher_prompt_ids(own.prompt),
            completion_lengths=np.array(lengths, dtype=np.int32),
            completion_ids=with_placeholders(completion_ids, placeholder_id),
            rollout_logprobs=np.concatenate([each.logprobs for each in completions]),
            loss_mask=np.concatenate([each.is_sampled for each in completions]),
            rewards=rewards,
            advantages=group_advantages(scored, options.scale, options.estimator),
            truncated=np.array([each.finish_reason == "length" for each in completions]),
            node_lengths=tree.lengths.astype(np.int32),
            node_parents=tree.parents.astype(np.int32),
            picture_bytes=np.frombuffer(b"".join(pictures.files), dtype=np.uint8),
            picture_lengths=np.array(list(map(len, pictures.files)), dtype=np.int32),
            shown_files=np.array(pictures.numbers, dtype=np.int32),
            shown_starts=np.array(pictures.starts, dtype=np.int32),
            shown_stops=np.array(pictures.stops, dtype=np.int32),
        )

    def _files_of(self, own: _Group) -> "_GroupFiles":
        """Return the image files of a group, each once. Raises ConfigError if those of a row are
        larger than a slot has room for. (What an episode shows was counted when it came.)"""
        num_bytes = sum(len(picture.data) for picture in own.prompt.pictures)
        if num_bytes > self.spec.max_image_bytes:
            raise ConfigError(
                f"data.max_image_bytes: expected prompts with image files of at most "
                f"{self.spec.max_image_bytes} bytes, got {num_bytes} in prompt {own.prompt.index}"
            )
        found = _GroupFiles([], [], [], [])
        numbers = dict[str, int]()  # by digest
        for placed in own.pictures:
            for picture in placed.pictures:
                number = numbers.setdefault(picture.digest, len(numbers))
                if number == len(found.files):
                    found.files.append(picture.data)
                found.numbers.append(number)
                found.starts.append(placed.start)
                found.stops.append(placed.stop)
        return found

    def _teacher_prompt_ids(self, prompt: Prompt) -> Int32:
        """Return the tokens of the teacher's own prompt; none if it has none. Raises ConfigError
        if it is too long."""
        if prompt.teacher_content is None:
            return no_tokens()
        ids = render_prompt(prompt.teacher_content, self.tokenizer, self.spec.chat_template_kwargs)
        longest = self.spec.limits.max_prompt_length
        if len(ids) > longest:
            raise ConfigError(
                f"data.max_prompt_length: expected prompts of the teacher of at most {longest} "
                f"tokens, got {len(ids)} in prompt {prompt.index}"
            )
        return np.array(ids, dtype=np.int32)

    def _samples(
        self,
        group: _Group,
        scored: ScoredGroup,
        rewards: Float32,
        advantages: Float32,
        *,
        is_kept: bool,
    ) -> list[events.Sample]:
        """Return the completions of a group as samples.jsonl keeps them, with all tokens of prompt
        and completion as texts. Where it keeps none: the first completion, without these."""
        decode = self.renderer.decode
        shown = group.completions if is_kept else group.completions[:1]
        prompt = decode(group.prompt_ids) if is_kept else ""
        scores: dict[str, Sequence[float | None]] = {}
        for index, name in enumerate(self.spec.rewards.names):
            is_skipped = not scored.scores
            scores[name] = [None] * len(rewards) if is_skipped else scored.scores[index]
        samples: list[events.Sample] = []
        for index, completion in enumerate(shown):
            raw = (prompt, decode(completion.token_ids.tolist())) if is_kept else ()
            sample = events.Sample(
                completion=group.texts[index],
                reward=float(rewards[index]),
                advantage=float(advantages[index]),
                columns=_entry(scored.columns, index),
                rewards=_entry(scores, index),
                length=completion.num_sampled,
                truncated=completion.finish_reason == "length",
                raw=raw,
                episode=_entry(group.episodes, index),
                inserted_tokens=completion.num_inserted,
            )
            samples.append(sample)
        return samples

    def _publish(self) -> None:
        """Put finished groups into the ring while it has free slots. Each is reported before: if
        this worker dies, the controller knows all groups that the ring may have."""
        while self._outbox:
            assert self.port is not None
            outgoing = self._outbox[0]
            if outgoing.report is not None:
                if not wait([self.port.writable_fd], timeout=0.0):
                    return
                maybe_sleep()
                self.control.send(outgoing.report)
                outgoing.report = None
            if not self.port.put(outgoing.group):  # another worker was faster
                return
            self._outbox.popleft()


def sampling_settings(
    engine: EngineSpec, limits: TokenLimits, choice: SamplingChoice, *, has_branches: bool
) -> SamplingSettings:
    """Return the settings of an engine. `has_branches`: prompts may have what others sampled."""
    most = choice.max_completion_length
    max_length = limits.max_prompt_length + most
    return SamplingSettings(
        max_prompt_length=max_length if has_branches else limits.max_prompt_length,
        max_completion_length=most,
        max_length=max_length,
        temperature=choice.temperature,
        top_k=choice.top_k,
        top_p=choice.top_p,
        stop=engine.stop,
        seed=engine.seed,
    )


def checksum(completions: Sequence[Completion]) -> int:
    """Return the CRC-32 of a group's token ids, log-probabilities and trees."""
    arrays: list[np.ndarray[Any, Any]] = []
    for completion in completions:
        arrays += [completion.token_ids, completion.logprobs]
        if completion.tree is not None:
            arrays += [completion.tree.lengths, completion.tree.parents]
    value = 0
    for array in arrays:
        value = zlib.crc32(array.tobytes(), value)
    return value


def _thumbnails(prompt: Prompt) -> list[bytes]:
    """Return the pictures of a prompt as small files, to be shown."""
    return [thumbnail(picture) for picture in prompt.pictures]


def _entry(columns: Mapping[str, Sequence[Any]], index: int) -> dict[str, Any]:
    """Return one completion's value of each column."""
    return {name: values[index] for name, values in columns.items()}
