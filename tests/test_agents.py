"""Agents: what they ask of the endpoint, and the tokens that are trained."""

import json
import math
import shlex
import shutil
import subprocess
import sys
import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, suppress
from decimal import Decimal
from pathlib import Path

import numpy as np
import openai
import pytest

from agent_worker import HELLO, KEY, TOOL, Worker, asked, chat, num_branches, played, said
from easyrl.agents.endpoint import Endpoint
from easyrl.agents.pool import AgentPool
from easyrl.agents.program import Agent, fill_in
from easyrl.config import ConfigError, load_config
from easyrl.environments.host_pool import HostKilled
from easyrl.runtime.resolve import resolve
from own_processes import popen
from runs import (
    ALL_SAMPLES,
    GUESS,
    assert_on_policy,
    assert_tokens_are_counted,
    finish,
    finish_after,
    inserted_by_guess,
    kill_worker,
    lines_of,
    num_characters,
    succeed,
    wait_until,
    write_rows,
)
from tool_models import chat_model, example


def test_branches_edits_and_sub_agents_are_trained_once_with_the_engines_tokens():
    def solve(client, row):
        messages = list(HELLO)
        for _ in range(3):  # a conversation that goes on
            messages += [said(chat(client, messages)), asked("higher")]
        other = [*messages[:2], asked("lower")]  # another continuation of its first answer
        other += [said(chat(client, other)), asked("higher")]
        chat(client, other)
        chat(client, [asked("0-99"), said("5"), asked("lower")])  # an answer that was edited
        chat(client, [asked("7-8")])  # a sub-agent
        chat(client, [asked("7-8"), said("7"), *messages[-2:]])  # a compacted history
        last = chat(client, messages)  # the first conversation goes on
        return {"turns": 8, "length": len(last) / 100}

    found = played(solve, num=2)
    _, completions, answers, scored, metrics, columns = found[KEY]
    for completion, messages, branches in zip(
        completions, answers, columns["branches"], strict=True
    ):
        assert num_branches(completion) >= 5
        assert [each["role"] for each in messages] == ["assistant", "user"] * 3 + ["assistant"]
        assert len(branches) == 4
    assert metrics["episodes/turns"] == 9
    assert scored.metrics["rewards/turns/mean"] == 8
    assert scored.scores == [[pytest.approx(8 + len(a[-1]["content"]) / 100) for a in answers]]


def test_the_engine_computes_each_token_of_an_episodes_tree_once():
    """Branches behind a prompt of 1,500 tokens, and behind answers of one of them."""
    long = "0-9" * 490

    def solve(client):
        branches = []
        for question in ("lower", "higher", "0-9", "1-2"):
            messages = [asked(long + question)]
            messages += [said(chat(client, messages)), asked("higher")]
            branches.append([*messages, said(chat(client, messages))])
        for messages in branches:
            chat(client, [*messages, asked("lower")])
            chat(client, [*messages, asked("higher")])

    how = {"num": 2, "num_rows": 16, "prompt_length": 1500, "length": 600}
    with closing(Worker("tiny-guess", **how)) as worker:
        num_computed = []
        run_model = worker.engine._run_model

        def counted(inputs):
            num_computed.append(len(inputs.ids))
            return run_model(inputs)

        worker.engine._run_model = counted
        found = worker.run(solve)
        worker.check(found)
        prompt_ids, completions, *_ = found[KEY]
    assert len(prompt_ids) > 1450
    num_tokens = len(prompt_ids) + sum(len(each.token_ids) for each in completions)
    assert sum(num_computed) <= num_tokens


def test_what_the_model_reads_before_its_first_token_is_counted_for_each_episode():
    prompts = ["0-9", "0-99", "7-8", None]  # None: an agent that asks nothing
    left = list(prompts)

    def solve(client):
        prompt = left.pop()
        if prompt is not None:
            chat(client, [asked(prompt), said(chat(client, [asked(prompt)])), asked("lower")])

    prompt_ids, completions, *_ = played(solve, num=4)[KEY]
    read = sorted(each.num_read_before(len(prompt_ids)) for each in completions)
    assert read == sorted(0 if prompt is None else len(f"{prompt}\n") for prompt in prompts)
    without = [each for each in completions if each.num_sampled == 0]
    assert [each.num_inserted for each in without] == [1]  # an end token stands for it


