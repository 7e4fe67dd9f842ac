"""What all protocols have in common: a request that was read, its answer, and the interface of a
protocol."""

import contextlib
import json
import secrets
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from concurrent.futures import Future, InvalidStateError
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Literal, NamedTuple
from weakref import WeakValueDictionary

from easyrl.data.chat import has_picture, read_messages
from easyrl.data.pictures import PictureError, open_picture, read_data_address
from easyrl.types import DIGEST, Messages, Picture, is_picture_part, picture_part

MODEL = "policy"
"""Name of the model at the endpoint; requests may have any."""
PIECE_CHARACTERS = 40
"""Characters of a text or of a call's arguments in one event of a stream."""
FinishReason = Literal["stop", "length", "tool_calls"]


class ApiError(Exception):
    """The refusal of a request, with OpenAI's name of the reason and an HTTP status."""

    def __init__(self, message: str, code: str = "invalid_value", status: int = 400) -> None:
        super().__init__(message)
        self.code = code
        self.status = status


def no_episode() -> ApiError:
    return ApiError("expected the key of an episode that has not ended", "invalid_api_key", 401)


class IssuedCall(NamedTuple):
    """A tool call as it was sent to a client."""

    call_id: str
    name: str
    arguments: Any  # usually {name: value}

    def as_chat(self) -> dict[str, Any]:
        """Return it in the form of chat messages."""
        function = {"name": self.name, "arguments": json.dumps(self.arguments)}
        return {"id": self.call_id, "type": "function", "function": function}


class Choice(NamedTuple):
    """One of the answers to a request."""

    text: str  # all but the calls: with what the model thought
    thought: str  # without its marks; "" for none
    visible: str  # the text without the thought
    calls: list[IssuedCall]
    is_cut: bool  # it was cut off at its longest length

    @property
    def finish_reason(self) -> FinishReason:
        if self.calls:
            return "tool_calls"
        return "length" if self.is_cut else "stop"


class Answer(NamedTuple):
    """The answer to a request. A request that only counts its tokens gets no choices."""

    choices: list[Choice]
    num_prompt_tokens: int
    num_sampled_tokens: int


@dataclass(slots=True, eq=False)
class Request:
    """A request that was read, and the answer that its client waits for."""

    key: str  # of its episode
    messages: Messages  # [] in a text completion; a picture is named by its digest
    pictures: Mapping[str, Picture] = field(default_factory=dict)  # by digest
    prompt: str = ""  # of a text completion
    tools: list[dict[str, Any]] = field(default_factory=list)
    """Descriptions of functions, as chat templates take them."""
    reads_calls: bool = True  # not where the client wants no calls
    num_choices: int = 1
    max_tokens: int | None = None  # of each choice
    output_form: str = ""
    """Sentence that asks for an answer of a certain form, as for JSON of a schema. "": any form."""
    counts_only: bool = False  # nothing is sampled
    notes: set[str] = field(default_factory=set)
    """What the run's log has to say of the request's fields."""
    answer: Future[Answer] = field(default_factory=Future)
    caller: str = ""  # the key that its client sent

    def __post_init__(self) -> None:
        self.caller = self.key

    def reply(self, answer: Answer | ApiError) -> None:
        with contextlib.suppress(InvalidStateError):  # the client is gone
            if isinstance(answer, ApiError):
                self.answer.set_exception(answer)
            else:
                self.answer.set_result(answer)


class Protocol(ABC):
    """Reads the requests of one path, and writes their answers."""

    @abstractmethod
    def read(self, key: str, body: Mapping[str, Any]) -> Request:
        """Read a request of the episode with this key. Raises ApiError or ValueError, which names
        the field."""

    @abstractmethod
    def write(self, request: Request, body: Mapping[str, Any], answer: Answer) -> dict[str, Any]:
        """Return the answer to a request."""

    @abstractmethod
    def stream(self, request: Request, body: Mapping[str, Any], answer: Answer) -> Iterator[str]:
        """Yield the answer as server-sent events."""

    def forget(self, key: str) -> None:  # noqa: B027  most protocols keep nothing
        """Drop what was kept of an episode."""

    def refusal(self, error: Exception, status: int) -> dict[str, Any]:
        """Return a refusal, in OpenAI's form."""
        message = str(error)
        name = message.partition(":")[0]  # errors begin with the field that they are about
        content = {
            "message": message or type(error).__name__,
            "type": "invalid_request_error" if status < 500 else "server_error",
            "param": name if name.isidentifier() else None,
            "code": getattr(error, "code", None),
        }
        return {"error": content}


def new_id(prefix: str) -> str:
    return f"{prefix}_{secrets.token_hex(12)}"


def model_of(body: Mapping[str, Any]) -> str:
    """Return the name of the model that a request asks for."""
    return str(body.get("model") or MODEL)


