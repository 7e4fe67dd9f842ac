"""Which requests of agents continue the tokens of earlier answers."""

import json
from contextlib import closing

import pytest

from agent_worker import HELLO, KEY, TOOL, Worker, asked, chat, num_branches, played, said
from easyrl.agents.conversation_tree import ConversationTree, Node
from easyrl.agents.matching import Likeness, Recorded, compare, split_thought
from easyrl.agents.protocols.base import IssuedCall
from easyrl.environments.tool_calls.format import USUAL_THINKING
from tool_models import TEMPLATE, call, chat_model

CALL = IssuedCall("call00000", "add", {"a": 2, "b": 3})
SCHEMAS = {"add": {"properties": {"round": {"type": "boolean", "default": False}, "base": True}}}
WITH_CALL = Recorded("Let me add.", 'Let me add.<tool_call>{"name": "add", …', [CALL], SCHEMAS)
THOUGHT = Recorded("<think>\nTwo and three.\n</think>\n\nIt is 5.", "", [])
AS_TEXT = {"name": "run", "arguments": {"code": "a = 1\nprint('é')", "on": True}}
LINES = Recorded("", "", [IssuedCall("call00001", AS_TEXT["name"], AS_TEXT["arguments"])])
CODE = Recorded("<code>\nprint(5)\n", "<code>\nprint(5)\n</code>", [])


def sent_calls(*calls):
    form = []
    for call_id, arguments in calls:
        form.append({"id": call_id, "function": {"name": "add", "arguments": arguments}})
    return form


def resent(answer, content, **more):
    message = {"role": "assistant", "content": content, **more}
    return compare(message, answer, USUAL_THINKING)


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (Recorded("  It is 5. \n", "", []), {"content": "It is  5."}),
        (Recorded("", "", []), {"content": "[blank text]"}),
        (Recorded(" ", "", []), {"content": ""}),
        (Recorded("(empty)", "", []), {"content": "(empty)"}),
        (LINES, {"content": f"Calling tools:\n{[AS_TEXT]}"}),
        (LINES, {"content": f"Calling tools:\n{json.dumps([AS_TEXT])}"}),
        (THOUGHT, {"content": "It is 5."}),
        (THOUGHT, {"content": "It is 5.", "reasoning_content": "Two and three."}),
        (THOUGHT, {"content": "<think>Two and</think>It is 5."}),
        (
            Recorded("<think>a</think><think>b</think>It is 5.", "", []),
            {"content": "<think>b</think>It is 5.", "reasoning_content": "a"},
        ),
        (CODE, {"content": "<code>\nprint(5)\n</code>"}),
        (WITH_CALL, {"content": "", "tool_calls": sent_calls(("x", {"b": 3.0, "a": 2}))}),
        (WITH_CALL, {"content": "", "tool_calls": sent_calls(("", '{"a": 2, "b": 3}'))}),
        (
            WITH_CALL,
            {"content": "…", "tool_calls": sent_calls(("fc_call00000", {"a": 2, "b": 3}))},
        ),
        (
            WITH_CALL,
            {
                "content": "Let me add.",
                "tool_calls": sent_calls(("x", {"a": 2, "b": 3, "round": False, "base": None})),
            },
        ),
        (
            WITH_CALL,
            {
                "content": "Let me add.\nCalling tools:\n[{'id': 'call00000', 'function': "
                "{'name': 'add', 'arguments': {'a': 2, 'b': 3}}}]"
            },
        ),
    ],
)
def test_an_answer_is_recognized_whatever_a_library_did_to_it(answer, message):
    found = compare(message, answer, USUAL_THINKING)
    assert found.difference is None and found.added == ""


def test_text_that_a_client_has_added_is_found():
    found = resent(Recorded("x = 5", "x = 5", []), "x = 5</code>")
    assert found == (None, Likeness.EXTENDED, "</code>")


@pytest.mark.parametrize(
    ("answer", "message", "difference"),
    [
        (Recorded("It is 5.", "", []), {"content": "It is 6."}, "text"),
        (Recorded("", "", []), {"content": "It is 5."}, "text"),
        (THOUGHT, {"content": "It is 5.", "reasoning_content": "A guess."}, "thinking"),
        (THOUGHT, {"content": "It is 6."}, "text"),
        (WITH_CALL, {"content": "Let me add."}, "calls"),
        (WITH_CALL, {"content": "Let me add. I can add 2 and 3."}, "calls"),
        (
            WITH_CALL,
            {"content": "Let me add. [{'name': 'add', 'arguments': {'a': 3, 'b': 2}}]"},
            "calls",
        ),
        (WITH_CALL, {"content": "", "tool_calls": sent_calls(("x", {"a": 2, "b": 4}))}, "calls"),
        (WITH_CALL, {"content": "", "tool_calls": sent_calls(("x", {"a": 2, "b": True}))}, "calls"),
        (
            WITH_CALL,
            {"content": "", "tool_calls": sent_calls(("x", {"a": 2, "b": 3, "round": True}))},
            "calls",
        ),
        (
            Recorded("", "", [CALL, CALL]),
            {"content": "", "tool_calls": sent_calls(("x", {"a": 2, "b": 3}))},
            "calls",
        ),
    ],
)
def test_what_a_client_has_changed_is_named(answer, message, difference):
    assert compare(message, answer, USUAL_THINKING).difference == difference


