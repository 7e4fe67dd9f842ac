"""The protocols in which agents ask: official clients, streams, and requests that are refused."""

import http.client
import json
import socket
import time

import anthropic
import httpx
import openai
import pytest

from agent_worker import HELLO, KEY, TOOL, asked, num_branches, played, said
from easyrl.agents.protocols.base import Answer, ApiError, Choice, pieces
from easyrl.agents.protocols.fields import FieldRules
from easyrl.agents.protocols.responses import Responses
from easyrl.config import load_config
from easyrl.config.rollout import SamplingChoice
from easyrl.runtime.resolve import resolve
from tool_models import call, chat_model

CALLS = [call("add", '{"a": 2, "b": 3}')]
FLAT_TOOL = {"type": "function", "name": "add", "parameters": {"type": "object"}}
ANTHROPIC_TOOL = {"name": "add", "input_schema": {"type": "object"}}


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return chat_model(tmp_path_factory.mktemp("model"), CALLS)


def succeeds(solve, model, *words, **how):
    found = played(solve, *words, model=model, length=how.pop("length", 700), **how)
    assert found[KEY][3].errors == []
    return found[KEY]


def test_responses_continue_by_items_and_by_the_id_of_a_stored_one(model):
    def solve(client, row):
        items = [asked("2+3")]
        for _ in range(4):
            answer = client.responses.create(
                model="m", input=items, instructions="Add.", tools=[FLAT_TOOL], max_output_tokens=30
            )
            assert answer.status in ("completed", "incomplete")
            items += [item.model_dump(exclude_none=True) for item in answer.output]
            for each in answer.output:
                if each.type == "function_call":
                    assert json.loads(each.arguments) == {"a": 2, "b": 3}
                    result = {"type": "function_call_output", "output": "5"}
                    items.append(result | {"call_id": each.call_id})
            items.append(asked("more"))
        previous = None
        for _ in range(3):
            answer = client.responses.create(
                model="m",
                input="4+4",
                max_output_tokens=20,
                **({"previous_response_id": previous} if previous else {}),
            )
            assert answer.usage.total_tokens == answer.usage.input_tokens + (
                answer.usage.output_tokens
            )
            previous = answer.id
        items = [asked("5+5")]  # as the AI SDK sends what is stored
        for _ in range(3):
            answer = client.responses.create(model="m", input=items, max_output_tokens=20)
            items += [{"type": "item_reference", "id": item.id} for item in answer.output]
            for each in answer.output:
                if each.type == "function_call":
                    result = {"type": "function_call_output", "output": "5"}
                    items.append(result | {"call_id": each.call_id})
            items.append(asked("more"))
        with pytest.raises(openai.NotFoundError):
            client.responses.create(model="m", input=[{"type": "item_reference", "id": "msg_x"}])
        with pytest.raises(openai.NotFoundError) as caught:
            client.responses.create(model="m", input="x", previous_response_id="resp_other")
        assert caught.value.param == "previous_response_id"
        return 1.0

    _, completions, _, _, _, columns = succeeds(solve, model, num=2)
    assert "branch_reasons" not in columns
    assert all(num_branches(each) == 3 for each in completions)  # one for each conversation


def test_a_response_of_another_episode_is_unknown():
    spec = resolve(load_config(None, {"rollout.agent": "own.py:solve"})).episodes
    protocol = Responses(FieldRules(spec, SamplingChoice(1, 9, 1.0)))
    answer = Answer([Choice("y", "", "y", [], is_cut=False)], 1, 1)
    written = protocol.write(protocol.read("one", {"input": "x"}), {}, answer)
    more = {"input": "z", "previous_response_id": written["id"]}
    reference = {"input": [{"type": "item_reference", "id": written["output"][0]["id"]}]}
    assert len(protocol.read("one", more).messages) == 3
    for body in (more, reference):
        with pytest.raises(ApiError) as caught:
            protocol.read("other", body)
        assert caught.value.status == 404
    protocol.forget("one")
    with pytest.raises(ApiError):
        protocol.read("one", more)