def test_suspended_sequences_make_room_for_others():
    def solve(client):
        texts = {}
        for _ in range(2):
            for prompt in ("0-9", "1-8", "2-7", "3-6"):
                messages = texts.setdefault(prompt, [asked(prompt)])
                messages += [said(chat(client, messages)), asked("lower")]

    found = played(solve, num_groups=4, num=3, max_open=2, num_rows=2)
    assert all(each.is_sampled.any() for group in found.values() for each in group[1])


def test_requests_at_once_are_served_and_streams_and_choices_have_all_tokens():
    def solve(client):
        with ThreadPoolExecutor(100) as threads:
            own = list(threads.map(lambda n: chat(client, [asked(f"0-{n}")]), range(100)))
        n = client.chat.completions.create(model="m", messages=HELLO, n=3, max_tokens=20)
        options = {"stream": True, "stream_options": {"include_usage": True}}
        chunks = list(client.chat.completions.create(model="m", messages=HELLO, **options))
        assert chunks[-1].usage.completion_tokens > 0 and chunks[-1].choices == []
        text = "".join(each.choices[0].delta.content or "" for each in chunks[:-1])
        whole = client.completions.create(model="m", prompt="0-5", max_tokens=3)
        longer = f"0-5{whole.choices[0].text}x"
        more = client.completions.create(model="m", prompt=longer, max_tokens=3)
        assert whole.usage.prompt_tokens == 3
        assert more.usage.prompt_tokens == 4 + whole.usage.completion_tokens
        assert [model.id for model in client.models.list()]
        assert n.usage.completion_tokens >= 3 and len(n.choices) == 3
        return float(len(own) == 100 and text.strip() != "")

    found = played(solve, "rollout.max_turns=200", length=1500)
    assert found[KEY][3].scores == [[1.0]], found[KEY][3].errors


def refused(ask, *arguments, **options):
    """Return the code of a refusal, the field that it names, and the status."""
    with pytest.raises(openai.APIStatusError) as caught:
        ask(*arguments, **options)
    return caught.value.code, caught.value.param, caught.value.status_code


def test_what_is_not_on_policy_or_not_supported_is_refused_with_the_fields_name():
    kept, picture = [], {"type": "image_url", "image_url": {"url": "data:"}}
    fields = {
        "logit_bias": {"5": 1},
        "temperature": 0.2,
        "top_p": 0.5,
        "stop": ["x"],
        "seed": 1,
        "logprobs": True,
        "min_tokens": 5,
        "response_format": {"type": "grammar"},
        "n": 0,
        "max_tokens": 0,
        "tool_choice": "sometimes",
    }

    def solve(client, base_url, api_key):
        kept.append(openai.OpenAI(base_url=base_url, api_key=api_key))
        for name, value in fields.items():
            assert refused(chat, client, HELLO, extra_body={name: value})[1] == name
        assert refused(chat, client, HELLO, tools=[{"type": "retrieval"}])[1] == "tools"
        assert refused(chat, client, [{"role": "user", "content": [picture]}])[1] == "messages"
        assert refused(chat, client, [*HELLO, said("5")])[1] == "messages"
        assert refused(chat, client.with_options(api_key="other"), HELLO)[0] == "invalid_api_key"
        assert refused(client.with_options(api_key="other").models.list)[0] == "invalid_api_key"
        assert refused(client.embeddings.create, model="m", input="x")[::2] == ("not_found", 404)
        chat(kept[-1], HELLO, temperature=1.0, top_p=1, presence_penalty=0, max_tokens=2)
        long = refused(chat, client, [asked("5" * 500)])
        assert long[0] == "context_length_exceeded"
        return 1.0

    with closing(Worker("tiny-guess", num=2)) as worker:
        found = worker.run(solve)
        worker.check(found)
        assert refused(chat, kept[0], HELLO)[::2] == ("invalid_api_key", 401)
        notes = worker.pool.notes
    assert len(notes) == 10 and all("was refused: " in note for note in notes)
    assert any("logit_bias: this field is not supported" in note for note in notes)
    _, completions, _, scored, _, columns = found[KEY]
    assert scored.errors == [] and scored.scores == [[1.0, 1.0]]
    assert {each.finish_reason for each in completions} == {"length"}
    assert columns["ended_by"] == ["length"] * 2


