"""Environments: what they are, the processes that run them, and the tokens of a conversation."""

import os
import signal
import sys
from contextlib import ExitStack, closing
from subprocess import PIPE

import pytest
from hypothesis import given
from hypothesis import strategies as st

from easyrl.config import ConfigError, load_config
from easyrl.data.datasets import open_prompts
from easyrl.environments.base import num_common
from easyrl.environments.conversation import Conversations
from easyrl.environments.host import Acted
from easyrl.environments.host_pool import CallFailed, HostLost
from easyrl.environments.loading import Interface
from easyrl.environments.pool import EnvironmentPool, check_environments
from easyrl.environments.tool_calls import BadCall, ToolCall, read_calls
from easyrl.rewards.functions import GroupLost
from easyrl.rewards.worker import Call, Scored
from easyrl.runtime.resolve import resolve
from easyrl.types import Prompt
from own_processes import popen
from runs import wait_until
from tool_models import TEMPLATE, call, chat_tokenizer, example, llama_tokenizer

ENVIRONMENTS = '''
import os, random, signal, sys, time

class Own:
    num_made = 0

    def __init__(self):
        Own.num_made += 1

    def reset(self, start: int = 0, **columns) -> str | None:
        self.count = start
        return f" from {start}"

    async def increment(self, step: int) -> int:
        """Increment the counter.

        Args:
            step: How much is added.
        """
        self.count += step
        return self.count

    def run(self, code: str) -> str:
        """Evaluate Python.

        Args:
            code: An expression.
        """
        return eval(code)

    @staticmethod
    def helper(): return "no tool, as in TRL"

    @classmethod
    def made(cls) -> int:
        """Count the instances."""
        return cls.num_made

    def get_reward(self) -> float: return float(self.count)

class Odd(str):
    def __reduce__(self): return os._exit, (1,)
    def __str__(self): return self

class Game:
    def reset(self, seed: int, **columns):
        self.seed, self.texts = seed, []
        return Odd("go")

    def step(self, action):  # type hints are not needed
        self.texts.append(str(time.time_ns()) if action == "draw" else action)
        return Odd(self.texts[-1][::-1]), action == "end"

    def get_reward(self): return len(self.texts)

class NoReset: ...
class NoHints:
    def reset(self): ...
    def move(self, direction): "Move."
class BadInit(Game):
    def __init__(self): raise RuntimeError("no licence")
class OddStep:
    def reset(self, **columns): ...
    def step(self, text: str) -> tuple[str, bool]: return 3

def is_even(environments, completions, **columns):
    return [float(each.count % 2 == 0) for each in environments]
'''
KEY, OTHER = (0, 0, 0), (0, 0, 1)
ONE_PROCESS = "rollout.environment_workers=1"


def episodes_of(folder, name, *words):
    (folder / "own.py").write_text(ENVIRONMENTS)
    flags = {"rollout.environment": f"{folder}/own.py:{name}"}
    return resolve(load_config(None, flags, [ONE_PROCESS, *words])).episodes


@pytest.fixture
def open_pool(tmp_path):
    """Function that opens a pool for a class of ENVIRONMENTS, with an episode of the group KEY."""
    with ExitStack() as opened:

        def make(name, *words, num_episodes=1):
            words = ("reward.functions=[environment]", *words)
            pool = EnvironmentPool(episodes_of(tmp_path, name, *words), {})
            opened.callback(pool.close)
            pool.loaded()
            start(pool, num_episodes)
            return pool

        yield make


@pytest.fixture(scope="module")
def shared(tmp_path_factory):
    folder = tmp_path_factory.mktemp("own")
    words = f"reward.functions=[environment, '{folder}/own.py:is_even']", "rollout.tools=[]"
    with closing(EnvironmentPool(episodes_of(folder, "Own", *words), {})) as pool:
        yield pool


@pytest.fixture
def own(shared):
    """A pool of `Own`, with two episodes of the group KEY, which start at 5."""
    assert start(shared, 2, start=5) == [" from 5", " from 5"]
    yield shared
    shared.forget(KEY)


def result(pool, future):
    wait_until(lambda: pool.poll() or future.done())
    return future.result()