def test_the_answer_that_is_most_alike_is_continued():
    tree = ConversationTree()
    question = {"role": "user", "content": "2+3"}
    asked_node = tree.place([question], USUAL_THINKING)
    thought = [Recorded(f"<think>{word}</think>", "", [CALL]) for word in "xy"]
    thought[1] = thought[1]._replace(calls=[CALL._replace(call_id="call00001")])
    texts = [Recorded("42", "42", []), Recorded("4", "4", [])]
    for answer in (*texts, *thought):
        asked_node.add(Node("assistant", answer=answer))
    for answer in (*texts, *thought):
        calls = [call.as_chat() for call in answer.calls]
        message = {"role": "assistant", "content": answer.text, "tool_calls": calls}
        assert tree.place([question, message], USUAL_THINKING).answer is answer


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("<think>a</think>b", ("a", "b")),
        ("a</think>b", ("a", "b")),  # the prompt has begun the thought
        ("<think>a", ("a", "")),
        ("What is <think>?", ("", "What is <think>?")),
        ("b", ("", "b")),
    ],
)
def test_thoughts_are_split_from_what_an_answer_says(text, expected):
    assert split_thought(text, USUAL_THINKING) == expected


# -- in the engine ---------------------------------------------------------------------------------

CALLS = [call("add", '{"a": 2, "b": 3}'), "<think>", "</think>"]


def trimmed(message, _):
    return message | {"content": (message["content"] or "").strip() or "[blank text]"}


def without_ids(message, _):
    calls = [{"function": each["function"], "type": "function"} for each in message["tool_calls"]]
    return {"role": "assistant", "content": None, "tool_calls": calls}


def padded_ids(message, number):
    calls = []
    for each in message["tool_calls"]:
        arguments = json.loads(each["function"]["arguments"])
        function = {"name": "add", "arguments": json.dumps(arguments, indent=2)}
        calls.append({"id": f"{number}_{each['id']}", "type": "function", "function": function})
    return message | {"tool_calls": calls}


def conversation(client, change, num_turns, **options):
    """Continue a conversation, with each answer as a library would send it again. Return the
    number of requests with earlier answers."""
    messages = [asked("2+3")]
    for number in range(num_turns):
        answer = client.chat.completions.create(
            model="m", messages=messages, max_tokens=30, **options
        )
        message = answer.choices[0].message.model_dump(exclude_none=True)
        message.setdefault("content", None)
        calls = message.get("tool_calls", ())
        messages.append(change(message, number))
        for each, sent in zip(calls, messages[-1].get("tool_calls", calls), strict=True):
            result = {"role": "tool", "content": "5"}
            if "id" in sent:
                result["tool_call_id"] = sent["id"]
            assert each["function"]["name"] == "add"
            messages.append(result)
        messages.append(asked("more"))
    return num_turns - 1


@pytest.mark.parametrize("change", [trimmed, without_ids, padded_ids])
def test_turns_continue_whatever_a_library_did_to_the_answers(change, tmp_path):
    model = chat_model(tmp_path / "model", CALLS)

    def solve(client):
        def changed(message, number):
            has_calls = "tool_calls" in message
            return change(message, number) if has_calls or change is trimmed else message

        return float(conversation(client, changed, 8, tools=[TOOL]))

    found = played(solve, model=model, num=4, length=500)
    assert found[KEY][3].errors == []
    assert all(num_branches(each) == 1 for each in found[KEY][1])
    assert "branch_reasons" not in found[KEY][5]


def test_added_text_is_inserted_and_the_rest_keeps_its_tokens(tmp_path):
    """As smolagents' code agent does."""
    model = chat_model(tmp_path / "model")

    def solve(client):
        def changed(message, _):
            return message | {"content": f"{message['content']}</code>"}

        return float(conversation(client, changed, 6))

    found = played(solve, model=model, num=2, length=500)
    assert found[KEY][3].errors == []
    assert "branch_reasons" not in found[KEY][5]


def test_a_turn_without_tools_continues_one_that_has_them(tmp_path):
    model = chat_model(tmp_path / "model", CALLS)

    def solve(client):
        messages = [asked("2+3")]
        for options in ({"tools": [TOOL]}, {}, {"tools": [TOOL]}):
            answer = client.chat.completions.create(
                model="m", messages=messages, max_tokens=30, tool_choice="none", **options
            )
            messages += [said(answer.choices[0].message.content), asked("more")]

    found = played(solve, "reward.functions=[length_penalty]", model=model, num=2, length=200)
    assert all(num_branches(each) == 1 for each in found[KEY][1])