def test_other_sampling_settings_may_be_replaced_and_stop_strings_are_the_runs():
    def solve(client):
        text = chat(client, HELLO, temperature=0.2, tool_choice="required", stop="1")
        messages = [*HELLO, said(text), asked("higher")]
        for _ in range(3):
            messages += [said(chat(client, messages, stop=["1"])), asked("higher")]
        return float("1" not in text)

    words = "rollout.agent_sampling=ignore", "rollout.stop=['1']"
    with closing(Worker("tiny-guess", *words, num=8)) as worker:
        found = worker.run(solve)
        worker.check(found)
        notes = " ".join(worker.pool.notes)
    assert "temperature" in notes and "tool_choice" in notes and len(worker.pool.notes) == 2
    assert found[KEY][3].scores == [[1.0] * 8]
    # A continued conversation keeps its row and stores no token twice.
    assert all(num_branches(each) == 1 for each in found[KEY][1])


def test_an_episode_whose_requests_are_all_refused_says_so():
    """Some clients make an answer of a refusal."""

    def solve(client):
        with suppress(openai.APIStatusError):
            chat(client, HELLO, seed=7)
        return 1.0

    with closing(Worker("tiny-guess", num=2)) as worker:
        *_, columns = worker.run(solve)[KEY]
        [note] = worker.pool.notes
    assert columns["ended_by"] == ["refused"] * 2
    assert "a request of the agent was refused: seed: expected" in note


def test_every_end_of_an_agent_is_counted_and_the_run_continues():
    def leave(client):
        def ask():
            with suppress(openai.APIStatusError):  # it is answered, or refused after the end
                chat(client, HELLO)

        threading.Thread(target=ask).start()
        chat(client, [asked("3-4")], max_tokens=2)
        raise RuntimeError("in the middle of a call")

    def for_ever(client):
        while True:
            chat(client, HELLO, max_tokens=3)

    def regardless(client):
        for _ in range(100):
            with suppress(openai.APIStatusError):
                chat(client, HELLO, max_tokens=3)

    def insistent(client):
        while True:
            with suppress(openai.BadRequestError):
                chat(client, HELLO, temperature=0.2)

    def careless(client):
        call = {"type": "function", "function": {"name": "f", "arguments": '"a"'}}
        result = {"role": "tool", "tool_call_id": "a", "content": "1"}
        with suppress(openai.APIStatusError):
            chat(client, [*HELLO, said(None) | {"tool_calls": [{"id": "a", **call}]}, result])
        return 0.25

    ends = [
        (regardless, 0.0, "max_turns"),
        (lambda client: 0.5, 0.5, "answer"),
        (for_ever, 0.0, "max_turns"),
        (leave, 0.0, "error"),
        (lambda client: "text", 0.0, "error"),
        (lambda client: float("nan"), 0.0, "error"),
        (lambda client: chat(client, HELLO) and None, None, "answer"),
        (lambda client: {"a": 1, "b": chat(client, HELLO) == ""}, 1.0, "answer"),
        (insistent, 0.0, "time"),
        (careless, 0.25, "refused"),
    ]

    def solve(client, row):
        return ends[row["answer"]][0](client)

    found = played(solve, "rollout.max_turns=5", max_open=2, num_groups=len(ends))
    for index, (_, value, ended_by) in enumerate(ends):
        _, completions, _, scored, metrics, columns = found[0, 0, index]
        assert scored.scores == [[value]] and columns["ended_by"] == [ended_by]
        assert bool(scored.errors) == (ended_by == "error")
        assert metrics["episodes/without_requests"] == (not completions[0].is_sampled.any())
    assert [*found[0, 0, 7][3].metrics] == ["rewards/a/mean", "rewards/b/mean"]


def test_an_answer_that_ends_with_the_tokens_of_its_episode_is_truncated():
    (completion,) = played(lambda client: len(chat(client, HELLO)), length=1)[KEY][1]
    assert completion.finish_reason == "length" and len(completion.token_ids) == 1


def test_the_group_of_a_killed_agent_begins_again_and_only_its_new_tokens_are_trained():
    begun, told, both = [], [], threading.Barrier(2)

    def solve(client):
        both.wait()
        begun.append(client)
        is_killed, text = len(begun) <= 2, chat(client, HELLO)
        if is_killed:
            raise HostKilled("killed")
        told.append(text)
        return 1.0

    with closing(Worker("tiny-guess", num=2)) as worker:
        found = worker.run(solve)
        _, completions, answers, scored, _, _ = found[KEY]
        decode = worker.tokenizer.decode
        texts = [decode(each.token_ids[each.is_sampled][:-1].tolist()) for each in completions]
    assert sorted(texts) == sorted(told) and len(begun) == 4
    assert scored.scores == [[1.0, 1.0]] and [len(each) for each in answers] == [1, 1]