def pieces(text: str) -> list[str]:
    """Cut a text into the pieces of a stream."""
    starts = range(0, len(text), PIECE_CHARACTERS)
    return [text[start : start + PIECE_CHARACTERS] for start in starts]


def event(data: Mapping[str, Any], name: str = "") -> str:
    """Return a server-sent event."""
    line = f"data: {json.dumps(data)}\n\n"
    return f"event: {name}\n{line}" if name else line


# -- what is read ----------------------------------------------------------------------------------


def check_count(name: str, value: Any, most: float = float("inf")) -> None:
    """Raise ValueError unless a field is a whole number from 1 to `most`."""
    if type(value) is not int or not 1 <= value <= most:
        upper = "" if most == float("inf") else f" to {most}"
        raise ValueError(f"{name}: expected a whole number from 1{upper}, got {value!r:.80}")


def check_mapping(name: str, value: Any) -> dict[str, Any]:
    """Return a field that is a JSON object; {} for null. Raises ValueError for others."""
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise ValueError(f"{name}: expected a JSON object, got {value!r:.80}")
    return value


def check_list(name: str, value: Any) -> list[Any]:
    """Return a field that is a list; [] for null. Raises ValueError for others."""
    if value is None:
        return []
    if not isinstance(value, list):
        raise ValueError(f"{name}: expected a list, got {value!r:.80}")
    return value


def function_tool(field_name: str, function: Mapping[str, Any]) -> dict[str, Any]:
    """Return the description of a tool as chat templates take it. Raises ValueError."""
    described = {"description": "", "parameters": {}} | dict(function)
    described.pop("strict", None)  # it asks for constrained answers
    name = described.get("name")
    if not isinstance(name, str) or not name:
        raise ValueError(f"{field_name}: expected functions with names, got {function!r:.80}")
    if described["parameters"] is None:
        described["parameters"] = {}
    check_schema(f"{field_name}: {name}", described["parameters"])
    return {"type": "function", "function": described}


def check_schema(name: str, schema: Any) -> None:
    """Raise ValueError for what cannot be a JSON schema."""
    if isinstance(schema, bool):
        return
    if not isinstance(schema, dict):
        raise ValueError(f"{name}: expected a JSON schema, got {schema!r:.80}")
    kind = schema.get("type")
    kinds = kind if isinstance(kind, list) else [kind]
    for each in kinds:
        if each is not None and each not in JSON_TYPES:
            raise ValueError(
                f"{name}: expected a type of {', '.join(JSON_TYPES)}, got {each!r:.80}"
            )
    check_list(f"{name}: enum", schema.get("enum"))
    for required in check_list(f"{name}: required", schema.get("required")):
        if not isinstance(required, str):
            raise ValueError(f"{name}: required: expected names, got {required!r:.80}")
    for part, inner in _parts_of_schema(name, schema):
        check_schema(f"{name}: {part}", inner)


def _parts_of_schema(name: str, schema: dict[str, Any]) -> list[tuple[str, Any]]:
    """Return the schemas in a schema, by their places. Raises ValueError."""
    parts: list[tuple[str, Any]] = []
    for part in ("properties", "$defs", "definitions"):
        named = check_mapping(f"{name}: {part}", schema.get(part))
        for key, inner in named.items():
            parts.append((f"{part}.{key}", inner))
    for part in ("anyOf", "oneOf", "allOf", "prefixItems"):
        for inner in check_list(f"{name}: {part}", schema.get(part)):
            parts.append((part, inner))
    for part in ("items", "additionalProperties"):
        given = schema.get(part)
        inner_schemas = given if isinstance(given, list) else [given]
        for inner in inner_schemas:
            if inner is not None:
                parts.append((part, inner))
    return parts


JSON_TYPES = ("array", "boolean", "integer", "null", "number", "object", "string")


def _check_calls(name: str, message: dict[str, Any]) -> None:
    """Raise ValueError for calls of another form than OpenAI's, and for ids that are no texts."""
    place = f"{name}: tool_calls"
    for call in check_list(place, message.get("tool_calls")):
        function = check_mapping(place, call).get("function")
        called = check_mapping(f"{place}: function", function).get("name")
        if not isinstance(called, str):
            raise ValueError(f"{place}: expected functions with names, got {call!r:.80}")
        _check_id(f"{place}: id", call.get("id"))
    _check_id(f"{name}: tool_call_id", message.get("tool_call_id"))


def _check_id(name: str, given: Any) -> None:
    if given is not None and not isinstance(given, str):
        raise ValueError(f"{name}: expected a text, got {given!r:.80}")


