"""Tool calls: what each format reads and refuses, and how the format of a template is found."""

import json
import time
from typing import get_args

import pytest
from transformers.utils.chat_template_utils import get_json_schema

from easyrl.config import ConfigError, load_config
from easyrl.config.rollout import ToolFormat
from easyrl.environments.conversation import Conversations
from easyrl.environments.loading import Interface
from easyrl.environments.tool_calls import BadCall, ToolCall, read_calls, read_turn
from easyrl.environments.tool_calls.formats import FORMATS
from easyrl.runtime.resolve import resolve
from runs import lines_of, succeed, write_rows
from tool_models import chat_model, chat_tokenizer


def schema(name, required=(), **properties):
    parameters = {"type": "object", "properties": properties, "required": [*required]}
    return {"type": "function", "function": {"name": name, "parameters": parameters}}


OPTIONAL = {"type": "string", "nullable": True}
WRITE = schema(
    "write",
    path={"type": "string"},
    content={"type": "string"},
    mode={"type": "integer"},
    on={"type": "boolean"},
    ratio={"type": "number"},
    note=OPTIONAL,
    tags={"type": "array", "items": {"type": "string"}},
    extra={"type": "object"},
)
TOOLS = [WRITE, schema("ping"), schema("need", ["a"], a={"type": "integer"})]


def read_one(text, tool_format, tools=TOOLS):
    (found,) = read_calls(text, tool_format, tools)
    return found


def assert_read(text, tool_format, arguments, tools=TOOLS):
    """None: the call is refused; otherwise its arguments have these values and types."""
    found = read_one(text, tool_format, tools)
    if arguments is None:
        assert isinstance(found, BadCall) and found.reason
    else:
        assert isinstance(found, ToolCall), found
        assert json.dumps(found.arguments, sort_keys=True) == json.dumps(arguments, sort_keys=True)


# -- the same calls in every format ---------------------------------------------------------------


def tagged(begin, parameter, end_parameter, end, dump):
    def write(name, arguments):
        text = begin.format(name)
        for key, value in arguments.items():
            shown = value if isinstance(value, str) else dump(value)
            text += parameter.format(key) + shown + end_parameter
        return text + end

    return write


def of_json(text):
    return lambda name, arguments: text.replace("NAME", name).replace("JSON", json.dumps(arguments))


def of_python(value):
    return json.dumps(value) if isinstance(value, dict | list) else str(value)