def test_messages_continue_by_blocks_and_count_their_tokens(model):
    def solve(row, base_url, api_key):
        client = anthropic.Anthropic(base_url=base_url.removesuffix("/v1"), api_key=api_key)
        messages = [asked("2+3")]
        for _ in range(5):
            options = {"model": "m", "messages": messages, "tools": [ANTHROPIC_TOOL]}
            counted = client.messages.count_tokens(system="Add.", **options)
            answer = client.messages.create(system="Add.", max_tokens=30, **options)
            assert counted.input_tokens == answer.usage.input_tokens
            blocks = [block.model_dump(exclude_none=True) for block in answer.content]
            messages.append({"role": "assistant", "content": blocks})
            results = []
            for block in answer.content:
                if block.type == "tool_use":
                    assert answer.stop_reason == "tool_use" and block.input == {"a": 2, "b": 3}
                    result = {"type": "tool_result", "tool_use_id": block.id, "content": "5"}
                    results.append(result)
            messages.append({"role": "user", "content": [*results, {"type": "text", "text": "x"}]})
        with pytest.raises(anthropic.AuthenticationError):
            client.with_options(api_key="other").messages.create(
                model="m", max_tokens=2, messages=HELLO
            )
        with pytest.raises(anthropic.BadRequestError, match="temperature"):
            client.messages.create(
                model="m", max_tokens=2, messages=HELLO, extra_body={"temperature": 0.3}
            )
        return 1.0

    _, completions, _, _, metrics, columns = succeeds(solve, model, num=2)
    assert "branch_reasons" not in columns and metrics["episodes/turns"] == 5
    assert all(num_branches(each) == 1 for each in completions)


def test_a_thought_is_a_block_where_the_client_wants_one(tmp_path):
    thinking = chat_model(tmp_path / "model", ["<think>ab</think>c"])
    with_thoughts = []

    def solve(row, base_url, api_key):
        client = anthropic.Anthropic(base_url=base_url, api_key=api_key)
        for _ in range(60):
            options = {"model": "m", "max_tokens": 1, "messages": HELLO}
            answer = client.messages.create(
                thinking={"type": "enabled", "budget_tokens": 1024}, **options
            )
            if answer.content[0].type == "thinking":
                assert answer.content[0].thinking == "ab" and answer.content[1].text == "c"
                with_thoughts.append(answer)
            plain = client.messages.create(**options)
            assert [block.type for block in plain.content] == ["text"]
        return 1.0

    succeeds(solve, thinking, "rollout.max_turns=200", num=4)
    assert with_thoughts


def test_streams_have_the_events_of_their_protocols(model):
    """Each client puts its stream together: the calls have their arguments, and the usage comes
    once."""
    found_calls = []

    def solve(client, base_url, api_key):
        options = {"stream": True, "stream_options": {"include_usage": True}, "tools": [TOOL]}
        options |= {"model": "m", "messages": HELLO, "max_tokens": 30}
        chunks = list(client.chat.completions.create(**options))
        assert [chunk.usage is not None for chunk in chunks] == [False] * (len(chunks) - 1) + [True]
        assert chunks[0].choices[0].delta.role == "assistant"
        reasons = [chunk.choices[0].finish_reason for chunk in chunks[:-1]]
        assert reasons[-1] in ("stop", "length", "tool_calls") and not any(reasons[:-1])
        arguments = {}
        for chunk in chunks[:-1]:
            for each in chunk.choices[0].delta.tool_calls or ():
                assert len(chunk.choices[0].delta.tool_calls) == 1
                arguments[each.index] = arguments.get(each.index, "") + each.function.arguments
        found_calls.extend(map(json.loads, arguments.values()))
        events = list(
            client.responses.create(
                model="m", input="2+3", tools=[FLAT_TOOL], max_output_tokens=30, stream=True
            )
        )
        final = events[-1].response
        assert [event.sequence_number for event in events] == list(range(len(events)))
        text = "".join(event.delta for event in events if event.type.endswith("text.delta"))
        assert text == final.output_text
        found_calls.extend(
            json.loads(each.arguments) for each in final.output if each.type == "function_call"
        )
        own = anthropic.Anthropic(base_url=base_url, api_key=api_key)
        with own.messages.stream(
            model="m", messages=HELLO, tools=[ANTHROPIC_TOOL], max_tokens=30
        ) as stream:
            text = "".join(stream.text_stream)
            message = stream.get_final_message()
        assert text == "".join(block.text for block in message.content if block.type == "text")
        assert message.usage.output_tokens > 0 and message.stop_reason
        found_calls.extend(block.input for block in message.content if block.type == "tool_use")
        return 1.0

    succeeds(solve, model, num=16, length=400)
    assert found_calls and all(each == {"a": 2, "b": 3} for each in found_calls)


