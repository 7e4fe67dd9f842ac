"""The reward `judge` against a real HTTP server: scores, retries, cache, bounds, bad input."""

import asyncio
import contextlib
import json
import time

import pytest
from reward_pools import call, finished

from easyrl.config import ConfigError, load_config
from easyrl.rewards import judge, loading
from easyrl.rewards.pool import RewardPool, try_rewards
from easyrl.rewards.worker import Call
from easyrl.runtime.resolve import resolve
from easyrl.types import Prompt
from judges import judge_server, last_digit
from runs import SMALL, easyrl, lines_of, succeed, summary_of

KEY = "sk-secret-4711"


@pytest.fixture(autouse=True)
def _own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("JUDGE_KEY", KEY)
    monkeypatch.setattr(judge, "BACKOFF_SECONDS", 0.01)


def rewards_of(server, *words):
    url = server if isinstance(server, str) else server.url
    flags = {"reward.functions": ["judge"], "reward.judge.url": url}
    return resolve(load_config(None, flags, ["data.chat=true", *words])).rewards


def prompt_of(**columns):
    return Prompt(3, [{"role": "user", "content": "What is 2+2?"}], columns)


def scored(rewards, texts, **columns):
    result = call(rewards, prompt_of(**columns), texts)
    return result.scores[0], [error.text for error in result.errors], result.metrics


def asked(rewards, texts):
    """As `scored`, but in this process."""
    counts = {}
    logs = {"log_metric": counts.__setitem__, "log_extra": lambda *_: None}
    reward = judge.Judge(rewards.options.judge)
    prompts = [prompt_of().content] * len(texts)
    try:
        scores = asyncio.run(reward(prompts, texts, **logs))
    except judge.JudgeError as error:
        return [0.0] * len(texts), [str(error)], counts
    return scores, [], counts


def test_scores_are_read_mapped_and_in_order_and_a_second_time_from_the_cache(tmp_path):
    texts = ["4", "it is 9", "none", "7", "7"]
    with judge_server() as server:
        rewards = rewards_of(server, "reward.judge.key_variable=JUDGE_KEY")
        scores, errors, counts = scored(rewards, texts, answer="4")
        assert (scores, errors) == ([0.4, 0.9, 0.0, 0.7, 0.7], [])
        assert len(server.questions) == counts["judge_calls"] == 4
        assert server.keys == {f"Bearer {KEY}"}
        assert (counts["judge_cache_hits"], counts["judge_tokens"]) == (1, 40)  # of equal ones
        again, _, counts = scored(rewards, texts, answer="4")
        assert again == scores and len(server.questions) == 4 and counts["judge_calls"] == 0
        assert counts["judge_cache_hits"] == 5
        for file in (tmp_path / "cache").rglob("*"):
            assert file.is_dir() or KEY not in file.read_text()
        scored(rewards_of(server, "reward.judge.options={temperature: 1}"), texts[:1])
        assert len(server.questions) == 5  # another question


def test_templates_fields_lists_and_samples(tmp_path):
    template = tmp_path / "ask.txt"
    template.write_text('{prompt}|{completion}|{answer}|{level}: as {"score": 3}')
    answers = ['```json\n{"score": 1.5}\n```', '{"a": {}, "score": "2"}']
    rule = (f"reward.judge.template={template}", "reward.judge.range=[1,3]")
    with judge_server(lambda number, _: answers[number]) as server:
        rewards = rewards_of(server, *rule, "reward.judge.field=score", "reward.judge.samples=2")
        scores, errors, _ = scored(rewards, ["{answer}"], answer="4", level=None)
        assert (scores, errors) == ([(0.25 + 0.5) / 2], [])
        assert server.questions[0] == 'user: What is 2+2?|{answer}|4|: as {"score": 3}'
    with judge_server(lambda *_: "<think>Score: 1</think>Score: 10\nScore: 5\nScore: 0") as server:
        rewards = rewards_of(server, "reward.judge.mode=listwise")
        assert scored(rewards, ["a", "b", "c"])[0] == [1.0, 0.5, 0.0] and len(server.questions) == 1
        assert "Answer 2:\nb" in server.questions[0]
        assert "expected 2" in scored(rewards, ["a", "b"])[1][0]


