"""Rows as public data sets and other tools have them: each trains with one command, and those that
cannot be read are answered with the setting that reads them."""

import json
import shutil

import pytest
from public_rows import SETS, assistant, gpt, human, user

from easyrl.config import ConfigError, load_config
from easyrl.data.datasets import open_prompts
from easyrl.rewards import sandbox
from easyrl.runtime.checks.prompts import ENDS_WITH_ANSWER
from easyrl.runtime.resolve import resolve
from mistakes import TINY, change_json
from runs import easyrl, succeed, summary_of, write_rows

SHORT = """
def short(completions, **columns):
    return [float(len(str(each)) < 100) for each in completions]
"""
TEMPLATE = "{% for m in messages %}{{ m['content'] }}{% endfor %}"
SUM = [user("17+58="), assistant("75")]
TURNS = [human("17+58="), gpt("75")]


@pytest.fixture(scope="module")
def chat_model(tmp_path_factory):
    """The built-in model, with a chat template and more positions."""
    folder = tmp_path_factory.mktemp("models") / "chat"
    shutil.copytree(TINY, folder)
    change_json("config.json", max_position_embeddings=4096)(folder)
    change_json("tokenizer_config.json", chat_template=TEMPLATE)(folder)
    return str(folder)


def opened(folder, rows, *words):
    file = write_rows(folder / "data.jsonl", rows)
    return open_prompts(resolve(load_config(None, {"data.dataset": file}, words)).data)


def error_of(folder, rows, *words):
    with pytest.raises(ConfigError) as caught:
        opened(folder, rows, *words)
    return str(caught.value)


def texts_of(content):
    if isinstance(content, str):
        return content
    return "\n".join(message["content"] for message in content)


@pytest.mark.parametrize("name", SETS)
def test_a_public_set_trains_with_one_command(name, tmp_path, monkeypatch, chat_model):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sandbox, "find_variant", lambda kind: kind)  # the machine's matter
    (tmp_path / "my_rewards.py").write_text(SHORT)
    public = SETS[name]
    settings = [word for word in public.words if word.startswith("data.")]
    prompt = opened(tmp_path, [public.row] * 2, *settings).prompt(0)
    assert public.prompt_has in texts_of(prompt.content)
    assert prompt.columns.get("answer") == public.answer
    in_prompts_too = ("A", "B", "4", "7", "Yes", "Ida Lund")  # options and other words
    if isinstance(public.answer, str) and public.answer not in in_prompts_too:
        assert public.answer not in texts_of(prompt.content)  # which would tell it to the model
    words = ("--dataset", "data.jsonl", "--model", chat_model, "data.max_prompt_length=1000")
    result = easyrl("grpo", "--dry-run", *words, *public.words)
    assert result.exit_code == 0, result.output
    assert ENDS_WITH_ANSWER not in result.output


@pytest.mark.parametrize(
    ("rows", "words"),
    [
        ([{"id": 1, "messages": SUM}], ()),
        ([{"system": "", "conversations": TURNS}], ()),
        ([{"instruction": "17+58=", "input": "", "output": "75"}], ("data.chat=true",)),
        (
            [{"prompt": SUM[:1], "completion": SUM[1:]}],
            ('data.columns={answer: "completion[0].content"}',),
        ),
        ([{"prompt": SUM}], ("data.answer_from=last_message",)),
    ],
    ids=("messages", "sharegpt", "alpaca", "prompt_completion", "prompt"),
)
def test_rows_made_for_fine_tuning_train(rows, words, tmp_path, chat_model):
    """The model writes its working first, so a function that looks at the end compares."""
    (tmp_path / "my_rewards.py").write_text(
        "def ends_with(completions, answer, **columns):\n"
        "    texts = [each[0]['content'] for each in completions]\n"
        "    return [float(text.endswith('#' + right)) for text, right in zip(texts, answer)]\n"
    )
    run = tmp_path / "run"
    succeed(
        *("--dataset", write_rows(tmp_path / "data.jsonl", rows), "--model", chat_model),
        *("--reward", f"{tmp_path}/my_rewards.py:ends_with", "--output", str(run), "--no-live"),
        *("--iterations", "2", "train.prompts_per_iteration=4", "rollout.max_completion_length=40"),
        *words,
    )
    assert summary_of(run)["reward_first"] > 0
    sample = json.loads((run / "samples.jsonl").read_text().splitlines()[0])
    assert "75" not in str(sample["prompt"])


