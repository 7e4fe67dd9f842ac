"""Environments: what they are, the processes that run them, and the tokens of a conversation."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from easyrl.config import Config, ConfigError, load_config
from easyrl.data.datasets import open_prompts
from easyrl.environments.check import check_environments
from easyrl.environments.conversation import Conversations
from easyrl.environments.host import Acted
from easyrl.environments.pool import CallFailed, EnvironmentPool, HostLost
from easyrl.environments.tool_calls import BadCall, ToolCall, detect_format, read_calls
from easyrl.rewards.functions import GroupLost
from easyrl.rewards.worker import Call, Scored
from easyrl.types import Prompt
from tool_models import TEMPLATE, call, chat_tokenizer, example

ENVIRONMENTS = '''
import asyncio
import os
import random
import signal
import time


class Counter:
    """A counter that the model increments."""

    num_made = 0

    def __init__(self):
        Counter.num_made += 1

    def reset(self, start: int = 0, **columns) -> str | None:
        self.count = start
        return f" from {start}"

    def increment(self, step: int) -> int:
        """
        Increment the counter.

        Args:
            step: How much is added.
        """
        self.count += step
        return self.count

    async def wait(self, seconds: float) -> str:
        """
        Wait.

        Args:
            seconds: How long.
        """
        await asyncio.sleep(seconds)
        return "waited"

    def sleep(self, seconds: float) -> str:
        """
        Sleep.

        Args:
            seconds: How long.
        """
        time.sleep(seconds)
        return "slept"

    def draw(self) -> int:
        """Draw a number."""
        return random.randrange(10**9)

    def leave(self) -> str:
        """Leave."""
        raise SystemExit("left")
    def alarm(self) -> str:
        """Interrupt itself."""

        def ring(*_):
            raise TimeoutError("rang")

        signal.signal(signal.SIGALRM, ring)
        signal.setitimer(signal.ITIMER_REAL, 0.05)
        time.sleep(20)

    def made(self) -> int:
        """Count instances."""
        return Counter.num_made

    def die(self) -> str:
        """End the process."""
        os._exit(3)

    @classmethod
    def shout(cls) -> str:
        """Print a MiB, and return a subclass of str."""
        print("x" * 2**20)
        return Odd("loud")

    @staticmethod
    def helper():
        return "no tool, as in TRL"

    @property
    def broken(self):
        raise RuntimeError("not to be evaluated")

    def get_reward(self) -> float:
        return float(self.count)


class Odd(str):
    def __reduce__(self):
        return os._exit, (1,)

    def __str__(self):
        return self


class Game:
    def reset(self, seed: int, **columns):
        self.seed, self.texts = seed, []
        return Odd("go")

    def step(self, action):  # type hints are not needed
        if action == "hang":
            time.sleep(1000)
        if action == "draw":
            action = str(time.time_ns())
        self.texts.append(action)
        return Odd(action[::-1]), action == "end"

    def get_reward(self):
        return len(self.texts)


class HalfHinted:
    def reset(self, **columns):
        return None

    def step(self, text: str):
        return "", True


class BadInit(Game):
    def __init__(self):
        raise RuntimeError("no licence")


class NoReset:
    pass


class NoHints:
    def reset(self):
        pass

    def move(self, direction):
        """Move."""


class BadReset:
    def reset(self, **columns):
        raise RuntimeError("no board")


class OddReset:
    def reset(self, **columns):
        return 3


class OddStep:
    def reset(self, **columns):
        return None

    def step(self, text: str) -> tuple[str, bool]:
        return 3


def add(a: int, b: int) -> int:
    """
    Add two numbers.

    Args:
        a: The first.
        b: The second.
    """
    return a + b


def is_even(environments, completions, **columns):
    return [float(each.count % 2 == 0) for each in environments]
'''
KEY = (0, 0, 0)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    file = tmp_path / "own.py"
    file.write_text(ENVIRONMENTS)
    return file


def config_of(file: Path, name: str = "Counter", *words: str) -> Config:
    return load_config(None, {"rollout.environment": f"{file}:{name}"}, words)


@pytest.fixture
def pools() -> Iterator[list[EnvironmentPool]]:
    made: list[EnvironmentPool] = []
    yield made
    for pool in made:
        pool.close()


def result(pool: EnvironmentPool, future: Any, timeout: float = 30.0) -> Any:
    end = time.monotonic() + timeout
    while not future.done():
        assert time.monotonic() < end
        time.sleep(0.01)
        pool.poll()
    return future.result()


def start(pool: EnvironmentPool, num: int = 1, key: tuple[int, ...] = KEY, **row: Any) -> list[Any]:
    return [result(pool, future) for future in pool.start(key, "", row, [*range(num)])]


def act(pool: EnvironmentPool, *calls: ToolCall | BadCall, index: int = 0) -> Any:
    return Acted(*result(pool, pool.act(KEY, index, [*calls])))


# -- processes ------------------------------------------------------------------------------------


def test_episodes_keep_their_state_and_are_scored_where_it_is(
    file: Path, pools: list[EnvironmentPool]
) -> None:
    config = config_of(file, "Counter", f"reward.functions=[environment, '{file}:is_even']")
    pools.append(pool := EnvironmentPool(config, {}))
    loaded = pool.loaded()
    interface = loaded.interfaces[""]
    names = [schema["function"]["name"] for schema in interface.schemas]
    assert sorted(names) == [
        *("alarm", "die", "draw", "increment", "leave", "made", "shout", "sleep", "wait")
    ]
    assert not interface.is_game and interface.has_reward
    assert loaded.reward_functions == [0, 1]
    assert start(pool, 2, start=5) == [" from 5", " from 5"]
    acted = act(pool, ToolCall("increment", {"step": 2}), ToolCall("wait", {"seconds": 0.0}))
    assert [m["content"] for m in acted.messages] == ["7", "waited"]
    assert [m["name"] for m in acted.messages] == ["increment", "wait"]
    messages = [[{"role": "assistant", "content": "x"}]] * 2
    asked = Call([{"role": "user", "content": "q"}], messages, [[1]] * 2, {}, functions=[0, 1])
    scored = Scored(*result(pool, pool.judge(KEY, asked)))
    assert scored.scores == [[7.0, 5.0], [0.0, 0.0]] and scored.errors == []


def test_errors_of_a_tool_are_results(file: Path, pools: list[EnvironmentPool]) -> None:
    pools.append(pool := EnvironmentPool(config_of(file), {}))
    start(pool)
    acted = act(
        pool,
        ToolCall("increment", {"step": "x"}),
        ToolCall("increment", {}),
        ToolCall("fly", {}),
        BadCall("no JSON"),
        ToolCall("leave", {}),
        ToolCall("increment", {"step": 1}),
    )
    errors = [message["content"] for message in acted.messages]
    assert (acted.num_calls, acted.num_errors) == (6, 5)
    for error, word in zip(errors, ("str", "step", "fly", "no JSON", "left"), strict=False):
        assert error.startswith("{'error': ") and word in error
    assert errors[-1] == "1"


def test_functions_are_tools_without_an_environment(
    tmp_path: Path, pools: list[EnvironmentPool]
) -> None:
    """The example of docs/environments.md."""
    (tmp_path / "calculator.py").write_text(example("calculator.py"))
    config = load_config(None, {}, [f"rollout.tools=['{tmp_path}/calculator.py:calculate']"])
    pools.append(pool := EnvironmentPool(config, {}))
    start(pool)
    acted = act(pool, ToolCall("calculate", {"left": 6, "operation": "*", "right": 7}))
    assert [m["content"] for m in acted.messages] == ["42"]


def test_instances_are_used_again(file: Path, pools: list[EnvironmentPool]) -> None:
    pools.append(pool := EnvironmentPool(config_of(file), {}))
    for _ in range(2):
        start(pool, 2)
        assert act(pool, ToolCall("made", {})).messages[0]["content"] == "2"
        pool.forget(KEY)


@pytest.mark.parametrize("word", ["rollout.concurrent_calls=1", "runtime.deterministic=true"])
def test_a_tool_may_use_signals_where_calls_run_one_by_one(
    file: Path, pools: list[EnvironmentPool], word: str
) -> None:
    pools.append(pool := EnvironmentPool(config_of(file, "Counter", word), {}))
    start(pool)
    acted = act(pool, ToolCall("alarm", {}), ToolCall("increment", {"step": 1}))
    assert [m["content"] for m in acted.messages] == ["{'error': 'rang'}", "1"]


def test_a_slow_call_fails_and_others_go_on(file: Path, pools: list[EnvironmentPool]) -> None:
    config = config_of(file, "Counter", "rollout.tool_timeout_seconds=1")
    pools.append(pool := EnvironmentPool(config, {}))
    pool.loaded()
    start(pool, 2)
    slow = pool.act(KEY, 0, [ToolCall("sleep", {"seconds": 60.0})])
    assert act(pool, ToolCall("increment", {"step": 1}), index=1).messages[0]["content"] == "1"
    with pytest.raises(TimeoutError):
        result(pool, slow)
    assert act(pool, ToolCall("increment", {"step": 1}), index=1).messages[0]["content"] == "2"
    # The process is not used for another group, and ends with its last one.
    (stuck,) = (host.process for host in pool._hosts)
    start(pool, key=(0, 0, 1))
    pool.forget(KEY)
    assert not stuck.is_alive() and len(pool._hosts) == 1


def test_a_dead_process_ends_its_groups_only(file: Path, pools: list[EnvironmentPool]) -> None:
    pools.append(pool := EnvironmentPool(config_of(file), {}))
    pool.loaded()
    start(pool)
    start(pool, key=(0, 0, 1))  # in the second process
    with pytest.raises(HostLost, match="exit code 3"):
        act(pool, ToolCall("die", {}))
    with pytest.raises(HostLost):
        act(pool, ToolCall("increment", {"step": 1}))
    acted = result(pool, pool.act((0, 0, 1), 0, [ToolCall("increment", {"step": 1})]))
    assert acted[0][0]["content"] == "1"


def kill(pool: EnvironmentPool, key: tuple[int, ...] = KEY) -> None:
    os.kill(pool._groups[key].host.process.pid or 0, signal.SIGKILL)


def play(pool: EnvironmentPool, *texts: str) -> list[Any]:
    return [result(pool, pool.act(KEY, 0, text)) for text in texts]


def reward_of(pool: EnvironmentPool) -> Any:
    return Scored(*result(pool, pool.judge(KEY, Call([], [[]], [[1]], {}, functions=[0])))).scores


@pytest.fixture
def game(file: Path, pools: list[EnvironmentPool]) -> Callable[..., EnvironmentPool]:
    def make(*words: str, reports: list[str] | None = None) -> EnvironmentPool:
        words = ("reward.functions=[environment]", *words)
        pools.append(pool := EnvironmentPool(config_of(file, "Game", *words), {}))
        pool.report = ([] if reports is None else reports).append
        pool.loaded()
        return pool

    return make


Game = Callable[..., EnvironmentPool]


@pytest.mark.parametrize("word", ["rollout.concurrent_calls=4", "runtime.deterministic=true"])
def test_calls_of_a_killed_process_are_repeated_once(game: Game, word: str) -> None:
    pool = game(word, reports=(reports := []))
    start(pool)
    play(pool, "a", "b")
    kill(pool)
    assert play(pool, "c")[0][0][0]["content"] == "c" and reward_of(pool) == [[3.0]]
    assert len(reports) == 1
    kill(pool)
    with pytest.raises(HostLost, match="-9"):
        play(pool, "d")


def test_a_killed_environment_that_cannot_be_repeated_is_lost(game: Game) -> None:
    pool = game()
    start(pool)
    play(pool, "draw")
    kill(pool)
    with pytest.raises(GroupLost):
        reward_of(pool)


def test_a_group_may_end_while_its_calls_are_repeated(game: Game) -> None:
    pool = game()
    start(pool)
    play(pool, "draw")
    host = pool._groups[KEY].host
    kill(pool)
    while pool._groups[KEY].host is host:
        pool.poll()
    pool.forget(KEY)
    start(pool, key=(0, 0, 1))  # in the same process: its answer comes after the repeated ones
    assert result(pool, pool.act((0, 0, 1), 0, "a"))[0][0]["content"] == "a"


def test_a_process_that_is_killed_while_it_loads_is_replaced(
    file: Path, pools: list[EnvironmentPool]
) -> None:
    pools.append(pool := EnvironmentPool(config_of(file), {}))
    kill(pool, ())
    assert pool.loaded().interfaces[""].has_reward


@pytest.mark.parametrize("num", [1, 4])
def test_a_call_that_hangs_leaves_the_environment_as_it_was(game: Game, num: int) -> None:
    """With one call at a time, its process is killed and all other calls are repeated."""
    pool = game("rollout.tool_timeout_seconds=1", f"rollout.concurrent_calls={num}")
    start(pool)
    play(pool, "a")
    for _ in range(2):
        with pytest.raises(TimeoutError):
            play(pool, "hang")
        assert reward_of(pool) == [[1.0]]


def test_output_is_counted_by_call(file: Path, pools: list[EnvironmentPool]) -> None:
    pools.append(pool := EnvironmentPool(config_of(file), {}))
    start(pool)
    results = [act(pool, ToolCall("shout", {})).messages[0]["content"] for _ in range(20)]
    assert results == ["loud"] * 20
    assert act(pool, *[ToolCall("shout", {})] * 20).num_errors == 5  # the line ends count


def test_where_memory_runs_out_the_kernel_ends_an_environment_first(game: Game) -> None:
    pid = game()._hosts[0].process.pid
    assert Path(f"/proc/{pid}/oom_score_adj").read_text().strip() == "1000"


def test_deterministic_episodes_have_random_numbers_of_their_own(
    file: Path, pools: list[EnvironmentPool]
) -> None:
    draws = []
    for order in ([0, 1, 0, 1], [1, 1, 0, 0]):
        config = config_of(file, "Counter", "runtime.deterministic=true")
        pools.append(pool := EnvironmentPool(config, {}))
        start(pool, 2)
        drawn: dict[int, list[str]] = {0: [], 1: []}
        for index in order:
            acted = act(pool, ToolCall("draw", {}), index=index)
            drawn[index].append(acted.messages[0]["content"])
        draws.append(drawn)
    assert draws[0] == draws[1] and draws[0][0] != draws[0][1]


def test_a_game_gets_text_and_its_seed(file: Path, pools: list[EnvironmentPool]) -> None:
    config = config_of(file, "Game", "reward.functions=[length_penalty]")
    pools.append(pool := EnvironmentPool(config, {}))
    assert pool.loaded().interfaces[""].is_game
    assert start(pool) == ["go"]
    acted = Acted(*result(pool, pool.act(KEY, 0, "abc")))
    assert acted.messages == [{"role": "user", "content": "cba"}] and not acted.is_done
    assert Acted(*result(pool, pool.act(KEY, 0, "end"))).is_done


def test_an_odd_step_is_an_error(file: Path, pools: list[EnvironmentPool]) -> None:
    pools.append(
        pool := EnvironmentPool(config_of(file, "OddStep", "reward.functions=[format]"), {})
    )
    start(pool)
    with pytest.raises(CallFailed, match=r"\(observation, done\), got 3"):
        result(pool, pool.act(KEY, 0, "abc"))


@pytest.mark.parametrize(
    ("name", "key", "word"),
    [
        ("NoReset", "rollout.environment", "reset"),
        ("NoHints", "rollout.environment", "type hint"),
        ("BadReset", "rollout.environment", "no board"),
        ("OddReset", "rollout.environment", "got 3"),
        ("BadInit", "rollout.environment", "no licence"),
        ("HalfHinted", "rollout.environment", "tuple[str, bool]"),
        ("Missing", "rollout.environment", "own.py:Counter"),
        ("OddStep", "reward.functions", "get_reward"),
    ],
)
def test_unusable_environments_are_refused(file: Path, name: str, key: str, word: str) -> None:
    with pytest.raises(ConfigError, match=key) as raised:
        check_environments(config_of(file, name), Prompt(0, "q", {}))
    assert word in str(raised.value)


def test_each_row_names_one_of_several_environments(file: Path) -> None:
    words = [f"rollout.environment={{one: '{file}:Counter', two: '{file}:Counter'}}"]
    config = load_config(None, {}, words)
    interfaces, _ = check_environments(config, Prompt(0, "q", {"environment": "two"}))
    assert set(interfaces) == {"one", "two"}
    rows = file.with_name("rows.jsonl")
    rows.write_text('{"environment": "one"}\n{"environment": "three"}\n')
    config = load_config(None, {}, [*words, f"data.dataset={rows}", "data.shuffle=false"])
    with pytest.raises(ConfigError, match=r"2: column 'environment'.*'three'"):
        open_prompts(config).examples()


# -- tool calls -----------------------------------------------------------------------------------

SCHEMAS = [
    {
        "type": "function",
        "function": {
            "name": "f",
            "parameters": {"properties": {"x": {"type": "integer"}, "s": {"type": "string"}}},
        },
    }
]


@pytest.mark.parametrize(
    ("tool_format", "text"),
    [
        (
            "hermes",
            'Well. <tool_call>\n{"name": "f", "arguments": {"x": 1, "s": "2"}}\n</tool_call>',
        ),
        ("hermes", '<tool_call>{"name": "f", "arguments": "{\\"x\\": 1, \\"s\\": \\"2\\"}"}'),
        ("llama3", '<|python_tag|>{"name": "f", "parameters": {"x": 1, "s": "2"}}'),
        ("mistral", '[TOOL_CALLS] [{"name": "f", "arguments": {"x": 1, "s": "2"}}]'),
        ("mistral", '[TOOL_CALLS]f[CALL_ID]ab[ARGS]{"x": 1, "s": "2"}'),
        (
            "qwen3_coder",
            "<tool_call>\n<function=f>\n<parameter=x>\n1\n</parameter>\n<parameter=s>\n2\n"
            "</parameter>\n</function>\n</tool_call>",
        ),
    ],
)
def test_calls_are_read(tool_format: str, text: str) -> None:
    assert read_calls(text, tool_format, SCHEMAS) == [ToolCall("f", {"x": 1, "s": "2"})]
    assert read_calls("no call", tool_format, SCHEMAS) == []


HERMES = '<tool_call>{"name": "f", "arguments": {"x": %s}}</tool_call>'


@pytest.mark.parametrize(
    ("tool_format", "text"),
    [
        ("hermes", f"<think>\nOr {HERMES % 9}, no.\n</think>\n{HERMES % 1}"),
        ("hermes", f"Well. <think>{HERMES % 9}</think>{HERMES % 1}<think>{HERMES % 9}"),
        ("hermes", f"the prompt opened it {HERMES % 9}</think>{HERMES % 1}"),
        ("hermes", f"<think>a</think>{HERMES % 1}<think>never closed {HERMES % 9}"),
        (
            "qwen3_coder",
            "<think><function=f><parameter=x>9</parameter></function></think>"
            "<tool_call><function=f><parameter=x>1</parameter></function></tool_call>",
        ),
        ("llama3", '<think>{"name": "f"}</think>\n{"name": "f", "parameters": {"x": 1}}'),
        (
            "mistral",
            '[THINK][TOOL_CALLS]f[ARGS]{"x": 9}[/THINK][TOOL_CALLS][{"name": "f", '
            '"arguments": {"x": 1}}]',
        ),
    ],
)
def test_calls_that_are_only_thought_of_are_none(tool_format: str, text: str) -> None:
    assert read_calls(text, tool_format, SCHEMAS) == [ToolCall("f", {"x": 1})]


@pytest.mark.parametrize("tag", ["<think>", "</think>"])
def test_arguments_may_have_the_tags_of_thinking(tag: str) -> None:
    text = f'<think>a</think><tool_call>{{"name": "f", "arguments": {{"s": "{tag}b"}}}}</tool_call>'
    assert read_calls(text, "hermes", SCHEMAS) == [ToolCall("f", {"s": f"{tag}b"})]


@pytest.mark.parametrize(
    ("tool_format", "text"),
    [
        ("hermes", "<tool_call>{name: f}</tool_call>"),
        ("hermes", '<tool_call>["f"]</tool_call>'),
        ("hermes", '<tool_call>{"name": "f", "arguments": [1]}</tool_call>'),
        ("llama3", '{"name": "f", "parameters": {"x": }'),
        ("mistral", '[TOOL_CALLS] [{"name": "f"'),
        ("mistral", "[TOOL_CALLS] 3"),
    ],
)
def test_a_call_that_cannot_be_read_is_a_bad_call(tool_format: str, text: str) -> None:
    (bad,) = read_calls(text, tool_format, SCHEMAS)
    assert isinstance(bad, BadCall)


def test_two_calls_of_a_turn_are_both_read() -> None:
    text = call("f", '{"x": 1}') + "\n" + call("f", "{") + call("f", '{"x": 3}')
    calls = read_calls(text, "hermes", SCHEMAS)
    assert [type(each) for each in calls] == [ToolCall, BadCall, ToolCall]


def test_the_format_follows_from_the_template() -> None:
    assert detect_format(TEMPLATE) == "hermes"
    with pytest.raises(ConfigError, match=r"rollout\.tool_format"):
        detect_format("{{ messages }}")


# -- tokens ---------------------------------------------------------------------------------------


def conversations(template: str = TEMPLATE, schemas: Any = SCHEMAS) -> Conversations:
    tokenizer = chat_tokenizer(template=template)
    return Conversations(tokenizer, schemas, end_tokens=[1], variables={})


def test_tokens_of_a_conversation_are_the_templates_own() -> None:
    talk, tokenizer = conversations(), chat_tokenizer()
    prompt = [{"role": "user", "content": "q"}]
    ids = talk.prompt_ids(prompt)
    for number, result_ in enumerate(("12", "three")):
        answer = tokenizer.encode(f"thinks {number} " + call("f", '{"x": 1}'))
        message = {"role": "tool", "name": "f", "content": result_}
        ids += [*answer, tokenizer.eos_token_id, *talk.suffix([message], tokenizer.eos_token_id)]
        asked = {"type": "function", "function": {"name": "f", "arguments": {"x": 1}}}
        text = f"thinks {number} "
        prompt += [{"role": "assistant", "content": text, "tool_calls": [asked]}, message]
    assert ids == talk.prompt_ids(prompt)


def test_a_turn_whose_thinking_the_prompt_has_opened_calls_nothing_before_it_ends() -> None:
    talk, tokenizer = conversations(), chat_tokenizer()
    text = "hm " + call("f", '{"x": 1}')
    for prefix, num_calls in (("q", 1), ("q<think>\n", 0), ("q<think>\n\n</think>\n\n", 1)):
        _, calls = talk.read_turn(tokenizer.encode(text), tokenizer.encode(prefix))
        assert len(calls) == num_calls


def test_an_answer_without_an_end_token_gets_one() -> None:
    talk = conversations()
    message = {"role": "tool", "name": "f", "content": "1"}
    assert talk.suffix([message], 50) == [1, *talk.suffix([message], 1)]


DEPENDS = TEMPLATE.replace("T{{", "T{{ loop.index }}{{")
NO_END = TEMPLATE.replace("<eos>\n", "\n")
REFUSES = TEMPLATE.replace("T{{", "{{ raise_exception('no tools here') }}T{{")


@pytest.mark.parametrize(
    ("template", "word"), [(DEPENDS, "behind"), (NO_END, "end token"), (REFUSES, "no tools here")]
)
def test_templates_that_cannot_continue_are_refused(template: str, word: str) -> None:
    conversations().check(is_game=False)
    with pytest.raises(ConfigError, match=r"data\.chat_template") as raised:
        conversations(template).check(is_game=False)
    assert word in str(raised.value)


def test_thinking_that_a_template_drops_from_earlier_turns_does_not_matter() -> None:
    dropped = TEMPLATE.replace(
        "A{{ message['content'] }}",
        "A{% if loop.last %}{{ message['content'] }}{% else %}"
        "{{ message['content'].split('</think>')[-1] }}{% endif %}",
    )
    conversations(dropped).check(is_game=False)


def test_a_tokenizer_without_a_template_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"rollout\.environment"):
        conversations("")