@pytest.mark.parametrize(
    "answer",
    [
        'It wrote \\boxed{4}, which is right.\n{"score": 4}',
        '{"score": 4}\nThe set {1, 2} was right.',
        '{"reason": "uses \\(x^2\\), \\frac12 and \\underline{x}", "score": 4}',
        '{"parts": [{"score": 1}], "reason": "\\(x\\)", "score": 4}',
        '{"reason": "one\ntwo", "score": 4}',
        '{"reason": "it wrote \\"{\\"", "score": 4}',
        '{"score": 1}, no: {"score": 4}',
        'As asked, {"score": <number>}.\n{"score": 4}',
        '{"score": 4}\n(the scale is {"score": N})',
        'The set {"a", "b"} is right. {"score": 4}',
    ],
)
def test_a_field_is_found_among_braces_and_formulas(answer):
    with judge_server(lambda *_: answer) as server:
        rewards = rewards_of(server, "reward.judge.field=score", "reward.judge.range=[0,5]")
        scores, errors, counts = scored(rewards, ["a"])
    assert (scores, errors, counts["judge_calls"]) == ([0.8], [], 1)


@pytest.mark.parametrize(
    "answer",
    [
        '{"parts": [{"score": 1}], "score": 4,}',
        '{"parts": [{"score": 1}], "reason": "it says "yes"", "score": 4}',
        '{"parts": [{"score": 1}, {"sco',
        '{"reason": "the form is {"score": 1}", "score": 4}',
        "{" * 100_000,
    ],
)
def test_a_part_of_an_object_that_cannot_be_read_is_no_score(answer):
    with judge_server(lambda *_: answer) as server:
        rewards = rewards_of(server, "reward.judge.field=score", "reward.judge.range=[0,5]")
        _, (error,), counts = scored(rewards, ["a"])
    assert "field score" in error and counts["judge_unreadable"] == 4


def test_replies_are_kept_behind_their_scores_without_thinking_and_key():
    answers = ["<think>Hm. Score: 1</think>\nGood.\nScore: 8", f"With {KEY}: Score: 4"]
    with judge_server(lambda number, _: answers[number]) as server:
        words = ("reward.judge.key_variable=JUDGE_KEY", "reward.judge.samples=2")
        result = call(rewards_of(server, *words), prompt_of(), ["a", "a"])  # asked once
    assert result.scores == [[pytest.approx(0.6)] * 2]
    first, second = result.columns["judge_replies"]
    assert first == second and {reply["score"] for reply in first} == {0.8, 0.4}
    texts = {reply["score"]: reply["reply"] for reply in first}
    assert texts == {0.8: "Good.\nScore: 8", 0.4: "With ***: Score: 4"}
    with judge_server(lambda *_: "A is best.\nScore: 10\nScore: 5") as server:
        rewards = rewards_of(server, "reward.judge.mode=listwise")
        (first,), (second,) = call(rewards, prompt_of(), ["a", "b"]).columns["judge_replies"]
    assert (first["score"], second["score"]) == (1.0, 0.5)
    assert first["reply"] == second["reply"] == "A is best.\nScore: 10\nScore: 5"


def test_failures_are_repeated_and_counted():
    refused = [(500, {}), (429, {"Retry-After": "0.3"}), (408, {}), None]
    script = [*refused, "no number", "Score: 11", "Score: 8"]
    with judge_server(lambda number, _: script[number]) as server:
        started = time.monotonic()
        scores, errors, counts = scored(rewards_of(server), ["a"])
        assert (scores, errors) == ([0.8], []) and time.monotonic() - started > 0.3
    assert counts["judge_calls"] == 7 and counts["judge_retries"] == 6
    assert [counts[f"judge_{why}"] for why in ("refused", "dropped", "unreadable")] == [3, 1, 2]
    with judge_server(seconds=0.5) as server:
        rewards = rewards_of(server, "reward.judge.timeout_seconds=0.05")
        scores, (error,), counts = scored(rewards, ["a"])
        assert "timeout_seconds" in error and counts["judge_timeouts"] == 8
        assert len(server.questions) <= 8  # on a busy machine it is too slow to read them all


