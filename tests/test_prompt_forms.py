"""Rows as prompts and as columns for rewards: templates, system prompts, chats, names."""

import json

import numpy as np
import pytest
from tokenizers import Tokenizer, decoders, models, processors
from transformers import PreTrainedTokenizerFast

from easyrl.config import ConfigError, load_config
from easyrl.data.chat import (
    check_prompts,
    encode_behind,
    read_messages,
    render_prompt,
    text_decoder,
)
from easyrl.data.datasets import open_prompts
from easyrl.engines.sampling import StopStrings
from easyrl.model.files import load_tokenizer
from easyrl.runtime.resolve import resolve
from runs import write_rows
from tool_models import llama_tokenizer

BRACES = "{answer} {{}} %s {"
ROW = {"question": "2+3?", "answer": "5", "level": 4, "notes": None, "braces": BRACES}
CHAT = [{"role": "user", "content": "2+3?"}]
FROM_SYSTEM = [{"role": "system", "content": "Add."}, *CHAT]
TEXT = {"type": "text", "text": "2+3?"}
OUTPUT = {"type": "output_text", "text": "5"}
TWICE = [{"role": "user", "content": "2+3?2+3?"}]
OWN = [{"role": "system", "content": "Own."}, *CHAT]


def with_arguments(arguments):
    return {"type": "function", "function": {"name": "add", "arguments": arguments}}


CALL, OF_OPENAI = with_arguments({"a": 17}), with_arguments('{"a": 17}')
TEMPLATE = "{% if thinks %}think{% endif %}{{ messages[0].content }}"
SUM = [{"role": "user", "content": "1+1="}]
TURNS = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}"
    "{% if m.tool_calls %}{{ m.tool_calls[0].function.arguments | tojson }}{% endif %}<eos>"
    "{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
)


def first(folder, row=ROW, **data):
    flags = {f"data.{key}": value for key, value in data.items()}
    flags["data.dataset"] = write_rows(folder / "data.jsonl", [row])
    return open_prompts(resolve(load_config(None, flags)).data).prompt(0)


def error_of(folder, row=ROW, **data):
    with pytest.raises(ConfigError) as caught:
        first(folder, row, **data)
    return str(caught.value)


@pytest.mark.parametrize(
    "template",
    ["{qestion}", "{question.upper}", "{question", "{question} in \\boxed{}", "{{ question }}?"],
)
def test_a_template_with_anything_but_columns_is_refused(tmp_path, template):
    message = error_of(tmp_path, prompt_template=template)
    assert message.startswith("data.prompt_template: ") and "{{" in message
    message = error_of(tmp_path, prompt_template="{question} {notes}")
    assert message.startswith(f"{tmp_path}/data.jsonl:1: data.prompt_template")


@pytest.mark.parametrize(
    ("row", "data", "content"),
    [
        (ROW, {"prompt_template": "Solve: {question}"}, "Solve: 2+3?"),
        (ROW, {"prompt_template": "{level}. {question}\n{question}"}, "4. 2+3?\n2+3?"),
        (ROW, {"prompt_template": "\\boxed{{}} of {question} {{x}}"}, "\\boxed{} of 2+3? {x}"),
        (ROW, {"prompt_template": "<{braces}>"}, f"<{BRACES}>"),  # what is in a row is no template
        (ROW | {"hint": ""}, {"prompt_template": "{hint}{question}"}, "2+3?"),
        (ROW, {"prompt_column": "question"}, "2+3?"),
        (ROW, {"prompt_column": "question", "chat": True}, CHAT),
        (ROW, {"prompt_column": "question", "system_prompt": "Add."}, FROM_SYSTEM),
        ({"prompt": CHAT}, {"system_prompt": "Add."}, FROM_SYSTEM),
        ({"prompt": OWN}, {"system_prompt": "Add."}, OWN),
        ({"prompt": [{"role": "user", "content": [TEXT, TEXT]}]}, {}, TWICE),
        ({"prompt": [{"role": "user", "content": {**TEXT, "type": "input_text"}}]}, {}, CHAT),
        *(
            ({"prompt": [{"role": "user", "content": parts, "name": None}]}, {}, CHAT)
            for parts in (["2+", {**TEXT, "text": "3?"}], [{"text": "2+3?"}], [{**TEXT, "a": None}])
        ),
        ({"prompt": [{"role": "system", "content": [{**TEXT, "text": "Own."}]}, *CHAT]}, {}, OWN),
        (
            {"prompt": [*CHAT, {"role": "assistant", "content": [OUTPUT]}, *CHAT]},
            {},
            [*CHAT, {"role": "assistant", "content": "5"}, *CHAT],
        ),
    ],
)
def test_a_prompt_is_a_filled_template_a_string_or_a_chat(tmp_path, row, data, content):
    assert first(tmp_path, row, **data).content == content