def test_what_is_not_constrained_or_unknown_is_reported_once_and_nothing_is_refused(model):
    from contextlib import closing

    from agent_worker import Worker

    named = {"type": "function", "function": {"name": "add"}}

    def solve(client):
        for choice in ("required", named):
            client.chat.completions.create(
                model="m",
                messages=HELLO,
                tools=[TOOL],
                tool_choice=choice,
                response_format={"type": "json_object"},
                max_tokens=5,
                user="u",
                store=True,
                extra_body={"chat_option": 3, "thinking": False},
            )
        assert client.models.retrieve("gpt-9").id == "gpt-9"
        return 1.0

    with closing(Worker(model, num=2, length=300)) as worker:
        found = worker.run(solve)
        notes = sorted(worker.pool.notes)
    assert found[KEY][3].errors == []
    assert [note.partition(":")[0] for note in notes[:1]] == ["response_format"]
    assert len(notes) == 4 and "chat_option" in notes[1] and "thinking" in notes[2]


def post(url, key, path, body, headers=()):
    return httpx.post(
        f"{url}{path}",
        content=body,
        headers={"Authorization": f"Bearer {key}", **dict(headers)},
        timeout=30,
    )


DEEP = "[" * 5000 + "]" * 5000
MANY = "[" * 100_000 + "]" * 100_000
BAD = [
    ("/chat/completions", "[]", "object"),
    ("/chat/completions", "{", ""),
    ("/chat/completions", f'{{"messages": {MANY}}}', "nested"),
    ("/chat/completions", {"messages": HELLO, "stream_options": 5}, "stream_options"),
    ("/chat/completions", {"messages": HELLO, "tools": 5}, "tools"),
    (
        "/chat/completions",
        {"messages": HELLO, "tools": [{"function": {"name": "f", "parameters": {"type": "list"}}}]},
        "list",
    ),
    ("/chat/completions", {"messages": HELLO, "response_format": {"type": "x"}}, "response_format"),
    (
        "/chat/completions",
        {"messages": HELLO, "response_format": {"type": "json_schema", "json_schema": {}}},
        "response_format",
    ),
    (
        "/chat/completions",
        {"messages": [*HELLO, said("x"), {"role": "tool", "tool_call_id": "c", "content": "5"}]},
        "result",
    ),
    (
        "/chat/completions",
        {"messages": [*HELLO, {"role": "assistant", "tool_calls": [{}]}, asked("x")]},
        "tool_calls",
    ),
    (
        "/chat/completions",
        {
            "messages": [
                *HELLO,
                {
                    "role": "assistant",
                    "tool_calls": [{"id": "a", "function": {"name": "f", "arguments": DEEP}}],
                },
                asked("x"),
            ]
        },
        "nested",
    ),
    (
        "/chat/completions",
        {
            "messages": HELLO,
            "tools": [{"function": {"name": "f", "parameters": {"required": True}}}],
        },
        "required",
    ),
    ("/chat/completions", {"messages": HELLO, "stream": "false"}, "stream"),
    ("/responses", '{"input": "x", "metadata": {"a": NaN}}', "NaN"),
    ("/responses", '{"input": "x", "model": "\\ud800"}', "UTF-8"),
    ("/responses", {"input": HELLO, "tools": [{"type": "web_search"}]}, "web_search"),
    ("/responses", {"input": [{"type": "web_search_call", "id": "x"}]}, "web_search_call"),
    ("/chat/completions", {"messages": HELLO, "chat_template_kwargs": {"x": 1}}, "x"),
    ("/responses", {"input": HELLO, "background": True}, "background"),
    ("/responses", {"input": 5}, "input"),
    ("/messages", {"messages": HELLO}, "max_tokens"),
    (
        "/messages",
        {
            "max_tokens": 5,
            "messages": [
                {"role": "user", "content": [{"type": "image", "source": {"type": "url"}}]}
            ],
        },
        "image",
    ),
    (
        "/messages",
        {
            "max_tokens": 5,
            "messages": [
                *HELLO,
                {"role": "assistant", "content": [{"type": "tool_use", "id": "c", "name": "f"}]},
                {
                    "role": "user",
                    "content": [
                        {
                            "type": "tool_result",
                            "tool_use_id": "c",
                            "content": [{"type": "tool_reference", "tool_name": "g"}],
                        }
                    ],
                },
            ],
        },
        "ENABLE_TOOL_SEARCH=false",
    ),
    ("/messages", {"max_tokens": 5, "messages": [*HELLO, said("{")]}, "end"),
    ("/messages", {"max_tokens": 5, "messages": HELLO, "tool_choice": {"type": "x"}}, "tool"),
]