class PictureReader:
    """Reads pictures of requests. Clients send all that a conversation has shown again in every
    turn: one that a request or an episode still holds is neither opened nor stored again."""

    def __init__(self) -> None:
        self._held: WeakValueDictionary[str, Picture] = WeakValueDictionary()  # by digest

    def read(self, address: Any) -> Picture:
        """Return the picture of a `data:` address, which can be opened. Raises PictureError. Files
        and addresses on the web are not opened for an agent."""
        if not isinstance(address, str) or not address.startswith("data:"):
            raise PictureError(
                "expected a picture as data:image/png;base64,… in the request, because none is "
                f"downloaded, got {address!r:.80}"
            )
        picture = read_data_address(address)
        digest = picture.digest
        held = self._held.get(digest)
        if held is not None:
            return held
        open_picture(picture)
        self._held[digest] = picture
        return picture


class Conversation(NamedTuple):
    """Messages of a request, and the pictures that they show."""

    messages: Messages
    pictures: Mapping[str, Picture]  # by digest


def read_conversation(
    given: Any,
    field_name: str = "messages",
    *,
    reader: PictureReader | None = None,
    known: Mapping[str, Picture] = MappingProxyType({}),
) -> Conversation:
    """Read chat messages. `reader`: of their pictures, which are `data:` addresses or, of an
    earlier request, digests (`known`); None: they may show none. Raises ValueError for others, if
    the last one is an answer, and for a tool's result whose call is in no message before it."""
    takes_pictures = reader is not None
    prepared: list[Any] = []
    for number, message in enumerate(check_list(field_name, given)):
        if isinstance(message, dict):
            name = f"{field_name}: message {number}"
            _check_calls(name, message)
            _check_pictures(name, message, takes_pictures=takes_pictures)
        is_empty_answer = (
            isinstance(message, dict)
            and message.get("role") == "assistant"
            and message.get("content") is None
        )
        prepared.append({**message, "content": ""} if is_empty_answer else message)
    messages = read_messages(prepared, field_name, takes_pictures=takes_pictures)
    pictures: dict[str, Picture] = {}
    for number, message in enumerate(messages):
        if has_picture(message["content"]):
            assert reader is not None, "pictures were refused"
            name = f"{field_name}: message {number}"
            message["content"] = _name_pictures(name, message["content"], reader, known, pictures)
    names: dict[Any, str] = {}  # of functions, by the ids of their calls
    waiting: list[str] = []  # names of the newest calls that have no result yet
    for number, message in enumerate(messages):
        if message["role"] == "developer":
            message["role"] = "system"
        calls = message.get("tool_calls", ())
        if calls:
            waiting = [call["function"]["name"] for call in calls]
            names |= {call.get("id"): call["function"]["name"] for call in calls}
        if message["role"] != "tool":
            continue
        call_id = message.get("tool_call_id")
        function = names.get(call_id)
        if function is None and waiting and (call_id is None or None in names):  # ids were left out
            function = waiting[0]
        if function is None:
            raise ValueError(
                f"{field_name}: message {number}: expected the call of this tool's result in an "
                f"earlier message, got a result of {call_id!r:.80}"
            )
        if function in waiting:
            waiting.remove(function)
        message.setdefault("name", function)
    last_role = messages[-1]["role"]
    if last_role not in ("user", "tool", "system"):
        raise ValueError(
            f"{field_name}: expected one of a user, a tool or the system at the end, got one of "
            f"{last_role!r:.80}"
        )
    return Conversation(messages, pictures)


def _check_pictures(name: str, message: dict[str, Any], *, takes_pictures: bool) -> None:
    """Raise ValueError for pictures where none may be."""
    content = message.get("content")
    if not has_picture(content):
        return
    if not takes_pictures:
        raise ValueError(
            f"{name}: expected text, because requests may show pictures only in a run with "
            f"rollout.takes_pictures=true, got {content!r:.80}"
        )
    if message.get("role") == "assistant":
        raise ValueError(f"{name}: expected no picture in an answer, got {content!r:.80}")


def _name_pictures(
    name: str,
    content: Any,
    reader: PictureReader,
    known: Mapping[str, Picture],
    pictures: dict[str, Picture],
) -> list[dict[str, Any]]:
    """Return the parts of a content with digests in the places of pictures, which are added to
    `pictures`. Raises ValueError for a part that has no picture."""
    parts: list[dict[str, Any]] = []
    for part in content:
        if not is_picture_part(part):
            parts.append(part)
            continue
        digest = part.get(DIGEST)
        try:
            if isinstance(digest, str) and digest in known:
                picture = known[digest]
            else:
                picture = reader.read(part.get("url"))
        except PictureError as error:
            raise ValueError(f"{name}: {error}") from None
        pictures[picture.digest] = picture
        parts.append(picture_part(picture))
    return parts