BAD = [
    ([{"messages": SUM[:1]}, {"messages": SUM}], (), "data.prompt_column=messages takes all"),
    ([{"prompt": "a", "x": "b"}], ("data.prompt_template={x:letters}",), "data.prompt_template: "),
    (
        [{"prompt": "a", "x": ["b"] * 27}],
        ("data.prompt_template={x:letters}",),
        "at most 26 options",
    ),
    (
        [{"messages": SUM}, {"messages": SUM[:1]}],
        (),
        "data.jsonl:2: column 'messages' (data.answer_from",
    ),
    ([{"messages": SUM[:1]}], ("data.answer_from=last_message",), "got one of 'user'"),
    ([{"messages": SUM}, {"messages": []}], (), "data.jsonl:2: column 'messages'"),
    ([{"messages": SUM}, {"messages": None}], (), "data.jsonl:2: column 'messages'"),
    ([{"messages": []}], (), "data.prompt_column=messages"),
    ([{"messages": SUM[1:]}], (), "expected a message before the answer"),
    ([{"messages": [*SUM[:1], assistant(" ")]}], (), "expected a text in the last message"),
    ([{"messages": [*SUM[:1], {"role": "gpt", "content": "75"}]}], (), "got one of 'gpt'"),
    ([{"conversations": [{"from": "narrator", "value": "x"}]}], (), "turn 0: expected from human"),
    ([{"conversations": [*TURNS, {"from": "tool", "value": "x"}]}], (), "turn 2: expected from"),
    (
        [{"prompt": "17+58="}],
        ("data.answer_from=last_message",),
        "column 'prompt' (data.answer_from",
    ),
    ([{"prompt": SUM}], ("data.answer_from=first",), "data.answer_from: "),
    (
        [{"prompt": SUM}],
        ("data.answer_from=last_message", "data.columns={answer: prompt}"),
        "data.answer_from: expected null",
    ),
    (
        [{"question": "a"}],
        ("data.answer_from=last_message", "data.prompt_template={question}"),
        "data.answer_from: expected null",
    ),
    ([{"id": 1, "problem": "1+1="}], (), "data.prompt_column=problem"),
    (
        [{"prompt": "1+1=", "x": {"y": ["2"]}}],
        ('data.columns={answer: "x.z"}',),
        "data.columns.answer: 'x.z'",
    ),
    (
        [{"prompt": "1+1=", "x": {"y": ["2"]}}],
        ('data.columns={answer: "x.y[1]"}',),
        "x.y has 1 entries, got index 1",
    ),
    (
        [{"prompt": "1+1=", "x": ["2"]}],
        ("data.prompt_template={x.y}",),
        "data.prompt_template: 'x.y'",
    ),
    (
        [{"prompt": "1+1=", "x": ["2"]}],
        ("data.prompt_template={x[a]}",),
        "expected a path as in x.KEY",
    ),
    (
        [{"prompt": "1+1=", "x": ["2"]}, {"prompt": "1+1=", "x": []}],
        ("data.prompt_template={x[0]}",),
        "data.jsonl:2: data.prompt_template: column 'x[0]'",
    ),
]


@pytest.mark.parametrize(("rows", "words", "named"), BAD, ids=range(len(BAD)))
def test_rows_that_cannot_be_read_are_named_with_the_setting(rows, words, named, tmp_path):
    assert named in error_of(tmp_path, rows, *words)


@pytest.mark.parametrize(
    ("row", "words", "advice"),
    [
        ({"prompt": "1+1=", "solution": "2"}, (), "data.columns={answer: solution}"),
        ({"prompt": "1+1=", "completion": "2"}, (), "data.columns={answer: completion}"),
        (
            {"prompt": "add", "test_list": ["assert add(1, 1) == 2"]},
            ("reward.functions=[code]",),
            "data.columns={tests: test_list}",
        ),
        ({"prompt": "1+1=", "answers": {"text": ["2"]}}, (), '"answers.text"'),
        (
            {"prompt": "1+1=", "reward_model": {"ground_truth": 2}},
            (),
            '"reward_model.ground_truth"',
        ),
        ({"prompt": SUM[:1], "chosen": SUM, "rejected": SUM}, (), '"chosen[-1].content"'),
        ({"prompt": SUM}, (), "data.answer_from=last_message"),
        ({"prompt": "1+1=", "messages": SUM}, (), "data.answer_from=last_message"),
        ({"prompt": "1+1=", "answer": {"aliases": ["2"]}}, (), '"answer.aliases"'),
        ({"prompt": "1+1=", "answer": SUM}, (), "data.answer_from=last_message"),
        (
            {"prompt": "1+1=", "x": SUM},
            ("data.columns={answer: x}",),
            "data.answer_from=last_message",
        ),
    ],
)
def test_a_reference_that_is_elsewhere_or_no_text_is_named(
    row, words, advice, tmp_path, chat_model
):
    file = write_rows(tmp_path / "data.jsonl", [row])
    result = easyrl(
        *("grpo", "--dry-run", "--dataset", file, "--model", chat_model, "--reward", "exact_match"),
        *words,
    )
    assert result.exit_code != 0
    assert advice in " ".join(result.output.split())