def test_the_death_of_an_agents_process_is_noticed(tmp_path):
    (tmp_path / "own.py").write_text("import os\ndef solve(row): os.kill(os.getpid(), 9)\n")
    config = load_config(None, {"rollout.agent": f"{tmp_path}/own.py:solve"})
    with closing(AgentPool(resolve(config).episodes, {})) as pool:
        (future,) = pool.run_agents(KEY, {}, "http://localhost", ["key"])
        wait_until(lambda: pool.poll() or future.done())
    assert isinstance(future.exception(), HostKilled)


def test_tools_are_called_through_the_client_and_their_results_continue_the_tokens(tmp_path):
    calls = ['<tool_call>{"name": "add", "arguments": {"a": 2, "b": 3}}</tool_call>']
    model = chat_model(tmp_path / "model", calls)

    async def solve(client):
        messages, num_calls = [asked("2+3")], 0
        for turn in range(6):
            answer = await client.chat.completions.create(
                model="m", messages=messages, tools=[TOOL], max_tokens=60
            )
            message = answer.choices[0].message
            messages.append(message.model_dump(exclude_none=True) if turn < 3 else message)
            for call in message.tool_calls or ():
                assert answer.choices[0].finish_reason == "tool_calls"
                assert json.loads(call.function.arguments) == {"a": 2, "b": 3}
                assert "tool_call" not in (message.content or "")
                num_calls += 1
                result = {"role": "tool", "tool_call_id": call.id, "content": "5"}
                messages.append(result)
            messages.append(asked("more"))
        assert num_calls > 0
        plain = [*messages[:1], said("no"), asked("x")]
        answer = await client.chat.completions.create(
            model="m", messages=plain, tools=[TOOL], tool_choice="none", max_tokens=60
        )
        assert not answer.choices[0].message.tool_calls
        return 1.0

    found = played(solve, model=model, num=2, length=700)
    assert found[KEY][3].errors == []
    assert all(num_branches(each) == 2 for each in found[KEY][1])


def test_the_examples_of_the_docs_run(tmp_path):
    calls = ['<tool_call>{"name": "multiply", "arguments": {"a": 2, "b": 3}}</tool_call>']
    model = chat_model(tmp_path / "model", calls)
    for name, columns in {
        "calculator_agent.py": {"left": 2, "right": 3},
        "debate_agent.py": {"question": "Is 3 more than 2?", "answer": "yes"},
    }.items():
        code = {}
        exec(example(name, "agents.md"), code)
        found = played(code["solve"], model=model, num=2, length=700, columns=columns)
        assert found[KEY][3].errors == [] and None not in found[KEY][3].scores[0]
    assert all(num_branches(each) >= 2 for each in found[KEY][1])


@pytest.mark.long
@pytest.mark.skipif(not (shutil.which("jq") and shutil.which("curl")), reason="needs jq and curl")
def test_the_command_of_the_docs_runs(tmp_path):
    (tmp_path / "ask.sh").write_text(example("ask.sh", "agents.md"))
    rows = [{"question": f"What is {n}?", "answer": "a"} for n in range(4)]
    words = ("--model", chat_model(tmp_path / "model"), "--no-live", "--iterations", "1")
    words += ("--dataset", str(write_rows(tmp_path / "rows.jsonl", rows)), "data.num_held_out=0")
    words += ("--agent", f"sh {tmp_path}/ask.sh {{question}} {{answer}}", "--output")
    succeed(*words, str(tmp_path / "run"), "rollout.max_completion_length=60")
    found = {sample["reward"] for sample in lines_of(tmp_path / "run" / "samples.jsonl")}
    assert found <= {0.0, 1.0} and found