def test_bad_requests_get_a_sentence_and_stop_nothing(model):
    def solve(row, base_url, api_key):
        for path, body, word in BAD:
            text = body if isinstance(body, str) else json.dumps(body)
            answer = post(base_url, api_key, path, text)
            assert answer.status_code == 400, (path, body)
            error = answer.json()["error"]
            assert word in error["message"] and error["message"]
        return 1.0

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("easyrl.agents.episodes.MAX_REFUSED", 100)
        succeeds(solve, model, num=1)


def test_a_request_that_cannot_fit_is_refused_at_once_and_others_are_served(model):
    def solve(row, base_url, api_key):
        client = openai.OpenAI(base_url=base_url, api_key=api_key, max_retries=0)
        body = json.dumps({"messages": [asked("x" * 20_000_000)]})
        started = time.monotonic()
        answer = post(base_url, api_key, "/chat/completions", body)
        assert answer.status_code == 413 and time.monotonic() - started < 10
        message = answer.json()["error"]["message"]
        assert "data.max_prompt_length" in message and "bytes" in message
        with pytest.raises(openai.BadRequestError) as caught:
            client.chat.completions.create(model="m", messages=[asked("2+3" * 500)])
        assert "data.max_prompt_length" in caught.value.message
        assert "1502" in caught.value.message  # its own length
        client.chat.completions.create(model="m", messages=HELLO, max_tokens=5)
        return 1.0

    succeeds(solve, model, num=1)


def test_other_protocols_paths_and_pages_of_the_web_are_refused(model):
    def solve(row, base_url, api_key):
        for path, word in (("/embeddings", "embeddings"), ("/other", "/other")):
            answer = post(base_url, api_key, path, "{}")
            assert answer.status_code == 404 and word in answer.json()["error"]["message"]
        answer = post(base_url, api_key, "/v1/messages", '{"max_tokens": 0}')
        assert answer.status_code == 400 and answer.json()["type"] == "error"
        for name, value in (
            ("Host", "page.example"),
            ("Origin", "https://page.example"),
            ("Origin", "http://[x"),
        ):
            answer = post(base_url, api_key, "/chat/completions", "{}", [(name, value)])
            assert answer.status_code == 403 and name in answer.json()["error"]["message"]
        return 1.0

    succeeds(solve, model, num=1)


def test_a_stream_that_is_never_read_keeps_nobody_waiting(model):
    def solve(row, base_url, api_key):
        address = base_url.removeprefix("http://").removesuffix("/v1")
        host, _, port = address.partition(":")
        connection = http.client.HTTPConnection(host, int(port))
        body = json.dumps({"messages": HELLO, "stream": True, "max_tokens": 50})
        headers = {"Authorization": f"Bearer {api_key}"}
        connection.request("POST", "/v1/chat/completions", body, headers)
        connection.sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1)
        client = openai.OpenAI(base_url=base_url, api_key=api_key)
        client.chat.completions.create(model="m", messages=[asked("4")], max_tokens=5)
        row["connection"] = connection  # it stays open until the end
        return 1.0

    succeeds(solve, model, num=2)


def test_a_loose_schema_stops_nothing(model):
    """The model calls the tool, whose schema is read only then."""
    loose = {"type": "object", "properties": {"a": {"type": "integer", "enum": None}}}
    loose["properties"]["b"] = {"$ref": "#/nowhere"}
    tool = {"type": "function", "function": {"name": "add", "parameters": loose}}

    def solve(client):
        for _ in range(10):
            client.chat.completions.create(
                model="m", messages=HELLO, tools=[tool], max_tokens=60, n=4
            )
        return 1.0

    succeeds(solve, model, num=1, length=4000)


def test_pieces_are_the_whole_text():
    text = "x" * 101
    assert "".join(pieces(text)) == text and pieces("") == []