def choice_of(content, finish_reason="stop", **message):
    return {"finish_reason": finish_reason, "message": {"content": content, **message}}


THOUGHTS = {"type": "thinking", "thinking": [{"type": "text", "text": "Score: 10"}]}
OPEN_THINKING = "<think>If the sum were right I would say Score: 10. Let me"
CUT_OFF = {
    "a number": choice_of("The working is right.\nScore: 1", "length"),
    "a whole answer": choice_of("Score: 10\nThat is all.", "length"),
    "open thinking": choice_of(OPEN_THINKING, "length"),
    "thinking apart": choice_of(None, "length", reasoning_content="Score: 10"),
    "nothing": choice_of("", "length"),
    "no key content": {"finish_reason": "length", "message": {"reasoning": "Score: 10"}},
    "another server's word": choice_of("Score: 1", "max_tokens"),
    "capitals": choice_of("Score: 1", "MAX_TOKENS"),
    "a full context": choice_of("Score: 1", "model_context_window_exceeded"),
    "open thinking, finished": choice_of(OPEN_THINKING),
    "open thinking, unknown end": choice_of(OPEN_THINKING, None),
    "thinking again": choice_of("<think>a</think>Score: 3\n<think>Score: 10"),
    "thinking after the score": choice_of("Score: 3. Wait. <think> Score: 10"),
    "[THINK]": choice_of("[THINK]Score: 10", None),
    "<seed:think>": choice_of("<seed:think>Score: 10", None),
    "<thinking>": choice_of("\n<thinking>\nScore: 10", None),
    "<Thoughts>": choice_of("<Thoughts>Score: 10", None),
    "Kimi's thinking": choice_of("◁think▷Score: 10", None),
    "Cohere's thinking": choice_of("<|START_THINKING|>Score: 10", None),
    "Gemma's thinking": choice_of("<|channel>thought\nScore: 10", None),
    "gpt-oss's thinking": choice_of("<|channel|>analysis<|message|>Score: 10<|end|>", None),
    "a full context, llama.cpp's word": choice_of("Score: 1", "context_length_exceeded"),
    "TGI's word": choice_of("Score: 1", "max_new_tokens"),
}
UNREADABLE = {
    "empty": choice_of(""),
    "blank": choice_of(" \n"),
    "null": choice_of(None),
    "thinking apart": choice_of(None, reasoning_content="Score: 10"),
    "thinking apart, vLLM's name": choice_of("\n\n", reasoning="Score: 10"),
    "thinking in parts": choice_of([THOUGHTS]),
    "nothing after the thinking": choice_of("<think>Score: 10</think>\n"),
    "nothing after thinking that the prompt opened": choice_of("Score: 10</think>", None),
    "filtered": choice_of("Score: 10", "content_filter"),
    "refused": choice_of(None, refusal="I give no Score: 10"),
    "a call": choice_of(None, "tool_calls"),
    "thinking apart, Ollama's name": choice_of("", thinking="Score: 10"),
    "thinking apart, OpenRouter's name": choice_of("", reasoning_details=[{"text": "Score: 10"}]),
    "refused in a part": choice_of([{"type": "refusal", "refusal": "I give no Score: 10"}]),
    "forbidden, Gemini's words": choice_of("Score: 10", "PROHIBITED_CONTENT"),
    "blocked": choice_of("", "BLOCKLIST"),
}
NO_VERDICTS = [("judge_cut_off", *each) for each in CUT_OFF.items()]
NO_VERDICTS += [("judge_unreadable", *each) for each in UNREADABLE.items()]
FINISHED = {
    "no reason": {"message": {"content": "Score: 7"}},
    "a null reason": choice_of("Score: 7", None),
    "an empty reason": choice_of("Score: 7", ""),
    "another server's word": choice_of("Score: 7", "eos_token"),
    "capitals": choice_of("Score: 7", "STOP"),
    "thinking": choice_of("<think>Score: 10</think>\nScore: 7"),
    "thinking that the prompt opened": choice_of("Score: 10\n</think>\n\nScore: 7"),
    "thinking that ends behind a quote": choice_of('<think>"Score: 10"</think>Score: 7'),
    "[THINK]": choice_of("[THINK]Score: 10[/THINK]Score: 7"),
    "thinking apart": choice_of("Score: 7", reasoning_content="Score: 10"),
    "thinking in parts": choice_of([THOUGHTS, {"type": "text", "text": "Score: 7"}]),
    "a quoted start": choice_of("The answer opens `<think>` and never ends it. Score: 7"),
    "a quoted end": choice_of('Score: 7\nIt lacks "</think>".'),
    "a start in brackets": choice_of("Its tag (<think>) is open. Score: 7"),
    "a start in bold": choice_of("**<think>** is open. Score: 7"),
    "thinking behind the score": choice_of("Score: 7\n<think>Score: 10?</think>"),
    "thinking twice": choice_of("<think>Score: 1</think>Score: 7<think>Score: 10</think>"),
    "Kimi's thinking": choice_of("◁think▷Score: 10◁/think▷Score: 7"),
    "gpt-oss's thinking": choice_of(
        "<|channel|>analysis<|message|>Score: 10<|end|><|start|>assistant<|channel|>final"
        "<|message|>Score: 7"
    ),
    "a part of Responses": choice_of([{"type": "output_text", "text": "Score: 7"}]),
    "texts in a list": choice_of(["Score: ", "7"]),
    "one call": choice_of("Score: 7", "tool_call"),
    "no reason as text": choice_of("Score: 7", "null"),
    "fewer tokens than the limit": {
        **choice_of("Score: 7", None),
        "usage": {"completion_tokens": 15},
    },
    "the limit, but it says that it has ended": {
        **choice_of("Score: 7"),
        "usage": {"completion_tokens": 16},
    },
}