def test_in_deterministic_mode_bits_do_not_depend_on_the_agents_time(monkeypatch):
    both, take = set(), Endpoint.take  # keys of episodes that ask twice at a time

    def take_both(endpoint):
        """Take the two requests of such an episode together, also on a busy machine."""
        requests = [*take_both.held, *take(endpoint)]
        numbers = Counter(request.key for request in requests)
        both.difference_update(key for key in [*both] if numbers[key] == 2)
        take_both.held = [request for request in requests if request.key in both]
        return [request for request in requests if request.key not in both]

    take_both.held = []
    monkeypatch.setattr(Endpoint, "take", take_both)

    def solve(client, row):
        messages = list(HELLO)
        for _ in range(3):
            time.sleep(np.random.default_rng().random() / 100)
            messages += [said(chat(client, messages)), asked("lower")]
        chat(client, [asked("1-2"), said("1"), asked("higher")])
        both.add(client.api_key)
        with ThreadPoolExecutor(2) as threads:  # not one at a time
            asks = [threads.submit(chat, client, HELLO) for _ in range(2)]
            errors = [each.exception() for each in asks]
        assert sum(isinstance(error, openai.BadRequestError) for error in errors) == 1
        return 1.0

    results = []
    for _ in range(2):
        words = "runtime.deterministic=true"
        found = played(solve, words, num=3, max_open=2, num_groups=3)
        results.append([[*c.token_ids, *c.logprobs] for k in sorted(found) for c in found[k][1]])
        assert all(of[3].errors == [] for of in found.values())
    assert results[0] == results[1]


PYTHON = shlex.quote(sys.executable)
PROGRAMS = Path(__file__).with_name("agent_programs.py")


def test_an_agent_plays_and_no_bit_depends_on_schedule_delays_or_a_killed_worker(tmp_path):
    sync, run = tmp_path / "sync", tmp_path / "periodic"
    words = (*GUESS, "--infer-devices", "cpu:2", "--agent", f"{PROGRAMS}:solve")
    words += ("--iterations", "2", "runtime.deterministic=true", ALL_SAMPLES)
    succeed(*words, "--schedule", "sync", "--output", str(sync))
    assert_tokens_are_counted(sync, num_devices=3)
    how = {"EASYRL_RANDOM_DELAYS": "0.02"}
    code, out, err = finish_after("iteration 1/", kill_worker, *words, "--output", str(run), **how)
    assert code == 0, out + err
    summary = assert_on_policy(run)
    assert summary["weights_sha256"] == assert_on_policy(sync)["weights_sha256"]
    assert (summary["groups_trained"], summary["worker_restarts"]) == (12, 1)
    for sample in lines_of(run / "samples.jsonl"):
        roles = [message["role"] for message in sample["messages"]]
        assert roles[::2] == ["user"] * len(roles[::2]) and roles[1::2]
        assert sample["ended_by"] in ("answer", "length") and "branches" not in sample
        assert sample["reward"] == pytest.approx(sample["rewards"]["agent"])


@pytest.mark.long
def test_killed_workers_and_agents_lose_no_group_and_nothing_is_trained_twice(tmp_path):
    words = (*GUESS, "--infer-devices", "cpu:2", "--agent", f"{PROGRAMS}:unlucky")
    words += ("--iterations", "3", "--output", str(tmp_path / "run"))
    how = {"AGENT_FOLDER": str(tmp_path), "EASYRL_RANDOM_DELAYS": "0.02"}
    code, out, err = finish_after("iteration 1/", kill_worker, *words, **how)
    assert code == 0, out + err
    summary = assert_on_policy(tmp_path / "run")
    assert (summary["groups_trained"], summary["worker_restarts"]) == (18, 1)
    assert (tmp_path / "killed").exists()


@pytest.mark.long
def test_an_agent_learns_as_the_environment_does(tmp_path):
    words = ("--agent", f"{PROGRAMS}:solve", "--iterations", "60", "rollout.num_generations=8")
    words += ("train.learning_rate=0.0005", "rollout.max_completion_length=160")
    succeed(*GUESS, *words, "--output", str(tmp_path / "run"), timeout=1800)
    assert_on_policy(tmp_path / "run")
    rewards = [line["reward"] for line in lines_of(tmp_path / "run" / "metrics.jsonl")]
    first = rewards[:10]
    last = rewards[-20:]
    # An iteration plays 6 secrets, and its mean reward depends on which: 0.06 more or less.
    error = math.hypot(error_of_mean(first), error_of_mean(last))
    assert np.mean(last) - np.mean(first) > max(0.05, 2 * error)


def error_of_mean(values):
    return np.std(values) / math.sqrt(len(values))