def test_the_arguments_of_a_call_may_have_any_names(tmp_path):
    for value in ("cats", "5"):
        read = with_arguments({"name": "search", "arguments": value})
        given = with_arguments(json.dumps({"name": "search", "arguments": value}))
        for call in (read, given):
            message = {"role": "assistant", "content": "", "tool_calls": [call]}
            messages = [*CHAT, message, *CHAT]
            found = first(tmp_path, {"prompt": messages}).content
            assert found[len(CHAT)]["tool_calls"] == [read]
            (tmp_path / "data.jsonl").unlink()


@pytest.mark.parametrize(
    ("call", "read"), [(CALL, CALL), (OF_OPENAI, CALL), (with_arguments(""), with_arguments({}))]
)
def test_a_tool_call_needs_no_content(tmp_path, call, read):
    row = {"prompt": [*CHAT, {"role": "assistant", "content": None, "tool_calls": [call]}, *CHAT]}
    content = [*CHAT, {"role": "assistant", "tool_calls": [read], "content": ""}, *CHAT]
    assert first(tmp_path, row).content == content
    (tmp_path / "data.jsonl").unlink()
    assert "message 1" in error_of(tmp_path, {"prompt": row["prompt"][:2]})


@pytest.mark.parametrize(
    ("message", "named"),
    [
        ({"role": "user", "content": None}, "None"),
        ({"role": "user", "content": [{"type": "text"}]}, "{'type': 'text'}"),
        *(
            ({"role": "user", "content": [TEXT, {"type": kind, kind: {}}]}, kind)
            for kind in ("input_audio", "video")
        ),
        ({"from": "human", "value": "a"}, "from"),
    ],
)
def test_a_message_that_is_no_text_is_named(tmp_path, message, named):
    found = error_of(tmp_path, {"prompt": [*CHAT, message]})
    assert found.startswith(f"{tmp_path}/data.jsonl:1: column 'prompt'")
    assert "message 1" in found and named in found


def test_columns_reach_the_rewards_under_the_names_asked_for(tmp_path):
    assert first(tmp_path, prompt_template="{question}").columns == ROW  # those of the prompt, too
    columns = {"solution": "answer", "asked": "question"}
    made = first(tmp_path, prompt_column="question", columns=columns)
    kept = {name: ROW[name] for name in ("level", "notes", "braces")}
    assert made.columns == {"solution": "5", "asked": "2+3?", **kept}


def test_a_column_with_the_name_of_an_argument_must_be_renamed(tmp_path):
    row = {"prompt": "a", "completions": "b"}
    assert first(tmp_path, row).columns == {}
    assert first(tmp_path, row, columns={"of_data": "completions"}).columns == {"of_data": "b"}
    assert error_of(tmp_path, row, columns={"prompts": "completions"}).startswith("data.columns: ")
    assert error_of(tmp_path, row, columns={"x": "y"}).startswith("data.columns.x: ")


@pytest.fixture
def tokenizer():
    tokenizer = load_tokenizer("tiny")
    tokenizer.chat_template = TEMPLATE
    tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single="<pad> $A", special_tokens=[("<pad>", 0)]
    )
    return tokenizer


@pytest.mark.parametrize(
    ("added", "text", "rendered"),
    [
        ("<pad> $A", "<pad>1+1=", "<pad>1+1="),  # the chat template was applied before
        ("$A <eos>", "1+1=", "1+1="),
        ("<pad> $A <eos>", "1+1=", "<pad>1+1="),
        ("<pad> $A <eos>", "<pad>1+1=", "<pad>1+1="),
        ("<pad> $A", "1+<pad>1=", "<pad>1+<pad>1="),  # inside it is no begin
        ("<pad> $A", "<pad>", "<pad>"),
        *(("<pad> <unk> $A", text, "<pad><unk>1+1=") for text in ("1+1=", "<pad><unk>1+1=")),
        ("$A <eos>", "1+1=<eos>", "1+1=<eos>"),  # the user's own end
        *(("<eos> $A <eos>", text, "<eos>1+1=") for text in ("1+1=", "<eos>1+1=")),
    ],
)
def test_a_string_begins_once_and_has_no_end_unlike_a_chat(added, text, rendered, tokenizer):
    tokens = [(name, tokenizer.convert_tokens_to_ids(name)) for name in ("<pad>", "<eos>", "<unk>")]
    processor = processors.TemplateProcessing(single=added, special_tokens=tokens)
    tokenizer.backend_tokenizer.post_processor = processor
    assert tokenizer.decode(render_prompt(text, tokenizer)) == rendered
    ids = render_prompt(SUM, tokenizer)  # a chat's are in its template
    assert tokenizer.decode(ids) == "1+1=" and all(type(token) is int for token in ids)