def start(pool, num=1, key=KEY, **row):
    return [result(pool, future) for future in pool.start(key, "", row, [*range(num)])]


def act(pool, *calls, index=0, key=KEY):
    return Acted(*result(pool, pool.act(key, index, [*calls])))


def run(pool, code, index=0, key=KEY):
    acted = act(pool, ToolCall("run", {"code": code}), index=index, key=key)
    return str(acted.messages[0]["content"])


def play(pool, text):
    return Acted(*result(pool, pool.act(KEY, 0, text)))


def scores(pool, num, *functions):
    messages = [[{"role": "assistant", "content": "x"}]] * num
    asked = Call([{"role": "user", "content": "q"}], messages, [[1]] * num, {}, functions=functions)
    scored = Scored(*result(pool, pool.judge(KEY, asked)))
    assert scored.errors == []
    return scored.scores


def kill(pool):
    os.kill(pool._groups[KEY].host.process.pid or 0, signal.SIGKILL)


def test_episodes_have_trls_interface_and_are_scored_where_their_state_is(own):
    interfaces, reward_functions = own.loaded()
    (interface,) = interfaces.values()
    names = [schema["function"]["name"] for schema in interface.schemas]
    assert sorted(names) == ["increment", "made", "run"]
    assert not interface.is_game and interface.has_reward and reward_functions == [0, 1]
    acted = act(own, ToolCall("increment", {"step": 2}), ToolCall("run", {"code": "'done'"}))
    assert acted.messages == [
        {"role": "tool", "name": "increment", "content": "7"},
        {"role": "tool", "name": "run", "content": "done"},
    ]
    assert scores(own, 2, 0, 1) == [[7.0, 5.0], [0.0, 0.0]]
    assert run(own, "open('/proc/self/oom_score_adj').read()") == "1000\n"


@pytest.mark.parametrize(
    "picture", ["__import__('PIL.Image').Image.new('RGB', (1, 1))", "[{'type': 'image'}]"]
)
def test_a_tool_that_returns_a_picture_is_named(own, picture):
    with pytest.raises(CallFailed, match=r"tool 'run'.*rollout\.takes_pictures"):
        run(own, picture)


def test_errors_of_a_tool_are_results(own):
    wrong = {
        "str": ToolCall("increment", {"step": "x"}),
        "step": ToolCall("increment", {}),
        "fly": ToolCall("fly", {}),
        "no JSON": BadCall("no JSON"),
        "left": ToolCall("run", {"code": "sys.exit('left')"}),
    }
    acted = act(own, *wrong.values(), ToolCall("increment", {"step": 1}))
    *errors, last = [message["content"] for message in acted.messages]
    assert (acted.num_calls, acted.num_errors, last) == (6, 5, "6")
    for error, word in zip(errors, wrong, strict=True):
        assert error.startswith("{'error': ") and word in error


def test_output_is_counted_by_call(own):
    """Also where calls run at the same time."""
    shout = "time.sleep(0.2) or print('x' * %d * 2**20) or Odd('loud')"
    shouts = [ToolCall("run", {"code": shout % size}) for size in (9, 9, 17)]
    found = [own.act(KEY, index, shouts) for index in (0, 1)]
    for acted in (Acted(*result(own, each)) for each in found):
        contents = [message["content"] for message in acted.messages]
        assert contents[:2] == ["loud", "loud"] and "16 MiB in one call" in contents[2]


SERVER = """
import socket, uvicorn
from openenv.core.env_server import Action, Environment, Observation, State, create_app

class Message(Action): message: str
class Echoed(Observation): echoed_message: str
class Echo(Environment):
    SUPPORTS_CONCURRENT_SESSIONS = True
    state = State()
    def reset(self, seed=None, episode_id=None, **more): return Echoed(echoed_message="ready")
    def step(self, action, timeout_s=None, **more):
        return Echoed(echoed_message=action.message, reward=1.0)

app = create_app(Echo, Message, Echoed, max_concurrent_envs=64)
port = socket.create_server(("127.0.0.1", 0))
print(port.getsockname()[1], flush=True)
uvicorn.Server(uvicorn.Config(app, log_level="warning")).run(sockets=[port])
"""