@pytest.mark.parametrize(
    ("count", "choice"),
    [pytest.param(count, choice, id=name) for count, name, choice in NO_VERDICTS],
)
def test_no_verdict_is_no_score_is_not_repeated_in_vain_and_not_cached(count, choice):
    with judge_server(lambda number, _: "Score: 7" if number else choice) as server:
        scores, (error,), counts = asked(rewards_of(server), ["a"])
        assert scores == [0.0] and counts[count] == counts["judge_calls"] == 1
        assert counts["judge_retries"] == 0
        if choice["finish_reason"] in ("stop", "length", None) and "suppressed" not in error:
            assert "reward.judge.options={max_tokens: …, temperature: 0}" in error
        scores, errors, counts = asked(rewards_of(server), ["a"])
        assert (scores, errors, counts["judge_calls"]) == ([0.7], [], 1)


@pytest.mark.parametrize(
    "choice", [pytest.param(*each, id=name) for name, *each in FINISHED.items()]
)
def test_finished_answers_are_read_after_the_thinking(choice):
    words = "reward.judge.options={max_tokens: 16}"
    with judge_server(lambda *_: choice) as server:
        for num_calls in (1, 0):  # then from the cache
            scores, errors, counts = asked(rewards_of(server, words), ["a"])
            assert (scores, errors, counts["judge_calls"]) == ([0.7], [], num_calls)