def characters(template):
    names = ["<pad>", "<bos>", "<eos>", "<think>", "</think>", "<|turn|>", "<unk>"]
    vocabulary = {name: k for k, name in enumerate([*names, *map(chr, range(10, 127))])}
    backend = Tokenizer(models.BPE(vocabulary, [], unk_token="<unk>"))
    backend.decoder = decoders.Fuse()
    backend.add_special_tokens(names)
    return PreTrainedTokenizerFast(
        tokenizer_object=backend, bos_token="<bos>", eos_token="<eos>", chat_template=template
    )


@pytest.mark.parametrize(
    ("messages", "rendered"),
    [
        ([("user", "1+1=")], "<user>1+1=<eos><assistant>"),
        ([("user", "1+1="), ("assistant", "It is\n ")], "<user>1+1=<eos><assistant>It is\n "),
        (
            [("user", "a"), ("assistant", "b"), ("user", "c")],
            "<user>a<eos><assistant>b<eos><user>c<eos><assistant>",
        ),
        *(
            ([("user", "1+1="), (role, text)], f"<user>1+1=<eos><{role}>{text}")
            for role, text in (
                *(("assistant", each) for each in ("", "\n", "o", "1+1=", "<eos>", r"\boxed{")),
                ("model", "It is"),
            )
        ),
        ([("system", "a"), ("assistant", "b")], "<system>a<eos><assistant>b"),
        ([("assistant", "a"), ("assistant", "b")], "<assistant>a<eos><assistant>b"),
        ([("user", "a"), ("tool", "5")], "<user>a<eos><tool>5<eos><assistant>"),
    ],
)
def test_an_assistants_message_at_the_end_is_continued(messages, rendered):
    tokenizer = characters(TURNS)
    chat = [{"role": role, "content": content} for role, content in messages]
    assert tokenizer.decode(render_prompt(chat, tokenizer)) == rendered


def test_a_template_shows_tool_calls_or_refuses_them():
    call = {"role": "assistant", "content": None, "tool_calls": [OF_OPENAI]}
    messages = read_messages([*CHAT, call, {"role": "tool", "content": "5"}], "prompt")
    tokenizer = characters(TURNS)
    rendered = tokenizer.decode(render_prompt(messages, tokenizer))
    assert rendered == '<user>2+3?<eos><assistant>{"a": 17}<eos><tool>5<eos><assistant>'
    with pytest.raises(ValueError, match="tool_calls"):
        render_prompt(messages, characters("{{ messages }}"))


def test_rewards_see_tags_and_no_other_special_tokens():
    tokenizer = characters(TURNS)
    for text in ("is it 5?<think>", "</think>", "<think>is it 6?<think></think></think>", ""):
        ids = tokenizer(f"<bos><pad>{text}<|turn|>4<eos><eos><pad>")["input_ids"]
        assert text_decoder(tokenizer)(ids) == f"{text}4"
    ids = tokenizer("<bos><think>is it 5?</think>\nIt is 6.<|turn|><eos><pad>")["input_ids"]
    assert text_decoder(tokenizer)(ids) == "<think>is it 5?</think>\nIt is 6."
    assert StopStrings(tokenizer, ["</think>"]).is_complete(np.array(ids[:11], np.int32))


@pytest.mark.parametrize("text", ["b", " b", "\nb", ""])
def test_a_text_behind_others_begins_without_a_space(text):
    """Llama's tokenizer puts one before a text."""
    llama = llama_tokenizer(legacy=False)
    behind = llama(f"a{text}", add_special_tokens=False)["input_ids"]
    begin = llama("a", add_special_tokens=False)["input_ids"]
    assert begin + encode_behind(text, llama) == behind
    tiny = characters(TURNS)
    assert encode_behind(text, tiny) == tiny(text, add_special_tokens=False)["input_ids"]


def test_a_stop_string_is_found_behind_a_picture_and_not_across_one():
    tokenizer = characters(TURNS)
    finder = StopStrings(tokenizer, ["66+"])
    six, plus = tokenizer("6+", add_special_tokens=False)["input_ids"]
    picture = -(2**31)  # an id of `engines.shown`
    assert finder.is_complete(np.array([picture, picture, six, six, plus], np.int32))
    assert not finder.is_complete(np.array([six, picture, six, plus], np.int32))


def test_variables_reach_the_template_wherever_prompts_become_tokens(tmp_path, tokenizer):
    assert tokenizer.decode(render_prompt(SUM, tokenizer, {"thinks": True})) == "think1+1="
    file = write_rows(tmp_path / "chat.jsonl", [{"prompt": SUM}])
    words = [f"data.dataset={file}", "data.max_prompt_length=5"]
    config = load_config(words=words)
    examples = open_prompts(resolve(config).data).examples()
    check_prompts(examples, tokenizer, config.data)
    with pytest.raises(ConfigError, match=r"data\.max_prompt_length"):
        thinks = load_config(words=[*words, "data.chat_template_kwargs={thinks: true}"])
        check_prompts(examples, tokenizer, thinks.data)