HIDES_THOUGHTS = (
    "{% for message in messages %}{% if message['role'] == 'assistant' %}"
    "A{{ message['content'].split('3')[-1] }}<eos>\n"
    "{% else %}U{{ message['content'] }}\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}A{% endif %}"
)
"""Shows only what is behind the last 3 of an earlier answer."""


@pytest.mark.parametrize("history", ["kept", "as_sent"])
def test_a_template_that_hides_thoughts_is_followed_where_the_run_wants_it(history, tmp_path):
    model = chat_model(tmp_path / "model", template=HIDES_THOUGHTS)

    def solve(client):
        return float(conversation(client, lambda message, _: message, 6))

    found = played(solve, f"rollout.agent_history={history}", model=model, num=2, length=900)
    _, completions, _, scored, metrics, columns = found[KEY]
    assert scored.errors == []
    name = "episodes/branches/shown_otherwise"
    if history == "kept":
        assert all(num_branches(each) == 1 for each in completions)
        assert metrics[name] == 0 and "branch_reasons" not in columns
    else:
        assert metrics[name] > 0
        assert {"shown_otherwise"} == {name for each in columns["branch_reasons"] for name in each}


def test_each_kind_of_branch_is_counted_and_reported_once(tmp_path):
    other_tool = {"type": "function", "function": {"name": "sub", "parameters": {}}}
    model = chat_model(tmp_path / "model", CALLS)

    def solve(client):
        def ask(*messages, **options):
            answer = client.chat.completions.create(
                model="m", messages=messages, max_tokens=9, **options
            )
            return answer.choices[0].message.content or ""

        more = asked("more")
        first = ask(asked("1+1"), said("2"), more)  # an example, which is no branch
        first = ask(asked("2+3"))
        ask(asked("2+3"), said(f"x{first}x"), more)
        ask(asked("4+4"), said(first), more)
        ask(asked("2+3"), said(first), more, tools=[other_tool])
        second = ask(asked("2+3"), said(first), more)
        ask(asked("2+3"), said(first), more, said(second), more)
        ask(asked("7"), said("never said"), more)

    found = played(solve, "reward.functions=[length_penalty]", model=model, num=1, length=900)
    _, _, _, _, metrics, columns = found[KEY]
    expected = {"text": 1, "messages": 1, "tools": 1, "not_sampled": 1}
    assert columns["branch_reasons"] == [expected]
    for reason, number in expected.items():
        assert metrics[f"episodes/branches/{reason}"] == number


STRICT_TEMPLATE = (
    "{% for message in messages %}{% if message.role == 'system' and not loop.first %}"
    "{{ raise_exception('System message must be at the beginning.') }}{% endif %}{% endfor %}"
)


@pytest.mark.parametrize("refuses", [True, False])
def test_a_later_system_message_is_the_users_where_the_template_takes_none(tmp_path, refuses):
    template = TEMPLATE.replace("{% else %}U", "{% else %}{{ message['role'][0] }}")
    if refuses:
        template = STRICT_TEMPLATE + template
    model = chat_model(tmp_path / "model", CALLS, template)
    contexts = []

    def solve(client):
        messages = [
            {"role": "system", "content": "4"},
            asked("2"),
            {"role": "system", "content": "7"},
        ]
        for _ in range(2):
            messages.append(said(chat(client, messages, max_tokens=4)))
            messages.append({"role": "system", "content": "8"})
        return 1.0

    with closing(Worker(model, length=300, prompt_length=100)) as worker:
        found = worker.run(solve)
        worker.check(found)
        for known, _ in worker.engine_log.sampled:
            contexts.append(worker.tokenizer.decode(known))
    role = "u" if refuses else "s"
    assert contexts[0].endswith(f"s4u2{role}7A") and contexts[-1].endswith(f"{role}8A")
    assert num_branches(found[KEY][1][0]) == 1


@pytest.mark.parametrize("history", ["kept", "as_sent"])
def test_a_form_of_answers_is_shown_when_it_changes_and_constrains_nothing(history, tmp_path):
    numbers = []

    def schema(name):
        properties = {"properties": {name: {"type": "integer"}}}
        return {"type": "json_schema", "json_schema": {"name": name, "schema": properties}}

    def solve(client):
        messages = list(HELLO)
        for name in ("sum", "sum", "difference", "sum"):
            answer = client.chat.completions.create(
                model="m", messages=messages, max_tokens=5, response_format=schema(name)
            )
            numbers.append(answer.usage.prompt_tokens)
            messages += [said(answer.choices[0].message.content), asked("more")]

    model = chat_model(tmp_path / "model")
    words = "reward.functions=[length_penalty]", f"rollout.agent_history={history}"
    found = played(solve, *words, model=model, num=1, length=900, prompt_length=200)
    first, second, third, fourth = numbers
    assert second - first < 30 < third - second and fourth - third > 30  # without, with the schema
    if history == "kept":
        assert "branch_reasons" not in found[KEY][5]
        assert all(num_branches(each) == 1 for each in found[KEY][1])