@pytest.mark.parametrize(
    ("options", "choices", "num_calls"),
    [
        ("{temperature: 0.7}", [choice_of("Score: 1", "length"), choice_of("Score: 7")], 2),
        ("{}", [choice_of("", "length"), choice_of(None), choice_of("Score: 7")], 3),
        ("{temperature: 1}", [choice_of("Score: 1", "length")] * 4, 4),
        ("{temperature: 1, seed: 4}", [choice_of("Score: 1", "length")], 1),
        ("{temperature: 1, top_k: 1}", [choice_of(OPEN_THINKING)], 1),
        # The server, not the model, ended these.
        ("{temperature: 0}", [choice_of("Score: 1", "abort"), choice_of("Score: 7")], 2),
        ("{temperature: 0}", [choice_of("Sco", "error"), choice_of("Score: 7")], 2),
    ],
)
def test_a_judge_is_asked_again_where_another_answer_may_come(options, choices, num_calls):
    with judge_server(lambda number, _: choices[number]) as server:
        scores, errors, counts = asked(rewards_of(server, f"reward.judge.options={options}"), ["a"])
        assert counts["judge_calls"] == num_calls == len(server.questions)
    is_scored = choices[-1] == choice_of("Score: 7")
    assert (scores, errors == []) == ([0.7] if is_scored else [0.0], is_scored)
    assert counts["judge_refused"] == sum(
        choice["finish_reason"] in ("abort", "error") for choice in choices
    )


def test_an_answer_without_a_finish_reason_is_cut_off_where_it_has_all_its_tokens():
    choice = {**choice_of("Score: 1", None), "usage": {"completion_tokens": 16}}
    for name in ("max_tokens", "max_completion_tokens"):
        with judge_server(lambda *_: dict(choice)) as server:
            words = f"reward.judge.options={{{name}: 16, temperature: 0}}"
            scores, (error,), counts = asked(rewards_of(server, words), ["a"])
            assert scores == [0.0] and counts["judge_cut_off"] == counts["judge_calls"] == 1
            assert f"{name}: …" in error


def test_the_message_of_a_limit_names_the_users_own_and_how_many_answers_have_no_score():
    def answer(_, question):
        return choice_of("Score: 1", "length" if "long" in question else "stop")

    with judge_server(answer) as server:
        words = "reward.judge.options={max_completion_tokens: 16, temperature: 0}"
        _, (error,), counts = asked(rewards_of(server, words), ["long 1", "long 2", "short"])
        assert "reward.judge.options={max_completion_tokens: …, temperature: 0} (now 16)" in error
        assert "2 of 3" in error and counts["judge_cut_off"] == 2
        (warning,) = try_rewards(rewards_of(server, words), Prompt(3, "long", {}))
        assert "reward.judge.options={max_completion_tokens: …" in warning


def test_cached_answers_that_do_not_say_whether_they_were_cut_off_are_asked_for_again(tmp_path):
    with judge_server(lambda *_: "Score: 7") as server:
        rewards = rewards_of(server)
        assert asked(rewards, ["a"])[0] == [0.7]
        (file,) = (path for path in (tmp_path / "cache").rglob("*") if len(path.name) == 64)
        kept = file.read_text()
        cut_off = {"text": "Score: 1", "finish_reason": "length"}
        for stored in ("Score: 1", OPEN_THINKING, "None", "", cut_off, {"text": 7}, [], None):
            file.write_text(json.dumps(stored))
            scores, errors, counts = asked(rewards, ["a"])
            assert (scores, errors, counts["judge_calls"]) == ([0.7], [], 1), stored
            assert file.read_text() == kept


SEVENS = ("Score: **7**", "**Score:** 7/10", "**Score**: 7", "Score: 7.", "score=7", "Score 1: 7")
SEVENS += ("Score (0-10): 7", '{"score": 7}', "Score: [7]", "Score: `7`", "Score: 3\nScore: 7")


def test_the_default_pattern():
    reader = judge.Judge(rewards_of("http://127.0.0.1:9/v1").options.judge)
    for answer in SEVENS:
        assert reader._read(answer, 1).scores == [pytest.approx(0.7)], answer
    assert reader._read("Score: 7.5", 1).scores == [0.75]
    assert reader._read("Score: .5", 1).scores == [pytest.approx(0.05)]
    for answer in ("Score: -3", "Score: \u22123", "Score: 11", "Score: none of 5"):
        with pytest.raises(judge.JudgeError):
            reader._read(answer, 1)