def test_the_examples_of_the_docs_work(tmp_path, monkeypatch):
    for name in ("calculator.py", "my_openenv.py"):
        (tmp_path / name).write_text(example(name))
    tools = f"rollout.tools=['{tmp_path}/calculator.py:calculate']"
    spec = resolve(load_config(None, {}, [tools, ONE_PROCESS])).episodes
    with closing(EnvironmentPool(spec, {})) as pool:
        start(pool)
        acted = act(pool, ToolCall("calculate", {"left": 6, "operation": "*", "right": 7}))
    assert acted.messages[0]["content"] == "42"
    pytest.importorskip("openenv", reason="needs OpenEnv: pip install 'easyrl-train[openenv]'")
    flags = {"rollout.environment": f"{tmp_path}/my_openenv.py:Echo"}
    words = ["reward.functions=[environment]", ONE_PROCESS]
    spec = resolve(load_config(None, flags, words)).episodes
    server = popen([sys.executable, "-c", SERVER], stdout=PIPE, text=True)
    monkeypatch.setenv("ENV_URL", f"http://localhost:{server.stdout.readline().strip()}")
    with closing(EnvironmentPool(spec, {})) as pool:
        start(pool, 2)
        for number in range(3):
            acted = act(pool, ToolCall("echo", {"message": f"hello {number}"}))
            assert acted.messages[0]["content"] == f"hello {number}"
        assert scores(pool, 2, 0) == [[3.0, 0.0]]


def test_a_slow_or_wrong_call_fails_and_others_go_on(open_pool):
    pool = open_pool("Own", "rollout.tool_timeout_seconds=1", num_episodes=2)
    slow = pool.act(KEY, 0, [ToolCall("run", {"code": "time.sleep(60)"})])
    assert run(pool, "7", index=1) == "7"
    with pytest.raises(TimeoutError):
        result(pool, slow)
    (stuck,) = (host.process for host in pool._hosts)
    pool.forget(KEY)
    assert not stuck.is_alive()
    with pytest.raises(CallFailed, match="got 3"):
        play(open_pool("OddStep"), "go")


def test_a_slow_reward_names_the_setting_of_its_limit(open_pool):
    pool = open_pool("Own", "reward.timeout_seconds=1")
    run(pool, "setattr(Own, 'get_reward', lambda self: time.sleep(60))")
    with pytest.raises(TimeoutError, match=r"reward\.timeout_seconds"):
        scores(pool, 1, 0)


def test_a_dead_process_ends_its_groups_only(open_pool):
    pool = open_pool("Own", "rollout.environment_workers=2")
    start(pool, key=OTHER)  # in the second process
    with pytest.raises(HostLost, match="exit code 3"):
        run(pool, "os._exit(3)")
    with pytest.raises(HostLost):
        run(pool, "7")
    assert run(pool, "7", key=OTHER) == "7"


@pytest.mark.parametrize("word", ["rollout.concurrent_calls=4", "runtime.deterministic=true"])
def test_calls_of_a_killed_process_are_repeated_once(open_pool, word, monkeypatch):
    pool, reports = open_pool("Game", word), []
    monkeypatch.setattr(pool, "report", reports.append)
    play(pool, "a")
    play(pool, "b")
    kill(pool)
    assert play(pool, "cd").messages == [{"role": "user", "content": "dc"}]
    assert scores(pool, 1, 0) == [[3.0]] and len(reports) == 1
    kill(pool)
    with pytest.raises(HostLost, match="-9"):
        play(pool, "d")


def test_a_killed_environment_that_cannot_be_repeated_is_lost(open_pool):
    pool = open_pool("Game")
    play(pool, "draw")
    kill(pool)
    with pytest.raises(GroupLost):
        scores(pool, 1, 0)


@pytest.mark.parametrize(("name", "key", "word"), [
    ("NoReset", "rollout.environment", "reset"),
    ("NoHints", "rollout.environment", "type hint"),
    ("BadInit", "rollout.environment", "no licence"),
    ("Missing", "rollout.environment", "own.py:Own"),
    ("OddStep", "reward.functions", "get_reward"),
])  # fmt: skip
def test_unusable_environments_are_refused(tmp_path, name, key, word):
    with pytest.raises(ConfigError, match=key) as raised:
        check_environments(episodes_of(tmp_path, name), Prompt(0, "q", {}))
    assert word in str(raised.value)