def test_a_prompt_that_ends_with_an_answer_is_a_warning(tmp_path, chat_model):
    file = write_rows(tmp_path / "data.jsonl", [{"prompt": SUM, "answer": "75"}])
    words = ("grpo", "--dry-run", "--dataset", file, "--model", chat_model)
    result = easyrl(*words, "--reward", "exact_match")
    assert result.exit_code == 0, result.output
    assert ENDS_WITH_ANSWER in result.output
    result = easyrl(*words, "--reward", "exact_match", "data.answer_from=last_message")
    assert result.exit_code == 0, result.output
    assert ENDS_WITH_ANSWER not in result.output
    assert "'prompt' without its last message" in result.output


def test_a_reward_of_ones_own_gets_a_conversation_as_answer_only_with_a_warning(tmp_path):
    stream = opened(tmp_path, [{"prompt": "1+1=", "x": SUM}], "data.columns={answer: x}")
    assert "data.answer_from=last_message" in str(stream.warnings())
    assert stream.prompt(0).columns["answer"] == SUM


def test_what_was_recognised_is_said_and_own_settings_win(tmp_path):
    rows = [{"messages": SUM, "answer": "own"}]
    recognised = opened(tmp_path, rows)
    assert recognised.prompt(0).content == SUM[:1]
    assert recognised.prompt(0).columns == {"answer": "own"}
    assert "'messages' without its last message" in str(recognised.warnings())
    asked = opened(tmp_path, rows, "data.answer_from=last_message")
    assert asked.prompt(0).columns == {"answer": "75"}
    whole = opened(tmp_path, rows, "data.prompt_column=messages")
    assert whole.prompt(0).content == SUM
    assert whole.warnings() == []


def test_a_system_message_of_the_row_comes_first_and_may_be_empty(tmp_path):
    rows = [{"system": text, "conversations": TURNS} for text in ("Add.", "")]
    stream = opened(tmp_path, rows, "data.shuffle=false")
    assert stream.prompt(0).content == [{"role": "system", "content": "Add."}, SUM[0]]
    assert stream.prompt(1).content == SUM[:1]
    own = opened(tmp_path, rows, "data.shuffle=false", "data.system_prompt=Own.")
    assert own.prompt(1).content == [{"role": "system", "content": "Own."}, SUM[0]]


@pytest.mark.parametrize("kind", ["jsonl", "parquet"])
def test_three_forms_mix_and_a_table_reads_the_same(kind, tmp_path):
    """An answer that only some rows have is None elsewhere; parquet files read prompts alone."""
    pandas = pytest.importorskip("pandas")
    sets = {
        "a": [{"messages": SUM}, {"messages": SUM}],
        "b": [{"instruction": "17+58=", "input": None, "output": "75"}] * 2,
        "c": [
            {"prompt": "17+58=", "answers": {"text": ["75"]}},
            {"prompt": "1=", "answers": {"text": []}},
        ],
    }
    files = []
    for name, rows in sets.items():
        file = tmp_path / f"{name}.{kind}"
        if kind == "jsonl":
            write_rows(file, rows)
        else:
            pandas.DataFrame(rows).to_parquet(file)
        files.append(str(file))
    words = ("data.chat=true", 'data.columns=[{}, {}, {answer: "answers.text[0]"}]')
    flags = {"data.dataset": files, "data.weights": [2.0, 1.0, 1.0], "data.shuffle": False}
    stream = open_prompts(resolve(load_config(None, flags, words)).data)
    found = {}
    for index in range(12):
        prompt = stream.prompt(index)
        source = prompt.columns["data_source"]
        found.setdefault(source, []).append(
            (prompt.content[0]["content"], prompt.columns["answer"])
        )
    assert set(found[files[0]]) == set(found[files[1]]) == {("17+58=", "75")}
    assert set(found[files[2]]) == {("17+58=", "75"), ("1=", None)}
    assert len(found[files[0]]) == 6
    assert len(stream.examples()) == 6