def test_a_judge_has_time_for_its_retries_and_takes_no_other_scores_along():
    """Two answers come too late, and the call is longer than runtime.timeout_seconds."""

    def answer(number, question):
        if "7" in question and number <= 2:
            time.sleep(9.0)
        return last_digit(number, question)

    def group_of(url, *words):
        words = ("data.chat=true", f"reward.judge.url={url}", "reward.on_error=zero", *words)
        config = load_config(None, {"reward.functions": ["exact_match", "judge"]}, words)
        with contextlib.closing(RewardPool(resolve(config).rewards, {})) as pool:
            texts, columns = ["4", "7"], {"answer": "4"}
            pool.submit(0, Call(prompt_of().content, texts, [[1]] * 2, columns))
            return finished(pool, 1)[0]

    with judge_server(answer) as server:
        words = ("runtime.timeout_seconds=4.5", "reward.judge.timeout_seconds=3")
        group = group_of(server.url, *words)
        assert (group.scores, group.errors) == ([[1.0, 0.0], [0.4, 0.7]], [])
        assert 1 <= group.metrics["judge_timeouts"] == group.metrics["judge_retries"] <= 2
    with judge_server(seconds=20.0) as server:
        group = group_of(server.url, "reward.timeout_seconds=4.5")
        assert group.scores == [[1.0, 0.0], [0.0, 0.0]]
        assert len(group.errors) == 1 and "(judge) took longer than 4.5 s" in group.errors[0].error


def test_processes_share_the_slots_and_use_them_all():
    with judge_server(seconds=0.25) as server:
        words = ("reward.judge.concurrency=3", "reward.num_workers=3")
        with contextlib.closing(RewardPool(rewards_of(server, *words), {})) as pool:
            for key in range(4):
                texts = [f"{key} {n}" for n in range(6)]
                pool.submit(key, Call(prompt_of().content, texts, [[1]] * 6, {}))
            groups = finished(pool, 4)
        assert [group.scores[0] for group in groups] == [[n / 10 for n in range(6)]] * 4
        assert server.most_at_once == 3


def test_a_judge_that_is_down_or_refuses_is_an_error_before_a_run(tmp_path, monkeypatch):
    started, url = time.monotonic(), "http://127.0.0.1:9/v1"
    with pytest.raises(ConfigError, match=url):
        try_rewards(rewards_of(url), prompt_of())
    assert time.monotonic() - started < 30.0  # it does not try for long
    words = ["--reward", "judge", "--dry-run", f"reward.judge.url={url}"]
    assert url in easyrl("grpo", *words).output
    assert try_rewards(rewards_of(url, "reward.check=false"), prompt_of()) == []
    with judge_server(lambda *_: (401, {})) as server:
        rewards = rewards_of(server, "reward.judge.key_variable=JUDGE_KEY")
        with pytest.raises(ConfigError, match="JUDGE_KEY") as caught:
            try_rewards(rewards, prompt_of())
        assert KEY not in str(caught.value) and "***" in str(caught.value)
        _, (error,), counts = scored(rewards, ["a"])
        assert "JUDGE_KEY" in error and KEY not in error and counts["judge_calls"] == 1
        monkeypatch.delenv("JUDGE_KEY")
        with pytest.raises(ConfigError, match="JUDGE_KEY"):
            try_rewards(rewards, prompt_of())
    with judge_server(lambda *_: None) as server, pytest.raises(ConfigError, match="disconnected"):
        try_rewards(rewards_of(server), prompt_of())
    template = tmp_path / "ask.txt"
    template.write_text("{completion} {anser}")
    with pytest.raises(ConfigError, match=r"anser.*\{answer\}|\{answer\}.*anser"):
        try_rewards(rewards_of(url, f"reward.judge.template={template}"), prompt_of(answer="4"))
    with judge_server(lambda *_: "It is fine.") as server:
        rewards = rewards_of(server)
        assert "It is fine." in try_rewards(rewards, prompt_of())[0]
        _, (error,), counts = scored(rewards, ["a"])
        assert "It is fine." in error and "reward.judge.pattern" in error
        assert counts["judge_unreadable"] == 4
        monkeypatch.setenv("XDG_CACHE_HOME", str(template))  # a file
        with pytest.raises(ConfigError, match="XDG_CACHE_HOME"):
            try_rewards(rewards, prompt_of())