def of_gemma(value):
    if isinstance(value, str):
        return f'<|"|>{value}<|"|>'
    if isinstance(value, dict):
        return "{" + ",".join(f"{key}:{of_gemma(each)}" for key, each in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ",".join(map(of_gemma, value)) + "]"
    return json.dumps(value)


WRITERS = {
    "hermes": of_json('<tool_call>\n{"name": "NAME", "arguments": JSON}\n</tool_call>'),
    "llama3": of_json('{"name": "NAME", "parameters": JSON}'),
    "hunyuan": of_json('<tool_calls>[{"name": "NAME", "arguments": JSON}]</tool_calls>'),
    "json_list": of_json('<TOOLCALL>[{"name": "NAME", "arguments": JSON}]</TOOLCALL>'),
    "mistral": of_json("[TOOL_CALLS]NAME[ARGS]JSON"),
    "kimi_k2": of_json(
        "<|tool_calls_section_begin|><|tool_call_begin|>functions.NAME:0<|tool_call_argument_begin|>"
        "JSON<|tool_call_end|><|tool_calls_section_end|>"
    ),
    "deepseek_v3": of_json(
        "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>NAME<｜tool▁sep｜>JSON<｜tool▁call▁end｜>"
        "<｜tool▁calls▁end｜>"
    ),
    "gpt_oss": of_json(
        "<|channel|>commentary to=functions.NAME <|constrain|>json<|message|>JSON<|call|>"
    ),
    "qwen3_coder": tagged(
        "<tool_call>\n<function={}>\n", "<parameter={}>\n", "\n</parameter>\n",
        "</function>\n</tool_call>", of_python,
    ),
    "seed_oss": tagged(
        "<seed:tool_call>\n<function={}>\n", "<parameter={}>", "</parameter>\n",
        "</function>\n</seed:tool_call>", str,
    ),
    "minimax_m2": tagged(
        '<minimax:tool_call>\n<invoke name="{}">\n', '<parameter name="{}">', "</parameter>\n",
        "</invoke>\n</minimax:tool_call>", json.dumps,
    ),
    "muse_glimmer": tagged(
        ' to={0}<|message|><atem:function_calls>\n<atem:invoke name="{0}">\n',
        '<atem:parameter name="{}">', "</atem:parameter>\n",
        "</atem:invoke>\n</atem:function_calls>", json.dumps,
    ),
    "glm": tagged(
        "<tool_call>{}\n", "<arg_key>{}</arg_key>\n<arg_value>", "</arg_value>\n",
        "</tool_call>", json.dumps,
    ),
    "hy3": tagged(
        "<tool_calls>\n<tool_call>{}<tool_sep>\n", "<arg_key>{}</arg_key>\n<arg_value>",
        "</arg_value>\n", "</tool_call>\n</tool_calls>", json.dumps,
    ),
    "gemma4": lambda name, arguments: f"<|tool_call>call:{name}{of_gemma(arguments)}<tool_call|>",
    "lfm2": lambda name, arguments: (
        "<|tool_call_start|>["
        + f"{name}({', '.join(f'{key}={value!r}' for key, value in arguments.items())})"
        + "]<|tool_call_end|>"
    ),
}  # fmt: skip
FIRST = {"path": "a.py", "content": "x = 1\n  y = 'é'\n", "mode": 2, "on": False, "ratio": 0.5}
SECOND = {"content": " ", "tags": ["a", "b"], "extra": {"k": [1, True, None]}, "path": ""}
ONE_PER_TURN = ("llama3", "gpt_oss")


def test_every_format_has_a_writer_here_and_a_place_in_the_config():
    assert WRITERS.keys() == FORMATS.keys() == {*get_args(ToolFormat)} - {"auto"}


@pytest.mark.parametrize("tool_format", FORMATS)
def test_calls_keep_every_argument(tool_format):
    write = WRITERS[tool_format]
    for arguments in (FIRST, SECOND, {"content": '{"a": 1}'}, {"content": "12"}):
        assert_read(write("write", arguments), tool_format, arguments)
    assert_read(write("ping", {}), tool_format, {})
    assert read_calls("a text without calls", tool_format, TOOLS) == []
    for arguments in (
        {"mode": "two"},
        {"on": 2},
        {"tags": "a"},
        {"other": 1},
        {"path": "a", "x": 1},
    ):
        assert_read(write("write", arguments), tool_format, None)  # what the schema refuses
    assert_read(write("need", {}), tool_format, None)  # without an argument that it needs
    found = read_one(write("nothing", {"x": 1}), tool_format)
    assert isinstance(found, BadCall) and found.name == "nothing" and "write" in found.reason


@pytest.mark.parametrize("tool_format", FORMATS)
def test_a_call_that_is_cut_is_not_executed_with_a_part_of_its_arguments(tool_format):
    text = WRITERS[tool_format]("write", FIRST)
    for length in range(1, len(text)):
        for call in read_calls(text[:length], tool_format, TOOLS):
            assert isinstance(call, BadCall) or call.arguments == FIRST, text[:length]


@pytest.mark.parametrize("tool_format", [name for name in FORMATS if name not in ONE_PER_TURN])
def test_several_calls_are_read_in_order_and_thoughts_are_none(tool_format):
    write, (begin, end) = WRITERS[tool_format], FORMATS[tool_format].thinking
    first, second = write("write", {"path": "a"}), write("need", {"a": 1})
    both = [ToolCall("write", {"path": "a"}), ToolCall("need", {"a": 1})]
    texts = [
        f"Well.\n{first}\n{second}" if tool_format != "mistral" else f"Well.{first}{second}",
        f"{begin}\nOr {write('ping', {})}, no.\n{end}\n{first}{second}",
    ]
    if FORMATS[tool_format].may_think_at_once:
        texts.append(f"the prompt began it: {write('ping', {})}, no.\n{end}\n{first}{second}")
    for text in texts:
        found = read_calls(text, tool_format, TOOLS)
        assert [call[:2] for call in found] == [call[:2] for call in both]
    assert read_calls(f"{begin}\nOr {first}", tool_format, TOOLS) == []
    (found,) = read_calls(f"I do not write {begin} here. {first}{second}", tool_format, TOOLS)
    assert isinstance(found, BadCall) and end in found.reason  # a thought, or a mention
    mention = f"Between {begin} and {end} I would think. {first}"
    assert len(read_calls(mention, tool_format, TOOLS)) == 1


@pytest.mark.parametrize("value", [
    "</tool_call>", "a </think> b", "<think>", "<tool_call>{}</tool_call>", "</function>",
    '"quoted" \\ back', "line\n\nline", "{'a': 1}", "[1]", "None", "True", "  ", "1e5", "é ｜ 你好",
])  # fmt: skip
@pytest.mark.parametrize("tool_format", FORMATS)
def test_a_text_is_read_exactly_or_not_at_all(tool_format, value):
    for arguments in ({"content": value, "path": "a"}, {"path": "a", "content": f"x{value}y"}):
        found = read_calls(WRITERS[tool_format]("write", arguments), tool_format, TOOLS)
        assert len(found) <= 1
        for call in found:
            assert isinstance(call, BadCall) or call.arguments == arguments


# -- tags -----------------------------------------------------------------------------------------


def coder(body, end="\n</function>\n</tool_call>"):
    return f"<tool_call>\n<function=write>\n{body}{end}"


def parameter(name, value, end="\n</parameter>"):
    return f"<parameter={name}>\n{value}{end}"


@pytest.mark.parametrize(("text", "arguments"), [
    # Values as the template writes them: Python's words, and JSON for lists and mappings.
    (coder(parameter("on", "False")), {"on": False}),
    (coder(parameter("on", "true")), {"on": True}),
    (coder(parameter("note", "None")), {"note": None}),
    (coder(parameter("content", "None")), {"content": "None"}),
    (coder(parameter("content", "False")), {"content": "False"}),
    (coder(parameter("content", "\n  a\n")), {"content": "\n  a\n"}),
    (coder(parameter("content", "")), {"content": ""}),
    (coder(parameter("mode", "3.0")), {"mode": 3}),
    (coder(parameter("mode", "3.5")), None),
    (coder(parameter("mode", "True")), None),
    (coder(parameter("on", "1")), None),
    (coder(parameter("ratio", "nan")), None),
    (coder(parameter("ratio", "1e999")), None),
    (coder(parameter("tags", '["a", "b"]')), {"tags": ["a", "b"]}),
    (coder(parameter("tags", '["a", 1]')), None),
    (coder(parameter("extra", "{'a': True}")), {"extra": {"a": True}}),
    (coder(parameter("extra", '{"a": 1, "a": 2}')), None),
    (coder(parameter("extra", "dict(a=1)")), None),
    # The tags of the format in a value.
    (coder(parameter("content", 'print("</parameter>")')), {"content": 'print("</parameter>")'}),
    (coder(parameter("content", "a </parameter> b\nc")), {"content": "a </parameter> b\nc"}),
    (coder(parameter("content", "x <function=f> y")), {"content": "x <function=f> y"}),
    (coder(parameter("content", 'print("</function>")')), {"content": 'print("</function>")'}),
    (coder(parameter("content", "p('</tool_call>')")), {"content": "p('</tool_call>')"}),
    (coder(parameter("content", "doc: <parameter=a>1</parameter> end")),
     {"content": "doc: <parameter=a>1</parameter> end"}),
    (coder(parameter("content", "<parameter=a>1</parameter>")),
     {"content": "<parameter=a>1</parameter>"}),
    # Lines that are a tag: what they belong to is not sure.
    (coder(parameter("content", "a\n</parameter>\nb")), None),
    (coder(parameter("content", "a\n</function>\nb")), None),
    (coder(parameter("content", "a\n</function>\n</tool_call>\nb")), None),
    (coder(parameter("content", "<parameter=a>\n1\n</parameter>")), None),
    (coder(parameter("content", f"See:\n{coder(parameter('path', 'a'))}\nend")), None),
    (coder(parameter("path", "a\n<parameter=mod>\n2")), None),
    # Tags that are missing.
    (coder(parameter("path", "a.py", "") + "\n" + parameter("mode", "2")),
     {"path": "a.py", "mode": 2}),
    (coder(parameter("path", "a.py", "")), {"path": "a.py"}),
    (coder(parameter("path", "a.py"), "\n</tool_call>"), {"path": "a.py"}),
    (coder(parameter("path", "a.py"), "\n</function>"), {"path": "a.py"}),
    (coder(parameter("path", "a.py", ""), "\n</function>"), None),
    (coder(parameter("path", "a.py"), ""), None),
    (coder(parameter("path", "a.py", ""), ""), None),
    (coder("<parameter=path>"), None),
    (coder(parameter("path", "", "") + parameter("mode", "2")), None),
    # In one line, and in two styles.
    (coder("<parameter=mode>2</parameter><parameter=path>a b</parameter>"),
     {"mode": 2, "path": "a b"}),
    (coder("<parameter=path>a<parameter=mode>2</parameter>"), None),
    (coder("<parameter=content>\nx</parameter>\n" + parameter("mode", "2")),
     {"content": "x", "mode": 2}),
    (coder(parameter("mode", "2") + "\n" + parameter("mode", "3")), None),
    (coder(parameter("mode", "2") + "\nand more"), None),
    (coder(parameter("mode", "2")).removeprefix("<tool_call>\n"), {"mode": 2}),
])  # fmt: skip
def test_values_between_tags_on_their_own_lines(text, arguments):
    assert_read(text, "qwen3_coder", arguments)


def glm(body, name="write"):
    return f"<tool_call>{name}\n{body}</tool_call>"


def pair(key, value, end="</arg_value>\n"):
    return f"<arg_key>{key}</arg_key>\n<arg_value>{value}{end}"


@pytest.mark.parametrize(("text", "arguments"), [
    (glm(pair("path", "a b") + pair("mode", "2") + pair("on", "false")),
     {"path": "a b", "mode": 2, "on": False}),
    (glm(pair("content", " a\n")), {"content": " a\n"}),
    (glm(pair("content", '"a"')), {"content": '"a"'}),
    (glm(pair("note", "null")), {"note": None}),
    (glm(pair("content", 'print("</arg_value>")')), {"content": 'print("</arg_value>")'}),
    (glm(pair("content", 'print("</tool_call>")')), {"content": 'print("</tool_call>")'}),
    (glm(pair("content", pair("mode", "2"))), None),
    (glm(pair("path", "a", "") + pair("mode", "2")), None),
    (glm(pair("path", "a", "")), None),
    (glm(pair("path", "a"))[: -len("</tool_call>")], None),
    (glm("<arg_value>a</arg_value>\n"), None),
    (glm("path=a"), None),
    ('<tool_call>\n{"name": "write", "arguments": {"path": "a"}}\n</tool_call>', None),
])  # fmt: skip
def test_values_between_tags_in_a_line(text, arguments):
    assert_read(text, "glm", arguments)


# -- JSON and literals ----------------------------------------------------------------------------

HERMES = '<tool_call>{"name": "write", "arguments": %s}</tool_call>'


@pytest.mark.parametrize(("text", "arguments"), [
    (HERMES % '{"content": "</tool_call>"}', {"content": "</tool_call>"}),
    (HERMES % '"{\\"mode\\": 1}"', {"mode": 1}),
    (HERMES % '{"mode": 2.0}', {"mode": 2}),
    ((HERMES % '{"mode": 1}').removesuffix("</tool_call>"), {"mode": 1}),
    (HERMES % '{"mode": "2"}', None),
    (HERMES % '{"on": "False"}', None),
    (HERMES % '{"on": 0}', None),
    (HERMES % '{"mode": true}', None),
    (HERMES % '{"path": 5}', None),
    (HERMES % '{"path": null}', None),
    (HERMES % '{"note": null}', {"note": None}),
    (HERMES % '{"mode": 1, "mode": 2}', None),
    (HERMES % '{"extra": {"a": 1, "a": 2}}', None),
    (HERMES % '{"ratio": NaN}', None),
    (HERMES % '{"ratio": 1e999}', None),
    (HERMES % '{"content": "\\ud800"}', None),
    (HERMES % f'{{"extra": {{"n": {"1" * 5000}}}}}', None),
    (HERMES % f'{{"extra": {{"n": {"1" * 400}}}}}', {"extra": {"n": int("1" * 400)}}),
    (HERMES % "[1]", None),
    (HERMES % "null", None),
    (HERMES % '{"mode": 1} and more', None),
    ('<tool_call>{"name": "write", "path": "a"}</tool_call>', None),
    ('<tool_call>{"name": 5, "arguments": {}}</tool_call>', None),
    ('<tool_call>{"arguments": {}}</tool_call>', None),
    ('<tool_call>{"name": "ping", "arguments": {}, "parameters": {"x": 1}}</tool_call>', None),
    ("<tool_call>\n</tool_call>", None),
    (HERMES % ("[" * 100_000), None),
])  # fmt: skip
def test_calls_with_json(text, arguments):
    assert_read(text, "hermes", arguments)


@pytest.mark.parametrize(("tool_format", "text", "arguments"), [
    ("mistral", '[TOOL_CALLS][{"name": "write", "arguments": {"mode": 1}, "id": "abcdefghi"}]',
     {"mode": 1}),
    ("mistral", '[TOOL_CALLS]write[CALL_ID]abcdefghi[ARGS]{"mode": 1}', {"mode": 1}),
    ("mistral", '[TOOL_CALLS]write{"mode": 1}', {"mode": 1}),
    ("mistral", '[TOOL_CALLS]write[ARGS]{"mode": 1} and more', None),
    ("gpt_oss", ' to=functions.write<|channel|>commentary json<|message|>{"mode": 1}', {"mode": 1}),
    ("gpt_oss", "<|channel|>analysis<|message|>I call to=functions.ping<|end|><|start|>assistant"
     '<|channel|>commentary to=functions.write <|constrain|>json<|message|>{"mode": 1}',
     {"mode": 1}),
    ("gpt_oss", "<|channel|>commentary to=functions.write json<|message|>mode=1", None),
    ("gpt_oss", '<|channel|>commentary to=functions.write code<|message|>{"mode": 1}<|call|>',
     {"mode": 1}),
    ("gpt_oss", '<|channel|>analysis to=functions.write <|constrain|>code<|message|>{"mode": 1}',
     {"mode": 1}),
    ("gpt_oss", "<|channel|>commentary to=functions.write code<|message|>write(mode=1)", None),
    ("gpt_oss", '<|channel|>commentary to=functions.write text<|message|>{"mode": 1}', None),
    ("deepseek_v3", "<｜tool▁call▁begin｜>function<｜tool▁sep｜>write\n```json\n"
     '{"mode": 1}\n```<｜tool▁call▁end｜>', {"mode": 1}),
    ("gemma4", '<|tool_call>call:write{content:<|"|>a, b: {c}<|"|>,mode:1}<tool_call|>',
     {"content": "a, b: {c}", "mode": 1}),
    ("gemma4", "<|tool_call>call:write{extra:{a:{b:[1,None]}}}<tool_call|>",
     {"extra": {"a": {"b": [1, None]}}}),
    ("gemma4", "<|tool_call>call:write{path:a.py}<tool_call|>", None),
    ("gemma4", '<|tool_call>call:write{path:<|"|>a<|"|>b<|"|>}<tool_call|>', None),
    ("gemma4", "<|tool_call>call:write{mode:1,mode:2}<tool_call|>", None),
    ("gemma4", '<|tool_call>call:write{path:<|"|>a', None),
    ("lfm2", '<|tool_call_start|>[write(extra={"k": [1, null, true]}, on=False)]<|tool_call_end|>',
     {"extra": {"k": [1, None, True]}, "on": False}),
    ("lfm2", "<|tool_call_start|>[write(path='<|tool_call_end|>')]<|tool_call_end|>",
     {"path": "<|tool_call_end|>"}),
    ("lfm2", "<|tool_call_start|>[write('a')]<|tool_call_end|>", None),
    ("lfm2", r"<|tool_call_start|>[write(path='\ud800')]<|tool_call_end|>", None),
    ("lfm2", "<|tool_call_start|>[write(content='a\n  # b\n', mode=1)]<|tool_call_end|>",
     {"content": "a\n  # b\n", "mode": 1}),
    ("lfm2", "<|tool_call_start|>[write(content='a\\\nb\nc')]<|tool_call_end|>", None),
    ("lfm2", "<|tool_call_start|>[write(content=r'a\nb')]<|tool_call_end|>", None),
    ("lfm2", "<|tool_call_start|>[write(content='it's\nb')]<|tool_call_end|>", None),
    ("lfm2", f"<|tool_call_start|>[write(mode=0x{'f' * 5000})]<|tool_call_end|>", None),
    ("lfm2", "<|tool_call_start|>[write(mode=-3, ratio=-0.5)]<|tool_call_end|>",
     {"mode": -3, "ratio": -0.5}),
    ("lfm2", "<|tool_call_start|>[write(mode=1 + 1)]<|tool_call_end|>", None),
    ("lfm2", "<|tool_call_start|>[write(mode=__import__('os'))]<|tool_call_end|>", None),
    ("lfm2", "<|tool_call_start|>[write(path=f'{1}')]<|tool_call_end|>", None),
    ("lfm2", "<|tool_call_start|>[write(**{'mode': 1})]<|tool_call_end|>", None),
    ("lfm2", "<|tool_call_start|>[write(mode=1, mode=2)]<|tool_call_end|>", None),
])  # fmt: skip
def test_calls_of_other_formats(tool_format, text, arguments):
    assert_read(text, tool_format, arguments)


def test_a_bad_call_does_not_hide_the_next_one_and_hides_what_may_be_its_text():
    bad, good = "<tool_call>{name: f}</tool_call>", HERMES % '{"mode": 1}'
    found = read_calls(f"{bad}\n{good}", "hermes", TOOLS)
    assert [type(call) for call in found] == [BadCall, ToolCall]
    # An example in a text whose quotes are wrong is no call.
    found = read_calls(HERMES % f'{{"content": "a" {good} "b"}}', "hermes", TOOLS)
    assert [type(call) for call in found] == [BadCall]
    found = read_calls(
        coder(f"<parameter=path\n{coder(parameter('path', 'a'))}"), "qwen3_coder", TOOLS
    )
    assert [type(call) for call in found] == [BadCall]


def test_the_text_around_calls_keeps_those_that_are_not_read():
    good, bad = HERMES % '{"mode": 1}', "<tool_call>{</tool_call>"
    assert read_turn(f"Hm. {good} So.", "hermes", TOOLS).around == "Hm.  So."
    assert read_turn(f"Hm. {bad} So. {good}", "hermes", TOOLS).around == f"Hm. {bad} So."


# -- schemas --------------------------------------------------------------------------------------


def typed(a: int, b: str | None = None, c: int | str = 1, d: float | None = None):
    """
    A tool.

    Args:
        a: A.
        b: B.
        c: C.
        d: D.
    """


REFERENCE = {"$ref": "#/$defs/Point"}
POINT = {"type": "object", "properties": {"x": {"type": "integer"}}, "required": ["x"]}
AGENTS = schema(
    "write",
    choice={"enum": ["x", 1, None]},
    either={"anyOf": [{"type": "integer"}, {"type": "null"}]},
    both={"type": ["integer", "string"]},
    point=REFERENCE,
    anything={},
    word={"allOf": [{"$ref": "#/$defs/Word"}], "default": "a"},
    number={"type": "number"},
    fixed={"type": "string", "const": "a"},
)
AGENTS["function"]["parameters"]["$defs"] = {"Point": POINT, "Word": {"type": "string"}}


@pytest.mark.parametrize(("name", "text", "value"), [
    ("choice", "x", "x"), ("choice", "1", 1), ("choice", "None", None),
    ("either", "5", 5), ("either", "null", None), ("both", "5", 5), ("both", "05", "05"),
    ("both", "five", "five"), ("point", '{"x": 1}', {"x": 1}), ("anything", "a b", "a b"),
    ("anything", "5", 5), ("anything", "[1]", [1]), ("anything", '"a"', '"a"'),
    ("word", "5", "5"), ("word", "None", "None"), ("anything", "1" * 5000, "1" * 5000),
    ("fixed", "a", "a"), ("number", "9" * 90, int("9" * 90)), ("either", "9" * 90, int("9" * 90)),
])  # fmt: skip
def test_texts_are_read_by_schemas(name, text, value):
    assert_read(coder(parameter(name, text)), "qwen3_coder", {name: value}, [AGENTS])


@pytest.mark.parametrize(("name", "text", "value"), [
    ("choice", "y", "y"), ("either", "a", "a"), ("point", '{"x": "1"}', {"x": "1"}),
    ("point", "{}", {}), ("either", "5.5", 5.5), ("fixed", "b", "b"),
])  # fmt: skip
def test_what_a_schema_refuses_is_not_executed_in_any_form(name, text, value):
    assert_read(coder(parameter(name, text)), "qwen3_coder", None, [AGENTS])
    found = read_one(HERMES % json.dumps({name: value}), "hermes", [AGENTS])
    assert isinstance(found, BadCall) and found.arguments == {name: value}  # for an agent's program
    assert f"'{name}'" in found.reason


def test_arguments_that_are_nested_too_deeply_are_a_bad_call():
    tool = schema("write", node={"$ref": "#/$defs/Node"})
    node = {"type": "object", "properties": {"next": {"$ref": "#/$defs/Node"}}}
    tool["function"]["parameters"]["$defs"] = {"Node": node}
    for depth, arguments in ((20, {"node": nested(20)}), (500, None)):
        text = '{"next": ' * depth + "{}" + "}" * depth
        assert_read(HERMES % f'{{"node": {text}}}', "hermes", arguments, [tool])


def nested(depth):
    return {"next": nested(depth - 1)} if depth else {}


@pytest.mark.parametrize(("tool_format", "text"), [
    ("gpt_oss", "to=" * 10_000),
    ("glm", "<tool_call>write\n<arg_key>" + " " * 10_000),
    ("hy3", "<tool_call>write<tool_sep><arg_key>" + " " * 10_000),
    ("hermes", "<tool_call></tool_call>" * 10_000),
])  # fmt: skip
def test_repetitions_are_read_in_linear_time(tool_format, text):
    begin = time.process_time()
    assert not any(isinstance(call, ToolCall) for call in read_calls(text, tool_format, TOOLS))
    assert time.process_time() - begin < 20  # a second at most; in quadratic time minutes


def test_a_json_answer_is_no_call_of_llama3():
    assert read_turn('{"answer": 5}', "llama3", TOOLS) == ([], '{"answer": 5}')
    for text in ('{"name": "write"', '<|python_tag|>{"path": "a"}'):
        assert isinstance(read_one(text, "llama3"), BadCall)


@pytest.mark.parametrize("between", ["; ", ";", "\n;\n"])
def test_several_calls_of_llama3_have_semicolons_between_them(between):
    write = WRITERS["llama3"]
    parts = [write("write", {"content": "a; b"}), write("need", {"a": 1}), write("ping", {})]
    text = between.join(parts)
    expected = [ToolCall("write", {"content": "a; b"}), ToolCall("need", {"a": 1})]
    assert read_calls(text, "llama3", TOOLS) == [*expected, ToolCall("ping", {})]
    assert len(read_calls(f"<|python_tag|>{text}", "llama3", TOOLS)) == 3
    for broken in (f"{text};", f"{text}; and more", "\n".join(parts)):
        assert isinstance(read_one(broken, "llama3"), BadCall)


def test_a_call_in_another_language_says_what_is_wrong():
    text = "<|channel|>analysis to=python code<|message|>print(1)<|call|>"
    assert "'python'" in read_one(text, "gpt_oss").reason
    text = "<|channel|>commentary to=functions.write code<|message|>write(mode=1)<|call|>"
    assert "'write'" in read_one(text, "gpt_oss").reason


def test_thoughts_to_itself_and_several_calls_of_muse_glimmer():
    first, second = (WRITERS["muse_glimmer"](*call) for call in (("ping", {}), ("need", {"a": 1})))
    inner = second.partition("<|message|>")[2]
    for thought in (f"Or{second}?", inner):
        messages = [f" to=self<|message|>{thought}", first, second]
        text = "<|eom|><|start|>assistant".join(messages)
        turn = read_turn(text, "muse_glimmer", TOOLS)
        assert [call.name for call in turn.calls] == ["ping", "need"]


def test_a_functions_type_hints_are_its_schema():
    tools = [get_json_schema(typed)]
    text = '{"name": "typed", "parameters": %s}'
    for arguments in ({"a": 1, "b": None, "c": "x", "d": 2}, {"a": 1, "c": 2, "d": None}):
        assert_read(text % json.dumps(arguments), "llama3", arguments, tools)
    for arguments in ({}, {"a": None}, {"a": 1, "b": 1}, {"a": 1, "e": 1}, {"a": 1, "d": "x"}):
        assert_read(text % json.dumps(arguments), "llama3", None, tools)
    # A tool without a list of its arguments takes all.
    free = {"type": "function", "function": {"name": "typed", "parameters": {"type": "object"}}}
    assert_read(text % '{"z": 1}', "llama3", {"z": 1}, [free])


# -- the format of a template ---------------------------------------------------------------------

CALL = "{% for c in m.tool_calls or [] %}{% set f = c.function %}"
PAIRS = "{% for k, v in f.arguments.items() %}"
TEXTS = "{{ v if v is string else v | tojson }}"
CALLS = {
    "hermes": '<tool_call>{"name": "{{ f.name }}", "arguments": {{ f.arguments | tojson }}}'
    "</tool_call>",
    "llama3": '{"name": "{{ f.name }}", "parameters": {{ f.arguments | tojson }}}',
    "hunyuan": '<tool_calls>[{"name": "{{ f.name }}", "arguments": {{ f.arguments | tojson }}}]'
    "</tool_calls>",
    "json_list": '<|tool_call|>[{"name": "{{ f.name }}", "arguments": {{ f.arguments | tojson }}}]',
    "mistral": "[TOOL_CALLS]{{ f.name }}[ARGS]{{ f.arguments | tojson }}",
    "kimi_k2": "<|tool_calls_section_begin|><|tool_call_begin|>{{ c.id }}"
    "<|tool_call_argument_begin|>{{ f.arguments | tojson }}<|tool_call_end|>"
    "<|tool_calls_section_end|>",
    "deepseek_v3": "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>{{ f.name }}\n"
    "```json\n{{ f.arguments + '' }}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
    "gpt_oss": " to=functions.{{ f.name }}<|channel|>commentary json<|message|>"
    "{{ f.arguments | tojson }}",
    "qwen3_coder": "\n<tool_call>\n<function={{ f.name }}>\n" + PAIRS + "<parameter={{ k }}>\n"
    "{{ v | tojson if v is mapping else v | string }}\n</parameter>\n{% endfor %}"
    "</function>\n</tool_call>",
    "seed_oss": "<seed:tool_call>\n<function={{ f.name }}>\n" + PAIRS + "<parameter={{ k }}>{{ v }}"
    "</parameter>\n{% endfor %}</function>\n</seed:tool_call>",
    "minimax_m2": '<minimax:tool_call>\n<invoke name="{{ f.name }}">\n' + PAIRS
    + '<parameter name="{{ k }}">' + TEXTS + "</parameter>\n{% endfor %}</invoke>\n"
    "</minimax:tool_call>",
    "muse_glimmer": '<atem:function_calls>\n<atem:invoke name="{{ f.name }}">\n' + PAIRS
    + '<atem:parameter name="{{ k }}">' + TEXTS + "</atem:parameter>\n{% endfor %}"
    "</atem:invoke>\n</atem:function_calls>",
    "glm": "\n<tool_call>{{ f.name }}\n" + PAIRS + "<arg_key>{{ k }}</arg_key>\n<arg_value>" + TEXTS
    + "</arg_value>\n{% endfor %}</tool_call>",
    "hy3": "<tool_calls>\n<tool_call>{{ f.name }}<tool_sep>\n" + PAIRS
    + "<arg_key>{{ k }}</arg_key>\n<arg_value>" + TEXTS + "</arg_value>\n{% endfor %}</tool_call>"
    "\n</tool_calls>",
    "gemma4": "{%- macro w(v) -%}{%- if v is string -%}<|\"|>{{ v }}<|\"|>"
    "{%- elif v is mapping -%}{{ '{' }}{%- for k, x in v | dictsort -%}"
    "{{ k }}:{{ w(x) }}{{ ',' if not loop.last }}{%- endfor -%}{{ '}' }}"
    "{%- elif v is boolean -%}{{ 'true' if v else 'false' }}"
    "{%- elif v is sequence -%}[{%- for x in v -%}{{ w(x) }}{{ ',' if not loop.last }}"
    "{%- endfor -%}]{%- else -%}{{ v }}{%- endif -%}{%- endmacro -%}"
    "<|tool_call>call:{{ f.name }}{{ w(f.arguments) }}<tool_call|>",
    "lfm2": "<|tool_call_start|>[{{ f.name }}(" + PAIRS + "{{ k }}="
    "{% if v is string %}'{{ v }}'{% elif v is mapping %}{{ v | tojson }}"
    "{% else %}{{ v }}{% endif %}"
    "{{ ', ' if not loop.last }}{% endfor %})]<|tool_call_end|>",
}  # fmt: skip


def template_of(call):
    return (
        "{% if tools %}{{ tools | length }}{% endif %}{% for m in messages %}"
        "{% if m.role == 'assistant' %}A{{ m.content }}" + CALL + call + "{% endfor %}<eos>"
        "{% elif m.role == 'tool' %}T{{ m.content }}{% else %}U{{ m.content }}{% endif %}"
        "{% endfor %}"
        "{% if add_generation_prompt %}A{% endif %}"
    )


def conversations(template, tool_format="auto", tools=TOOLS, calls=(), **attributes):
    tokenizer = chat_tokenizer(calls, template)
    for name, value in attributes.items():
        setattr(tokenizer, name, value)
    settings = {"rollout.environment": "guess", "rollout.tool_format": tool_format}
    spec = resolve(load_config(None, settings)).episodes
    return Conversations(spec, tokenizer, Interface(tools, False, False), [1])


@pytest.mark.parametrize("tool_format", FORMATS)
def test_the_format_of_a_template_is_the_one_that_reads_its_calls(tool_format):
    text = WRITERS[tool_format]("write", FIRST)
    talk = conversations(template_of(CALLS[tool_format]), calls=[text])
    (answer,) = chat_tokenizer([text]).encode(text)
    _, (call,), around = talk.read_turn([answer, 1], [])
    assert call[:2] == ("write", FIRST) and around == ""


@pytest.mark.parametrize(("call", "words"), [
    ("<|open|>{{ f.name }}<|args|>{{ f.arguments | tojson }}<|close|>", ["<|open|>", "glm"]),
    ("<tool_call>{{ f.name }} {{ f.arguments | tojson }}</tool_call>", ["<tool_call>"]),
    # Written as if every value were a text: it could not be read back.
    ("<tool_call>{{ f.name }}" + PAIRS + "<arg_key>{{ k }}</arg_key><arg_value>{{ k }}</arg_value>"
     "{% endfor %}{{ f.arguments.text }}</tool_call>", ["<arg_key>"]),
    ("", ["does not write"]),
    ("{# <tool_call> #}", ["does not write", "hermes"]),
    ("{{ raise_exception('no tools here') }}", ["no tools here"]),
])  # fmt: skip
def test_a_template_of_another_format_is_refused_with_what_it_shows(call, words):
    with pytest.raises(ConfigError, match=r"rollout\.tool_format") as raised:
        conversations(template_of(call))
    assert all(word in str(raised.value) for word in words)


def test_a_format_can_be_set_where_the_template_does_not_show_it():
    talk = conversations(template_of(""), "lfm2")
    answer = chat_tokenizer().encode(WRITERS["lfm2"]("ping", {}))
    assert talk.read_turn(answer, [])[1] == [ToolCall("ping", {})]


RESPONSE = {
    "start_anchor": "A",
    "fields": {
        "tool_calls": {
            "open_pattern": r"<use (?P<name>\w+)>",
            "close": "</use>",
            "repeats": True,
            "content": "xml-inline",
            "content_args": {"tag_pattern": r"<(?P<key>\w+)>(?P<value>.*?)</(?P=key)>"},
            "transform": {
                "type": "function",
                "function": {"name": "{name}", "arguments": "{content}"},
            },
        },
        "content": {"content": "text"},
    },
}
USED = "<use {{ f.name }}>" + PAIRS + "<{{ k }}>" + TEXTS + "</{{ k }}>{% endfor %}</use>"


def test_the_tokenizers_own_parser_is_used_for_other_formats_and_checked():
    talk = conversations(template_of(USED), response_template=RESPONSE)

    def read(text):
        return talk.read_turn([*chat_tokenizer().encode(text), 1], chat_tokenizer().encode("UqA"))[
            1
        ]

    whole = "<use write><path>a b</path><mode>2</mode></use>"
    assert read(whole) == [ToolCall("write", {"path": "a b", "mode": 2})]
    for text in (
        whole.replace("a b", "a </path> b"),  # its parser cuts the value
        whole.replace("</path>", ""),  # and drops this argument
        whole.removesuffix("</mode></use>"),
        whole.replace(">2<", ">two<"),
        whole.replace("mode>", "mood>"),
    ):
        (found,) = read(text)
        assert isinstance(found, BadCall), found


def test_ids_of_calls_are_repeated_by_their_results():
    template = template_of(CALLS["kimi_k2"]).replace(
        "T{{ m.content }}", "T{{ m.tool_call_id }}:{{ m.content }}"
    )
    talk, tokenizer = conversations(template), chat_tokenizer()
    message = {"role": "tool", "name": "ping", "content": "5"}
    own = talk.suffix([message | {"tool_call_id": "functions.ping:3"}], 1)
    assert tokenizer.decode(own) == "Tfunctions.ping:3:5A"
    (call,) = read_calls(WRITERS["kimi_k2"]("ping", {}), "kimi_k2", TOOLS)
    assert call.call_id == "functions.ping:0"


ENVIRONMENT = '''
class Store:
    def reset(self, **row):
        self.seen = None

    def keep(self, flag: bool, note: str) -> str:
        """
        Keep a note.

        Args:
            flag: Whether it counts.
            note: The note.
        """
        self.seen = [flag, note]
        return "kept"

    def get_reward(self) -> float:
        return float(self.seen == [False, "a b"])
'''


def test_calls_of_another_format_are_executed_in_a_run(tmp_path):
    (tmp_path / "own.py").write_text(ENVIRONMENT)
    call = glm(pair("flag", "false") + pair("note", "a b"), "keep")
    model = chat_model(tmp_path / "model", [call], template_of(CALLS["glm"]))
    rows = write_rows(tmp_path / "rows.jsonl", [{"prompt": "q"}] * 4)
    words = ("--model", model, "--dataset", str(rows), "--environment", f"{tmp_path}/own.py:Store")
    words += ("--iterations", "1", "data.num_held_out=0", "--no-live", "rollout.max_turns=2")
    words += ("rollout.max_completion_length=200", "train.prompts_per_iteration=4")
    succeed(*words, "rollout.num_generations=8", "--output", str(tmp_path / "run"))
    samples = lines_of(tmp_path / "run" / "samples.jsonl")
    kept = {"role": "tool", "name": "keep", "content": "kept"}
    called = [each["reward"] for each in samples if kept in each["messages"]]
    assert called and {*called} == {1.0}