def test_each_row_names_one_of_several_environments(tmp_path):
    file, rows = tmp_path / "own.py", tmp_path / "rows.jsonl"
    file.write_text(ENVIRONMENTS)
    words = [f"rollout.environment={{one: '{file}:Own', two: '{file}:Own'}}"]
    prompt = Prompt(0, "q", {"environment": "two"})
    spec = resolve(load_config(None, {}, words)).episodes
    assert {*check_environments(spec, prompt)[0]} == {"one", "two"}
    rows.write_text('{"environment": "one"}\n{"environment": "three"}\n')
    config = load_config(None, {}, [*words, f"data.dataset={rows}", "data.shuffle=false"])
    with pytest.raises(ConfigError, match=r"2: column 'environment'.*'three'"):
        open_prompts(resolve(config).data).examples()


TYPES = {"properties": {"x": {"type": "integer"}, "s": {"type": "string"}}}
SCHEMAS = [{"type": "function", "function": {"name": "f", "parameters": TYPES}}]
HERMES = '<tool_call>{"name": "f", "arguments": {"x": %s}}</tool_call>'
CODER = (
    "<tool_call>\n<function=f>\n<parameter=x>\n1\n</parameter>\n<parameter=s>\n2\n</parameter>\n"
    "</function>\n</tool_call>"
)
BOTH = {"x": 1, "s": "2"}


@pytest.mark.parametrize(("tool_format", "text", "arguments"), [
    ("hermes", f"Well. {HERMES % 1}", {"x": 1}),
    ("llama3", '<|python_tag|>{"name": "f", "parameters": {"x": 1, "s": "2"}}', BOTH),
    ("qwen3_coder", CODER, BOTH),
    ("qwen3_coder", f"<think>\nOr {CODER}, no.\n</think>\n{CODER}", BOTH),
    # What is only thought of is no call.
    ("hermes", f"<think>\nOr {HERMES % 9}, no.\n</think>\n{HERMES % 1}", {"x": 1}),
    ("hermes", f"the prompt opened it {HERMES % 9}</think>{HERMES % 1}", {"x": 1}),
    ("hermes", HERMES.replace("x", "s") % '"a </think> b"', {"s": "a </think> b"}),
    # What cannot be read.
    ("hermes", "<tool_call>{name: f}</tool_call>", None),
    ("hermes", '<tool_call>{"name": "f", "arguments": [1]}</tool_call>', None),
    ("hermes", HERMES % '"a text, where the schema has an integer"', None),
    ("llama3", '{"name": "f", "parameters": {"x": }', None),
])  # fmt: skip
def test_calls_are_read_and_a_bad_one_is_named(tool_format, text, arguments):
    assert read_calls("no call", tool_format, SCHEMAS) == []
    (found,) = read_calls(text, tool_format, SCHEMAS)
    assert isinstance(found, BadCall) if arguments is None else found == ToolCall("f", arguments)


def conversations(template=TEMPLATE):
    interface = Interface(SCHEMAS, is_game=False, has_reward=False)
    spec = resolve(load_config(words=["rollout.environment=guess"])).episodes
    return Conversations(spec, chat_tokenizer(template=template), interface, [1])


def test_tokens_of_a_conversation_are_the_templates_own():
    talk, tokenizer = conversations(), chat_tokenizer()
    prompt = [{"role": "user", "content": "q"}]
    ids = talk.prompt_ids(prompt)
    asked = {"type": "function", "function": {"name": "f", "arguments": {"x": 1}}}
    for text, observed in (("thinks ", "12"), ("thinks again ", "three")):
        answer = tokenizer.encode(text + call("f", '{"x": 1}'))
        message = {"role": "tool", "name": "f", "content": observed}
        ids += [*answer, tokenizer.eos_token_id, *talk.suffix([message], tokenizer.eos_token_id)]
        prompt += [{"role": "assistant", "content": text, "tool_calls": [asked]}, message]
    assert ids == talk.prompt_ids(prompt)
    # An answer without an end token gets one.
    assert talk.suffix([message], 50) == [1, *talk.suffix([message], 1)]


