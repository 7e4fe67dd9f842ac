"""Rows as prompts and as columns for rewards: templates, system prompts, chats, names."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tokenizers import processors

from easyrl.config import Config, ConfigError, load_config
from easyrl.data.chat import check_prompts, render_prompt
from easyrl.data.datasets import open_prompts
from easyrl.engines.base import GroupRequest
from easyrl.model.files import load_tokenizer
from easyrl.types import Prompt
from easyrl.workers.rollout import RolloutWorker

BRACES = "{answer} {{}} %s {"
ROW = {"question": "2+3?", "answer": "5", "level": 4, "notes": None, "braces": BRACES}
CHAT = [{"role": "user", "content": "2+3?"}]
FROM_SYSTEM = [{"role": "system", "content": "Add."}, *CHAT]


def first(folder: Path, row: dict[str, Any] = ROW, **data: Any) -> Prompt:
    file = folder / "data.jsonl"
    file.write_text(json.dumps(row) + "\n")
    flags = {f"data.{key}": value for key, value in data.items()}
    return open_prompts(load_config(None, {"data.dataset": str(file), **flags})).prompt(0)


def error_of(folder: Path, row: dict[str, Any] = ROW, **data: Any) -> str:
    with pytest.raises(ConfigError) as caught:
        first(folder, row, **data)
    return str(caught.value)


# Templates.


@pytest.mark.parametrize(
    ("template", "prompt"),
    [
        ("Solve: {question}", "Solve: 2+3?"),
        ("{level}. {question}\n{question}", "4. 2+3?\n2+3?"),
        ("\\boxed{{}} of {question} {{x}}", "\\boxed{} of 2+3? {x}"),
        ("no column", "no column"),
        ("<{braces}>", f"<{BRACES}>"),  # what is in a row is no template
    ],
)
def test_a_template_is_filled_from_columns(tmp_path: Path, template: str, prompt: str) -> None:
    made = first(tmp_path, prompt_template=template)
    assert made.content == prompt
    assert made.columns == ROW  # what a prompt is made of goes to the rewards all the same


@pytest.mark.parametrize(
    "template",
    ["{qestion}", "{question.upper}", "{}", "{question"],
)
def test_a_template_with_anything_but_columns_is_refused(tmp_path: Path, template: str) -> None:
    assert error_of(tmp_path, prompt_template=template).startswith("data.prompt_template: ")


def test_a_row_without_a_column_of_the_template_is_named(tmp_path: Path) -> None:
    message = error_of(tmp_path, prompt_template="{question} {notes}")
    assert message.startswith(f"{tmp_path}/data.jsonl:1: data.prompt_template")


# Chats.


OWN = [{"role": "system", "content": "Own."}, *CHAT]


@pytest.mark.parametrize(
    ("row", "data", "content"),
    [
        (ROW, {"prompt_column": "question"}, "2+3?"),
        (ROW, {"prompt_column": "question", "chat": True}, CHAT),
        (ROW, {"prompt_column": "question", "system_prompt": "Add."}, FROM_SYSTEM),
        ({"prompt": CHAT}, {"system_prompt": "Add."}, FROM_SYSTEM),
        ({"prompt": OWN}, {"system_prompt": "Add."}, OWN),
    ],
)
def test_a_prompt_is_a_string_or_a_chat(
    tmp_path: Path, row: dict[str, Any], data: dict[str, Any], content: object
) -> None:
    assert first(tmp_path, row, **data).content == content


# Names.


def test_columns_reach_the_rewards_under_the_names_asked_for(tmp_path: Path) -> None:
    columns = {"solution": "answer", "asked": "question"}
    made = first(tmp_path, prompt_column="question", columns=columns)
    kept = {name: ROW[name] for name in ("level", "notes", "braces")}
    assert made.columns == {"solution": "5", "asked": "2+3?", **kept}
    both = {"solution": "answer", "answer": "answer"}
    assert first(tmp_path, prompt_column="question", columns=both).columns["answer"] == "5"


def test_a_missing_column_is_named(tmp_path: Path) -> None:
    message = error_of(tmp_path, prompt_column="question", columns={"answer": "solution"})
    assert message.startswith("data.columns.answer: ")


def test_a_column_with_the_name_of_an_argument_must_be_renamed(tmp_path: Path) -> None:
    row = {"prompt": "a", "completions": "b"}
    assert first(tmp_path, row).columns == {}
    assert first(tmp_path, row, columns={"of_data": "completions"}).columns == {"of_data": "b"}
    assert error_of(tmp_path, row, columns={"prompts": "completions"}).startswith("data.columns: ")


# The chat template's variables.


TEMPLATE = "{% if thinks %}think{% endif %}{{ messages[0].content }}"
SUM = [{"role": "user", "content": "1+1="}]


@pytest.fixture
def tokenizer() -> Any:
    """Tokenizer that puts `<pad>` before a text."""
    tokenizer = load_tokenizer("tiny")
    tokenizer.chat_template = TEMPLATE
    tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single="<pad> $A", special_tokens=[("<pad>", 0)]
    )
    return tokenizer


def test_a_string_gets_the_tokenizers_special_tokens_and_a_chat_does_not(tokenizer: Any) -> None:
    assert tokenizer.decode(render_prompt("1+1=", tokenizer)) == "<pad>1+1="
    ids = render_prompt(SUM, tokenizer)
    assert tokenizer.decode(ids) == "1+1=" and all(type(token) is int for token in ids)


def test_variables_reach_the_template_wherever_prompts_become_tokens(
    tmp_path: Path, tokenizer: Any
) -> None:
    def of(*words: str) -> Config:
        return load_config(None, {}, words)

    with_it = render_prompt(SUM, tokenizer, {"thinks": True})
    assert tokenizer.decode(with_it) == "think1+1="

    (tmp_path / "chat.jsonl").write_text(json.dumps({"prompt": SUM}) + "\n")
    words = f"data.dataset={tmp_path}/chat.jsonl", "data.max_prompt_length=5"
    thinks = "data.chat_template_kwargs={thinks: true}"
    examples = open_prompts(of(*words)).examples()
    check_prompts(examples, tokenizer, of(*words))
    with pytest.raises(ConfigError, match=r"data\.max_prompt_length"):
        check_prompts(examples, tokenizer, of(*words, thinks))

    worker = RolloutWorker.__new__(RolloutWorker)
    submitted: list[GroupRequest] = []
    worker.config, worker.tokenizer, worker._prompts = of(thinks), tokenizer, {}
    worker.engine = SimpleNamespace(submit=submitted.append)  # type: ignore[assignment]
    worker._submit(0, 0, (0, Prompt(0, SUM, {})), 2)
    assert submitted[0].prompt_ids == with_it
