"""Episodes of agents: requests of an endpoint become sequences of the engine, and these a group.

    submit(prompt) ─► the agent runs (`pool`) ─► request ─► engine.submit or engine.resume
                            ▲                                            │
                            └───────── answer ◄──────── turn ◄───────────┘
    all episodes of a group have ended ─► their sequences ─► completions, as trees of tokens

A request that continues a conversation begins with its tokens (`history`). A sequence that is
suspended exactly there is resumed. Otherwise a new one begins: a branch. It shares the longest
beginning that its prompt has in common with the group's prompt or an earlier sequence of its
episode, and the engine computes only what no sequence of the group has. Suspended sequences are
ended, the oldest first, where others need rows.

In deterministic runs requests are served at barriers: when no sequence can be continued and every
episode waits for one answer or has ended, all are served, in a fixed order.
"""

import secrets
import time
from collections import deque
from collections.abc import Iterable
from collections.abc import Sequence as SequenceOf
from concurrent.futures import Future
from multiprocessing.connection import Connection
from typing import Any, NamedTuple

from easyrl.agents.conversation_tree import REASONS, BranchReason, Placed
from easyrl.agents.endpoint import Endpoint
from easyrl.agents.history import History
from easyrl.agents.pool import AgentPool
from easyrl.agents.program import Value
from easyrl.agents.protocols.base import Answer, ApiError, Choice, Request, no_episode
from easyrl.agents.sequences import (
    Episode,
    Group,
    Sequence,
    Shared,
    join_sequences,
)
from easyrl.config.rollout import MAX_BRANCHES
from easyrl.config.spec import EpisodeSpec
from easyrl.engines.base import Engine, FinishedGroup, GroupRequest, Turn
from easyrl.environments.base import Episodes, GroupRecord, GroupTexts, mean, num_common
from easyrl.environments.host import Key
from easyrl.environments.host_pool import FAILURES, CallFailed, HostKilled
from easyrl.environments.pictures import (
    EpisodePictures,
    NoRoomForPictures,
    ShownFiles,
    with_addresses,
)
from easyrl.environments.pool import row_of
from easyrl.model.prompt_renderer import PromptRenderer
from easyrl.rewards.worker import Call, CallError, Scored
from easyrl.types import Completion, Messages, Prompt

MAX_REFUSALS_SHOWN = 10
"""Different reasons why requests were refused that a run's log has."""
MAX_REFUSED = 16
"""An agent is ended after more refused requests than these: it would ask forever."""
COUNTS_PER_TURN = 10
"""Requests of an episode that only count tokens, for each one that it may make otherwise."""
STEPS_TOGETHER = 4
"""Engine steps between two checks for new requests. Rows that begin together cost less."""


class _NewPrompt(NamedTuple):
    """Key by which new sequences are put together into one request."""

    group_key: Key
    ids: tuple[int, ...]
    max_tokens: int