def test_an_agent_that_asks_nothing_is_named_once(tmp_path):
    silent = tmp_path / "silent.py"
    silent.write_text("def play(row, client):\n    return 1.0\n")
    words = (*GUESS, "--agent", f"{silent}:play", "train.eval_every=1", "data.num_held_out=4")
    out = succeed(*words, "--iterations", "2", "--output", str(tmp_path / "run"))
    assert out.count("100% of the agent's episodes got no answer from the model") == 1


def test_an_evaluation_runs_a_command_on_held_out_rows(tmp_path):
    agent = f"{PYTHON} {shlex.quote(str(PROGRAMS))} {{secret}}"
    words = ("--model", "tiny-guess", "--dataset", "guess", "--agent", agent, "--no-live")
    limits = ("data.max_prompt_length=16", "eval.correct_reward=1.01", "--output", str(tmp_path))
    limits += ("--reward", "regex", "reward.pattern=.*")
    subprocess.run([sys.executable, "-m", "easyrl", "eval", *words, *limits], check=True)
    results = json.loads((tmp_path / "eval.json").read_text())
    assert results["accuracy"] > 0.3 and results["rollout.agent"] == agent
    samples = lines_of(tmp_path / "samples.jsonl")
    assert all(line["messages"][0]["content"] == "0-99" for line in samples)
    inserted = [inserted_by_guess(line) for line in samples]
    lengths = [
        num_characters(line["raw"][1]) - number
        for line, number in zip(samples, inserted, strict=True)
    ]
    assert [line["length"] for line in samples] == lengths
    assert [line["inserted_tokens"] for line in samples] == inserted
    assert results["completion_tokens"] == sum(lengths)
    assert results["inserted_tokens"] == sum(inserted) > 0
    assert results["mean_completion_length"] == pytest.approx(np.mean(lengths))
    assert results["mean_inserted_length"] == pytest.approx(np.mean(inserted))
    speed = sum(lengths) / results["wall_seconds"]
    assert results["tokens_per_second"] == pytest.approx(speed)
    assert {line["reward"] for line in samples if line["rewards"]["agent"] is None} == {1.0}


def test_agents_that_cannot_run_are_refused_before_anything_is_loaded(tmp_path):
    own = tmp_path / "own.py"
    own.write_text("def other(row): ...\nasync def wants(row, budget): ...\n")
    cases = {
        f"{own}:solve": "other",
        str(own): "other",
        f"{own}:wants": "budget",
        "no-such-program {secret}": "no-such-program",
        "python '": "rollout.agent",
    }
    for agent, word in cases.items():
        with pytest.raises(ConfigError, match=word):
            Agent(resolve(load_config(None, {"rollout.agent": agent})).episodes)
    with pytest.raises(ConfigError, match=r"rollout\.environment"):
        load_config(None, {"rollout.agent": "own.py:solve", "rollout.environment": "guess"})
    row = {"a": "b; c", "n": 1, "price": Decimal("1.50"), "numbers": np.arange(2), "file": b"a"}
    words = ["{a}", "-n={n}", "{{}}", "{price}", "{numbers}"]
    assert fill_in(words, row) == ["b; c", "-n=1", "{}", "1.50", "[0, 1]"]
    with pytest.raises(ConfigError, match=r"rollout\.agent.*column 'file'.*b'a'"):
        fill_in(["{file}"], row)
    code, out, err = finish(*GUESS, "--agent", f"{PYTHON} {{secrets}}", "--dry-run")
    assert code == 2 and "rollout.agent" in out + err and "secret" in out + err


def test_the_endpoint_is_served_without_training_unless_its_port_is_taken():
    command = [sys.executable, "-m", "easyrl", "agent", "serve", "--model", "tiny-guess"]
    process = popen([*command, "--port", "0"], stdout=subprocess.PIPE, text=True)
    url = next(line for line in process.stdout if "OPENAI_BASE_URL" in line)
    url = url.partition("OPENAI_BASE_URL=")[2].split()[0]
    client = openai.OpenAI(base_url=url, api_key="any")
    for key in ("one", "other"):
        text = chat(client.with_options(api_key=key), HELLO)
        assert text.strip().isdecimal()
    first = client.responses.create(model="m", input=HELLO)
    second = client.responses.create(model="m", input="lower", previous_response_id=first.id)
    assert second.usage.input_tokens > first.usage.total_tokens
    port = url.rpartition(":")[2].partition("/")[0]
    taken = subprocess.run([*command, "--port", port], capture_output=True, text=True, check=False)
    assert taken.returncode == 2 and "--port" in taken.stderr