def test_a_turn_whose_thinking_the_prompt_has_opened_calls_nothing_before_it_ends():
    talk, tokenizer = conversations(), chat_tokenizer()
    answer = tokenizer.encode("hm " + call("f", '{"x": 1}'))
    for prefix, num_calls in (("q", 1), ("q<think>\n", 0), ("q<think>\n\n</think>\n\n", 1)):
        assert len(talk.read_turn(answer, tokenizer.encode(prefix))[1]) == num_calls


@pytest.mark.parametrize(
    ("template", "word"),
    [
        (TEMPLATE.replace("T{{", "T{{ loop.index }}{{"), "behind"),
        (TEMPLATE.replace("<eos>\n", "\n"), "end token"),
        ("{{ messages }}", "rollout.tool_format"),
    ],
)
def test_templates_that_cannot_continue_are_refused(template, word):
    with pytest.raises(ConfigError) as raised:
        conversations(template)
    assert word in str(raised.value)


def test_a_stop_string_ends_the_turn_in_the_template_only_if_it_is_written_there():
    tokenizer = chat_tokenizer(template=TEMPLATE)
    tokenizer.add_special_tokens({"additional_special_tokens": ["</answer>", "<|im_end|>"]})
    answer, end_of_turn = tokenizer.convert_tokens_to_ids(["</answer>", "<|im_end|>"])
    tokenizer.chat_template = (
        "{% for message in messages %}<{{ message.role }}>{{ message.content }}<|im_end|>"
        "{% endfor %}"
    )
    words = ["rollout.environment=guess", 'rollout.stop=["</answer>","<|im_end|>"]']
    spec = resolve(load_config(words=words)).episodes
    game = Interface([], is_game=True, has_reward=False)
    talk = Conversations(spec, tokenizer, game, [tokenizer.eos_token_id])
    observed = [{"role": "user", "content": "hi"}]
    behind = tokenizer.encode("<user>hi<|im_end|>", add_special_tokens=False)
    assert talk.suffix(observed, end_of_turn) == behind
    assert talk.suffix(observed, answer) == [end_of_turn, *behind]
    letters = tokenizer.encode("12", add_special_tokens=False)
    assert talk.read_turn([*letters, end_of_turn], []).text == "12"
    assert talk.read_turn([*letters, answer], []).text == "12</answer>"


@pytest.mark.parametrize("legacy", [False, True])
def test_messages_behind_an_answer_have_the_tokens_of_the_whole_conversation(legacy):
    """Llama's tokenizer begins a text with a space, and behind a special token only if `legacy`."""
    template = (
        "{% for message in messages %}{% if message.role == 'assistant' %}{{ message.content }}</s>"
        "{% else %}[INST]{{ message.content }}[/INST]{% endif %}{% endfor %}"
    )
    tokenizer = llama_tokenizer(legacy=legacy, chat_template=template)
    spec = resolve(load_config(None, {"rollout.environment": "guess"})).episodes
    game = Interface([], is_game=True, has_reward=False)
    end = tokenizer.eos_token_id
    conversations = Conversations(spec, tokenizer, game, [end])
    talk = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    observed = [{"role": "user", "content": "hi"}]
    whole = tokenizer.apply_chat_template([*talk, *observed], return_dict=False)
    assert conversations.suffix(observed, end) == whole[whole.index(end) + 1 :]
    assert conversations.suffix(observed, 0) == whole[whole.index(end) :]  # ended by a stop string


@given(st.lists(st.integers(0, 2)), st.lists(st.integers(0, 2)), st.lists(st.integers(0, 2)))
def test_the_longest_common_prefix_is_that_of_a_comparison_token_by_token(begin, one, other):
    one = begin + one
    other = begin + other
    expected = 0
    for mine, theirs in zip(one, other, strict=False):
        if mine != theirs:
            break
        expected += 1
    assert num_common(one, other) == num_common(other, one) == expected