class AgentEpisodes(Episodes):
    """The open groups of a rollout worker with an agent."""

    def __init__(
        self, spec: EpisodeSpec, pool: AgentPool, endpoint: Endpoint, *, max_open_groups: int
    ) -> None:
        """`pool`: of the agent; `max_open_groups`: generated at a time."""
        self._spec = spec
        self._is_deterministic = spec.is_deterministic
        self._max_open = max_open_groups
        self.pool = pool
        self.endpoint = endpoint
        self._queue: deque[Group] = deque()  # groups that have not been started
        self._groups: dict[Key, Group] = {}
        self._num_open = 0  # groups that are being generated
        self._episodes: dict[str, Episode] = {}  # that have not ended, by their keys, in order
        self._sequences: dict[tuple[Key, int], Sequence] = {}
        """Sequences that have not ended, by the key of their request and their number in it."""
        self._suspended: dict[Sequence, None] = {}  # the oldest first
        self._new: dict[_NewPrompt, list[Sequence]] = {}  # not submitted yet
        self._num_live = 0  # sequences that the engine keeps
        self._reported: set[str] = set()  # notes on requests
        self._refusals: set[str] = set()  # that were reported
        self._next_step = 0  # requests are served from this step of the engine on

    def bind(self, engine: Engine, renderer: PromptRenderer, num_rows: int) -> None:
        self._engine = engine
        self._num_rows = num_rows
        self._placeholder_ids = renderer.placeholder_ids
        self._pictures: EpisodePictures | None = None
        if self._spec.shows_pictures and renderer.processor is not None:
            self._pictures = EpisodePictures(renderer.processor, renderer.tokenizer, engine.shown)
        self._history = History(self._spec, renderer.tokenizer, engine.end_tokens, self._pictures)
        self.pool.loaded()

    @property
    def has_work(self) -> bool:
        return bool(self._queue or self._groups)

    @property
    def wakers(self) -> SequenceOf[Connection | int]:
        return [*self.pool.connections, self.endpoint.fileno()]

    def close(self) -> None:
        self.pool.close()
        self.endpoint.close()

    def submit(self, key: Key, prompt: Prompt, num_generations: int) -> None:
        self._queue.append(Group(key, prompt, num_generations))

    def take(self, finished: list[FinishedGroup]) -> list[FinishedGroup]:
        """Take sequences, of which `advance` makes groups."""
        for request, completions in finished:
            for index, completion in enumerate(completions):
                sequence = self._sequences.pop((request.key, index))
                sequence.completion = completion
                sequence.episode.group.num_open -= 1
        return []

    def advance(self) -> list[FinishedGroup]:
        """Exchange requests and answers, start groups; return those that have finished."""
        for turn in self._engine.take_turns():
            self._receive(turn)
        self.pool.poll()
        self._report_refusals(self.endpoint.take_refusals())
        for request in self.endpoint.take():
            self._accept(request)
        running = list(self._episodes.values())
        for episode in running:
            self._give_up_if_endless(episode)
        all_wait = all(episode.waiting or episode.future.done() for episode in running)
        is_barrier = all_wait and not self._engine.can_step
        may_serve = is_barrier or not self._is_deterministic
        if may_serve:
            self._serve_requests(running)
        finished: list[FinishedGroup] = []
        for group in self._groups.values():
            if group.is_complete:
                finished.append(self._finished(group))
        if may_serve:
            while self._queue and self._num_open < self._max_open:
                self._num_open += 1
                self._start(self._queue.popleft())
        self._submit_new()
        while self._suspended and self._num_live > self._num_rows:
            oldest = next(iter(self._suspended))
            self._end_sequence(oldest, may_continue=True)
        return finished

    # -- the agent --------------------------------------------------------------------------------

    def _start(self, group: Group) -> None:
        """Run the agent for each episode of a group."""
        self._groups[group.key] = group
        first_number = group.num_starts * group.num_generations
        group.num_starts += 1
        group.started = time.monotonic()
        group.prompt_ids = None
        keys = [secrets.token_urlsafe(24) for _ in range(group.num_generations)]
        self.endpoint.keys.update(keys)
        row = row_of(group.prompt)
        row["prompt"] = with_addresses(group.prompt.content, group.prompt.pictures)
        futures = self.pool.run_agents(group.key, row, self.endpoint.url, keys)
        group.episodes = []
        for key, future in zip(keys, futures, strict=True):
            number = first_number + len(group.episodes)
            episode = Episode(group, number, key, future)
            group.episodes.append(episode)
            self._episodes[key] = episode

    def _give_up_if_endless(self, episode: Episode) -> None:
        """End the program of an episode that asks for ever, although it is refused."""
        num_refused = episode.num_refused + self.endpoint.refused[episode.key]
        if num_refused > MAX_REFUSED and not episode.future.done():
            self.pool.give_up(episode.future)

    def _end(self, episode: Episode) -> None:
        """End an episode whose program has ended."""
        if episode.has_ended:
            return
        self._close(episode)
        group = episode.group
        try:
            value = Value(*episode.future.result())
        except HostKilled as error:
            if group.num_starts > 1 or self._is_deterministic:
                group.error = error
                return
            for each in group.episodes:
                self._close(each)
            self._start(group)
        except CallFailed as error:
            episode.error = "" if episode.limit else str(error)
        except TimeoutError:
            episode.limit = episode.limit or "time"
        except FAILURES as error:
            group.error = error
        else:
            episode.value = value.total
            episode.parts = value.parts

    def _close(self, episode: Episode) -> None:
        """Accept no more requests of an episode, and end its suspended sequences."""
        if episode.has_ended:
            return
        episode.has_ended = True
        episode.num_refused += self.endpoint.refused[episode.key]
        self._episodes.pop(episode.key, None)
        self.endpoint.forget(episode.key)
        for request in [*episode.waiting, *episode.answering]:
            request.reply(no_episode())
        episode.waiting.clear()
        for sequence in episode.sequences:
            if sequence in self._suspended:
                self._end_sequence(sequence)

    def _end_sequence(self, sequence: Sequence, *, may_continue: bool = False) -> None:
        """`may_continue`: its episode is not over, so that requests may continue its tokens."""
        self._suspended.pop(sequence, None)
        self._engine.end(sequence.last_turn, "stop", may_continue=may_continue)
        self._num_live -= 1

    # -- requests ---------------------------------------------------------------------------------

    def _accept(self, request: Request) -> None:
        """Let a request wait until it is served."""
        self._report(request.notes)
        episode = self._episodes.get(request.key)
        if episode is None:
            request.reply(no_episode())
        elif self._is_deterministic and (episode.waiting or episode.answering):
            expected = "expected false, or one request of an episode at a time"
            request.reply(ApiError(f"runtime.deterministic: {expected}"))
        else:
            episode.waiting.append(request)

    def _report(self, notes: Iterable[str]) -> None:
        """Write notes on requests to the run's log, each once."""
        for note in sorted(set(notes) - self._reported):
            self._reported.add(note)
            self.pool.report(note)

    def _report_refusals(self, reasons: Iterable[str]) -> None:
        """Write why requests were refused to the run's log: a client may hide it."""
        for reason in reasons:
            if len(self._refusals) < MAX_REFUSALS_SHOWN and reason not in self._refusals:
                self._refusals.add(reason)
                self._report([f"a request of the agent was refused: {reason}"])

    def _serve_requests(self, running: list[Episode]) -> None:
        """Serve the requests that wait, every few steps of the engine, and end episodes."""
        num_steps = self._engine.num_steps
        is_due = num_steps >= self._next_step or not self._engine.can_step
        if is_due and num_steps > 0:  # 0: the engine does not count them
            self._next_step = num_steps + STEPS_TOGETHER
        for episode in running:
            if episode.future.done():
                self._end(episode)
            while is_due and episode.waiting and self._serve(episode, episode.waiting[0]):
                episode.waiting.popleft()

    def _serve(self, episode: Episode, request: Request) -> bool:
        """Give a request to the engine, or refuse it; return False while other requests of the
        episode may use the tokens that it needs."""
        wanted = request.max_tokens  # for each choice; None: all that are left
        num_choices = request.num_choices
        most = self._engine.sampling.max_completion_length
        num_left = most - episode.num_tokens - episode.num_reserved
        if request.counts_only:
            self._count_tokens(episode, request)
            return True
        if episode.num_reserved and (wanted is None or num_choices * wanted > num_left):
            return False
        placed = self._placed_or_refused(episode, request)
        if placed is None:
            return True
        ids = placed.ids
        if episode.group.prompt_ids is None:
            episode.group.prompt_ids = self._prompt_of(ids)
        shared = self._most_shared(episode, ids)
        is_resumed = num_choices == 1 and self._is_resumable(shared, len(ids))
        num_new = len(ids) - shared.num_tokens
        available = (num_left - num_new) // num_choices
        limit = available
        if wanted is not None and wanted <= available:
            limit = wanted
        elif wanted is not None and episode.num_reserved:
            return False
        num_branches = len(episode.sequences)
        if not is_resumed:
            num_branches += num_choices
        refusal = self._refusal(episode, limit, num_branches, ids, num_new)
        if refusal is not None:
            self._refuse(episode, request, refusal)
            return True
        if is_resumed and shared.parent is not None:
            self._resume(shared.parent, ids, limit)
            sequences = [shared.parent]
        else:
            sequences = self._branch(episode, ids, shared, num_choices)
            for sequence in sequences:
                sequence.num_left = num_left - num_new
            prompt = _NewPrompt(episode.group.key, tuple(ids), limit)
            self._new.setdefault(prompt, []).extend(sequences)
        self._count_branch(episode, placed.branch_reason)
        episode.num_requests += 1
        episode.num_tokens += num_new
        for sequence in sequences:
            sequence.request = request
            sequence.placed = placed
            sequence.num_reserved = limit
            episode.num_reserved += limit
        episode.answering[request] = sequences
        return True

    def _placed_or_refused(self, episode: Episode, request: Request) -> Placed | None:
        try:
            return self._place(episode, request)
        except NoRoomForPictures as error:
            episode.limit = "length"
            self._refuse(episode, request, ApiError(str(error), "context_length_exceeded"))
        except Exception as error:  # of the tokenizer, the template, or odd messages
            self._refuse_unplaced(episode, request, error)
        return None

    def _refuse_unplaced(self, episode: Episode, request: Request, error: Exception) -> None:
        reason = str(error) or repr(error)
        self._report_refusals([reason])
        self._refuse(episode, request, ApiError(reason))

    def _place(self, episode: Episode, request: Request) -> Placed:
        """Find the tokens of a request. Raises ValueError for pictures that are too large, and for
        a text that stands for one; and whatever tokenizer and template raise."""
        if self._pictures is not None:
            if episode.files is None:
                episode.files = ShownFiles(self._spec.max_image_bytes)
            episode.files.add(request.pictures.values())
            for picture in request.pictures.values():
                self._pictures.add(picture, episode.group.key)
        placed = self._history.place(episode, request)
        if not self._placeholder_ids.isdisjoint(placed.ids):
            raise ValueError(
                "messages: expected no text that stands for a picture, because the model would "
                "look for one; give a picture as a part of the content"
            )
        if placed.ids[-1] < 0:
            # The engine computes a prompt's last token again, and a picture only as a whole.
            raise ValueError(
                "messages: expected a chat template (data.chat_template) that writes something "
                "behind a picture at the end of the last message, got one that writes nothing"
            )
        return placed

    def _prompt_of(self, ids: list[int]) -> list[int]:
        """Return the part of a first request that is the group's prompt: at most as many tokens as
        a prompt may have, and whole pictures."""
        length = self._spec.limits.max_prompt_length
        for shown in self._engine.shown.find(ids):
            if shown.start < length < shown.stop:
                return ids[: shown.start]
        return ids[:length]

    def _count_tokens(self, episode: Episode, request: Request) -> None:
        """Answer a request with the number of its tokens."""
        episode.num_counted += 1
        most = COUNTS_PER_TURN * self._spec.max_turns
        if episode.num_counted > most:
            text = f"expected at most {most} requests for numbers of tokens (rollout.max_turns)"
            self._refuse(episode, request, ApiError(text))
            return
        try:
            num_tokens = len(self._place(episode, request).ids)
        except Exception as error:  # of the tokenizer, the template, or odd messages
            self._refuse_unplaced(episode, request, error)
        else:
            request.reply(Answer([], num_tokens, 0))

    def _count_branch(self, episode: Episode, reason: BranchReason | None) -> None:
        if reason is not None:
            episode.branch_reasons[reason] += 1
            self._report([f"a request of the agent begins a new branch: {REASONS[reason]}"])

    def _refuse(self, episode: Episode, request: Request, refusal: ApiError) -> None:
        episode.num_refused += 1
        request.reply(refusal)

    def _refusal(
        self, episode: Episode, limit: int, num_branches: int, ids: list[int], num_new: int
    ) -> ApiError | None:
        """Return why an episode may ask no more. `limit`: tokens that are left for an answer;
        `ids`: tokens of the request, of which `num_new` are neither the group's prompt nor in an
        earlier request."""
        most_requests = self._spec.max_turns
        seconds = self._spec.episode_timeout_seconds
        most_tokens = self._engine.sampling.max_completion_length
        if episode.num_requests >= most_requests:
            episode.limit = "max_turns"
            return ApiError(f"expected at most {most_requests} requests (rollout.max_turns)")
        if seconds is not None and time.monotonic() > episode.group.started + seconds:
            episode.limit = "time"
            key = "rollout.episode_timeout_seconds"
            return ApiError(f"expected an episode of at most {seconds:g} s ({key})")
        if num_branches > MAX_BRANCHES:
            episode.limit = "max_turns"
            return ApiError(f"expected at most {MAX_BRANCHES} branches (MAX_BRANCHES)")
        if limit < 1:
            episode.limit = "length"
            most_of_prompt = self._spec.limits.max_prompt_length
            text = (
                f"expected at most {most_of_prompt} tokens of an episode's prompt "
                f"(data.max_prompt_length) and {most_tokens} behind it "
                f"(rollout.max_completion_length), got a request of {len(ids)} tokens, "
                f"{num_new} of them new behind the {len(episode.group.prompt_ids or ())} tokens "
                "of the prompt, which is the first request of the group's episodes"
            )
            num_of_pictures = sum(token < 0 for token in ids)
            if num_of_pictures:
                text += f", {num_of_pictures} of them of pictures (data.max_image_pixels)"
            return ApiError(text, "context_length_exceeded")
        return None

    # -- sequences --------------------------------------------------------------------------------

    def _most_shared(self, episode: Episode, ids: list[int]) -> Shared:
        """Return what begins with most of the tokens: the group's prompt, or a sequence of the
        episode, if possible a suspended one."""
        parent: Sequence | None = None
        num_shared = num_common(ids, episode.group.prompt_ids or [])
        for sequence in episode.sequences:
            number = num_common(ids, sequence.ids)
            is_better = number > num_shared
            if number == num_shared and parent is not None:
                is_better = sequence in self._suspended and parent not in self._suspended
            if is_better:
                parent = sequence
                num_shared = number
        return Shared(parent, num_shared)

    def _is_resumable(self, shared: Shared, length: int) -> bool:
        """Whether so many tokens, the first of which are shared, continue a suspended sequence."""
        parent = shared.parent
        if parent is None or parent not in self._suspended:
            return False
        num_new = length - shared.num_tokens
        is_whole = shared.num_tokens == len(parent.ids)
        return is_whole and 0 < num_new < parent.last_turn.num_left

    def _resume(self, sequence: Sequence, ids: list[int], limit: int) -> None:
        """Continue a suspended sequence up to these tokens."""
        del self._suspended[sequence]
        new_ids = ids[len(sequence.ids) :]
        self._engine.resume(sequence.last_turn, new_ids, limit)
        sequence.ids = ids
        sequence.turn = None

    def _branch(
        self, episode: Episode, ids: list[int], shared: Shared, num_choices: int
    ) -> list[Sequence]:
        """Begin new sequences, which share their prompt: it belongs to the first one."""
        first = Sequence(episode, ids, shared.parent, shared.num_tokens)
        sequences = [first]
        for _ in range(num_choices - 1):
            sequences.append(Sequence(episode, list(ids), first, len(ids)))
        episode.sequences += sequences
        return sequences

    def _submit_new(self) -> None:
        """Submit new sequences. All of a group are one family in the engine: it computes what their
        prompts have in common with each other, and with earlier sequences, only once."""
        for prompt, sequences in self._new.items():
            first = sequences[0]
            number = first.episode.sequences.index(first)
            key = (*prompt.group_key, first.episode.number, number)
            request = GroupRequest(
                key,
                prompt.ids,
                len(sequences),
                has_turns=True,
                max_turn_tokens=prompt.max_tokens,
                max_new_tokens=max(sequence.num_left for sequence in sequences),
                family=prompt.group_key,
            )
            self._engine.submit(request)
            for index, sequence in enumerate(sequences):
                sequence.num_prompt = len(prompt.ids)
                self._sequences[key, index] = sequence
            first.episode.group.num_open += len(sequences)
            self._num_live += len(sequences)
        self._new.clear()

    def _receive(self, turn: Turn) -> None:
        """Take what a sequence has sampled; answer its request if it was the last."""
        sequence = self._sequences[turn.key, turn.sample_index]
        episode = sequence.episode
        request = sequence.request
        assert request is not None, "a sequence samples for a request"
        num_sampled = len(turn.token_ids)
        sequence.ids += turn.token_ids.tolist()
        sequence.turn = turn
        episode.num_tokens += num_sampled
        episode.num_reserved -= sequence.num_reserved
        if episode.has_ended:
            self._end_sequence(sequence)
            return
        self._suspended[sequence] = None
        is_as_long_as_wanted = request.max_tokens is not None and num_sampled >= request.max_tokens
        if turn.is_cut and not is_as_long_as_wanted:
            episode.is_cut = True
        sequences = episode.answering[request]
        if all(each.turn is not None for each in sequences):
            del episode.answering[request]
            self._reply(request, sequences)

    # -- answers ----------------------------------------------------------------------------------

    def _reply(self, request: Request, sequences: list[Sequence]) -> None:
        """Answer a request."""
        choices: list[Choice] = []
        num_sampled = 0
        for sequence in sequences:
            assert sequence.placed is not None, "a sequence samples for a request"
            choices.append(self._history.read_answer(request, sequence.placed, sequence))
            num_sampled += len(sequence.last_turn.token_ids)
        request.reply(Answer(choices, sequences[0].num_before_turn, num_sampled))

    # -- finished groups --------------------------------------------------------------------------

    def _finished(self, group: Group) -> FinishedGroup:
        group.is_finished = True
        self._num_open -= 1
        end = min(self._engine.end_tokens)
        group.prompt_ids = group.prompt_ids or [end]
        num_prompt = len(group.prompt_ids)
        completions = [join_sequences(each, num_prompt, end) for each in group.episodes]
        return GroupRequest(group.key, group.prompt_ids, len(completions)), completions

    def finish(self, key: Key, completions: list[Completion]) -> GroupTexts:
        """Return the prompt, and each episode's last conversation from its first answer on."""
        group = self._groups[key]
        answers: list[Messages] = []
        for episode in group.episodes:
            chat: Messages = [{"role": "assistant", "content": ""}]
            if episode.conversations:
                *_, chat = episode.conversations.values()
            roles = [message["role"] for message in chat]
            first_answer = roles.index("assistant")
            answers.append(chat[first_answer:])
        return GroupTexts(group.prompt.content, answers)

    def judge(self, key: Key, call: Call) -> tuple[SequenceOf[int], Future[Any]] | None:
        """Score a group by what the agent has returned; if its process is lost, nothing can."""
        group = self._groups[key]
        functions = self._spec.rewards.functions
        future: Future[Any] = Future()
        if group.error:
            future.set_exception(group.error)
            return range(len(functions)), future
        if "agent" not in functions:
            return None
        is_only_reward = len(functions) == 1
        future.set_result(_scored(group, is_only_reward=is_only_reward))
        return [functions.index("agent")], future

    def forget(self, key: Key) -> GroupRecord:
        self.pool.forget(key)
        self._engine.shown.forget(key)
        group = self._groups.pop(key)
        episodes = group.episodes
        without_requests = [episode for episode in episodes if not episode.sequences]
        metrics = {
            "episodes/turns": mean([episode.num_requests for episode in episodes]),
            "episodes/branches": mean([len(episode.sequences) for episode in episodes]),
            "episodes/without_requests": len(without_requests) / len(episodes),
        }
        for reason in REASONS:
            counts = [episode.branch_reasons[reason] for episode in episodes]
            metrics[f"episodes/branches/{reason}"] = mean(counts)
        chats: list[list[Messages]] = []
        for episode in episodes:
            chats.append(list(episode.conversations.values()) or [[]])
        columns: dict[str, list[Any]] = {
            "messages": [of_episode[-1] for of_episode in chats],
            "ended_by": [episode.ended_by for episode in episodes],
        }
        if any(len(of_episode) > 1 for of_episode in chats):
            columns["branches"] = [of_episode[:-1] for of_episode in chats]
        if any(episode.branch_reasons for episode in episodes):
            columns["branch_reasons"] = [dict(episode.branch_reasons) for episode in episodes]
        return GroupRecord(metrics, columns)


def _scored(group: Group, *, is_only_reward: bool) -> Scored:
    """Return what the agent gives its episodes. One that has failed without a reward gets 0, as
    does one that reached a limit, if the agent gives the only reward."""
    scores: list[float | None] = []
    named: dict[str, list[float]] = {}
    errors: list[CallError] = []
    for index, episode in enumerate(group.episodes):
        score = episode.value
        has_failed = bool(episode.error) or (is_only_reward and bool(episode.limit))
        if score is None and has_failed:
            score = 0.0
        scores.append(score)
        for name, value in episode.parts.items():
            named.setdefault(name, []).append(value)
        if episode.error:
            errors.append(CallError(f"the agent failed:\n{episode.error}", index))
    metrics: dict[str, float] = {}
    for name, values in named.items():
        metrics[f"rewards/{name}/mean"] = mean(values)
    return Scored([scores], errors, metrics, {})
