"""Completions of one turn: nobody acts, and the engine's groups are complete."""

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from multiprocessing.connection import Connection
from typing import Any

from easyrl.data.chat import text_decoder
from easyrl.engines.base import Engine, FinishedGroup, GroupRequest
from easyrl.environments.base import Episodes, GroupRecord, GroupTexts
from easyrl.environments.host import Key
from easyrl.model.prompt_renderer import PromptRenderer
from easyrl.rewards.worker import Call
from easyrl.types import Completion, Prompt


class SingleTurns(Episodes):
    def __init__(self, chat_template_kwargs: Mapping[str, Any]) -> None:
        self._chat_template_kwargs = chat_template_kwargs
        self._prompts: dict[Key, Prompt] = {}

    def bind(self, engine: Engine, renderer: PromptRenderer, num_rows: int) -> None:
        self._engine = engine
        self._renderer = renderer
        self._decode: Callable[[list[int]], str] = text_decoder(renderer.tokenizer)

    def submit(self, key: Key, prompt: Prompt, num_generations: int) -> None:
        self._prompts[key] = prompt
        variables = self._chat_template_kwargs
        rendered = self._renderer.render(prompt.content, prompt.pictures, variables)
        media = rendered.media if prompt.pictures else None
        self._engine.submit(GroupRequest(key, rendered.token_ids, num_generations, media=media))

    def take(self, finished: list[FinishedGroup]) -> list[FinishedGroup]:
        return finished

    def advance(self) -> list[FinishedGroup]:
        return []

    def finish(self, key: Key, completions: list[Completion]) -> GroupTexts:
        texts = [self._decode(completion.token_ids.tolist()) for completion in completions]
        return GroupTexts(self._prompts[key].content, texts)

    def judge(self, key: Key, call: Call) -> tuple[Sequence[int], Future[Any]] | None:
        return None

    def forget(self, key: Key) -> GroupRecord:
        del self._prompts[key]
        return GroupRecord({}, {})

    @property
    def has_work(self) -> bool:
        return False

    @property
    def wakers(self) -> Sequence[Connection | int]:
        return ()

    def close(self) -> None:
        pass