def test_settings_that_do_not_fit_are_errors():
    urls = ("url=http://user:key@host/v1", "url=http://host/v1?key=1", "url=http://no_judge/v1")
    for word in (*urls, "pattern=no group", "pattern=(", "range=[3,1]", "mode=no"):
        with pytest.raises(ConfigError, match=f"reward.judge.{word.partition('=')[0]}"):
            load_config(None, {}, [f"reward.judge.{word}"])
    with pytest.raises(ConfigError, match=r"reward\.judge\.url"):
        load_config(None, {"reward.functions": ["judge"]})


def test_a_run_with_a_bad_judge_ends_counts_all_and_a_second_one_asks_nothing(tmp_path):
    def answer(number, question):
        if number % 10 == 4:
            time.sleep(1.5)
        if number % 3 == 2 and num_calls is None:
            return None if number % 2 else (500, {})
        return "Nonsense." if number % 20 == 19 else last_digit(number, question)

    num_calls = None  # of the first run; a start asks once, without retries
    words = ("--reward", "judge", "--iterations", "1", *SMALL, "runtime.deterministic=true")
    words += ("reward.judge.key_variable=JUDGE_KEY", "reward.judge.timeout_seconds=1")
    with judge_server(answer) as server:
        words += (f"reward.judge.url={server.url}",)
        shown = succeed("--output", str(tmp_path / "a"), *words)
        num_calls = len(server.questions)
        succeed("--output", str(tmp_path / "b"), *words)
        assert len(server.questions) == num_calls + 1 and num_calls > 20  # the check at the start
    first, second = (summary_of(tmp_path / name) for name in "ab")
    assert first["judge_calls"] == num_calls - 1 and second["judge_calls"] == 0
    assert (first["groups_trained"], first["reward_errors"]) == (4, 0)
    whys = ("refused", "dropped", "timeouts", "unreadable")
    assert all(first[f"judge_{why}"] > 0 for why in whys)
    assert sum(first[f"judge_{why}"] for why in whys) == first["judge_retries"]
    assert first["weights_sha256"] == second["weights_sha256"]
    (line,) = lines_of(tmp_path / "a" / "metrics.jsonl")
    assert 0 < line["judge_calls"] <= first["judge_calls"]
    asked = first["judge_calls"] - first["judge_retries"]
    assert second["judge_cache_hits"] == first["judge_cache_hits"] + asked
    for sample in lines_of(tmp_path / "a" / "samples.jsonl"):
        (judged,) = sample["judge_replies"]
        assert judged["score"] == sample["rewards"]["judge"] and "Score: " in judged["reply"]
    result = easyrl("samples", tmp_path / "a")
    assert result.exit_code == 0, result.exception
    shown_samples = result.output
    assert "\njudge 0." in shown_samples and "I think so.\nScore: " in shown_samples
    assert easyrl("report", tmp_path / "a").exit_code == 0
    assert "I think so." in (tmp_path / "a" / "report.html").read_text()
    calls = f"{num_calls - 1} calls"
    assert calls in shown and calls in (tmp_path / "a" / "report.html").read_text()
    for file in tmp_path.rglob("*"):
        assert file.is_dir() or KEY.encode() not in file.read_bytes(), file


def test_a_template_is_the_one_of_the_start(tmp_path, monkeypatch):
    template = tmp_path / "ask.txt"
    template.write_text("at the start: {completion}")
    with judge_server(lambda *_: "Score: 1") as server:
        rewards = rewards_of(server, f"reward.judge.template={template}")
        digest = loading.digest_code({}, rewards.options.judge)["reward.judge.template"]
        monkeypatch.setattr(judge, "sources", loading.read_sources({}, rewards.options.judge))
        template.write_text("later")
        scored(rewards, ["a"])
        assert server.questions == ["at the start: a"]
        monkeypatch.setattr(judge, "sources", {})
        assert loading.digest_code({}, rewards.options.judge)["reward.judge.template"] != digest
