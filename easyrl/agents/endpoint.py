"""An OpenAI-compatible endpoint on loopback. Its server runs in a thread; the answers come from the
thread of the engine.

    client ──HTTP──► server: reads, refuses ──Request──► take() … request.answer.set_result
                       ▲                                              │
                       └────────────────── Answer ────────────────────┘
"""

import asyncio
import contextlib
import json
import os
import socket
import threading
import time
from collections.abc import Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field
from queue import Empty, SimpleQueue
from typing import Any

import uvicorn
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request as HttpRequest
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from easyrl.agents.program import MODEL
from easyrl.config import ConfigError
from easyrl.data.chat import read_messages
from easyrl.devices import LOOPBACK
from easyrl.types import Messages

NEUTRAL: dict[str, tuple[Any, ...]] = {
    "logit_bias": ({},),
    "logprobs": (False, 0),
    "top_logprobs": (0,),
    "response_format": ({"type": "text"},),
    "modalities": (["text"],),
    "echo": (False,),
    "best_of": (1,),
    "suffix": ("",),
}
"""Fields that only have values which change nothing."""
IGNORED = {
    *("model", "user", "metadata", "store", "stream", "stream_options", "parallel_tool_calls"),
    *("service_tier", "prompt_cache_key", "safety_identifier", "messages", "prompt", "tools"),
    *("tool_choice", "n", "max_tokens", "max_completion_tokens"),  # read otherwise
}
SAME = ", as in the run (rollout.agent_sampling=ignore replaces others)"
MAX_CHOICES = 64
NEVER_SECONDS = 10**6  # the server closes no connection of a client that calls its own tools


class ApiError(Exception):
    """A request is refused."""

    def __init__(self, message: str, code: str | None = None, *, status: int = 400) -> None:
        """`code`: in the response, beside the message."""
        super().__init__(message)
        self.code, self.status = code, status


@dataclass(slots=True)
class Choice:
    text: str
    calls: list[dict[str, Any]]  # in OpenAI's form
    finish_reason: str


@dataclass(slots=True)
class Answer:
    choices: list[Choice]
    num_prompt_tokens: int
    num_completion_tokens: int


@dataclass(slots=True, eq=False)
class Request:
    """A request that has been read."""

    key: str  # of its episode
    messages: Messages  # [] in a text completion
    prompt: str | list[int]  # of a text completion
    tools: list[dict[str, Any]]
    reads_calls: bool  # not with tool_choice=none
    num_choices: int
    max_tokens: int | None
    replaced: set[str]  # sampling settings that were ignored
    answer: Future[Answer] = field(default_factory=Future)  # or an ApiError
    digest: bytes = b""  # of its messages
    continued: bytes = b""  # digest of the answered conversation that they continue

    @property
    def is_chat(self) -> bool:
        return bool(self.messages)


class Endpoint:
    """The server. `keys` may call it: add and remove them at any time; None: any."""

    def __init__(
        self, sampling: dict[str, tuple[Any, ...]], *, ignores_sampling: bool, port: int = 0
    ) -> None:
        """`sampling`: the values that settings may have; others are refused, or ignored. `port`: 0:
        a free one. Raises ConfigError if it is taken."""
        self.keys: set[str] | None = set()
        self._sampling, self._ignores = sampling, ignores_sampling
        self._requests: SimpleQueue[Request] = SimpleQueue()
        self._wake_fd = os.eventfd(0, os.EFD_NONBLOCK)
        self._socket = socket.socket()
        try:
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            self._socket.bind((LOOPBACK, port))
        except OSError as error:
            self._socket.close()
            raise ConfigError(f"--port: expected a free one, got {port}: {error}") from None
        self.url = f"http://{LOOPBACK}:{self._socket.getsockname()[1]}/v1"
        routes = [
            Route("/v1/chat/completions", self._complete, methods=["POST"]),
            Route("/v1/completions", self._complete, methods=["POST"]),
            Route("/v1/models", self._list_models),
            Route("/v1/models/{name:path}", self._list_models),
        ]
        handlers: Any = {ApiError: _refuse, HTTPException: _refuse, Exception: _refuse}
        app = Starlette(routes=routes, exception_handlers=handlers)
        config = uvicorn.Config(
            app,
            lifespan="off",
            log_config=None,
            access_log=False,
            proxy_headers=False,
            timeout_keep_alive=NEVER_SECONDS,
        )
        self._server = uvicorn.Server(config)
        serve = threading.Thread(target=self._serve, daemon=True, name="endpoint")
        serve.start()

    def _serve(self) -> None:
        asyncio.run(self._server.serve(sockets=[self._socket]))

    def fileno(self) -> int:
        """Readable when `take` has something."""
        return self._wake_fd

    def take(self) -> list[Request]:
        """Return the requests since the last call."""
        requests: list[Request] = []
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self._wake_fd)
        with contextlib.suppress(Empty):
            while True:
                requests.append(self._requests.get_nowait())
        return requests

    def close(self) -> None:
        self._server.should_exit = self._server.force_exit = True

    async def _complete(self, http: HttpRequest) -> Response:
        key = self._key_of(http)
        try:
            body = json.loads(await http.body())
            assert isinstance(body, dict)
        except (ValueError, AssertionError):
            raise ApiError("expected a JSON object") from None
        request = self._read(key, body, is_chat="chat" in http.url.path)
        self._requests.put(request)
        os.eventfd_write(self._wake_fd, 1)
        answer = await asyncio.wrap_future(request.answer)
        head = {
            "id": f"chatcmpl-{time.monotonic_ns():x}",
            "created": int(time.time()),
            "model": str(body.get("model") or MODEL),
        }
        usage = {
            "prompt_tokens": answer.num_prompt_tokens,
            "completion_tokens": answer.num_completion_tokens,
            "total_tokens": answer.num_prompt_tokens + answer.num_completion_tokens,
        }
        kind = "chat.completion" if request.is_chat else "text_completion"
        if not body.get("stream"):
            choices = [_whole(n, each, request) for n, each in enumerate(answer.choices)]
            return JSONResponse({**head, "object": kind, "choices": choices, "usage": usage})
        options = body.get("stream_options") or {}
        head["object"] = "chat.completion.chunk" if request.is_chat else kind
        chunks = [part for n, e in enumerate(answer.choices) for part in _parts(n, e, request)]
        parts: list[dict[str, Any]] = [{"choices": [each]} for each in chunks]
        parts[-1]["usage"] = usage
        if options.get("include_usage"):
            parts.append({"choices": [], "usage": usage})
        texts = [f"data: {json.dumps(head | part)}\n\n" for part in parts]
        return Response("".join([*texts, "data: [DONE]\n\n"]), media_type="text/event-stream")

    async def _list_models(self, http: HttpRequest) -> Response:
        self._key_of(http)
        model = {"id": MODEL, "object": "model", "created": 0, "owned_by": "easyrl"}
        is_one = "name" in http.path_params
        return JSONResponse(model if is_one else {"object": "list", "data": [model]})

    def _key_of(self, http: HttpRequest) -> str:
        key = http.headers.get("authorization", "").removeprefix("Bearer ")
        if self.keys is not None and key not in self.keys:
            problem = "expected the key of an episode that is going on (OPENAI_API_KEY)"
            raise ApiError(problem, "invalid_api_key", status=401)
        return key

    def _read(self, key: str, body: Mapping[str, Any], *, is_chat: bool) -> Request:
        """Check the fields of a request. Raises ApiError, which names the field."""
        replaced, fields = set(), NEUTRAL | self._sampling
        for name in [name for name in body if body[name] is not None and name not in IGNORED]:
            if name not in fields:
                raise ApiError(f"{name}: this field is not supported", "unsupported_parameter")
            value, allowed = body[name], fields[name]
            if value in allowed:
                continue
            if not (name in self._sampling and self._ignores):
                expected = " or ".join(map(repr, allowed)) or "none"
                expected += SAME if name in self._sampling else ""
                problem = f"{name}: expected {expected}, got {value!r:.80}"
                raise ApiError(problem, "unsupported_value")
            replaced.add(name)
        choice = body.get("tool_choice") or "auto"
        if choice not in ("auto", "none"):
            if not (self._ignores and choice == "required"):
                expected = "tool_choice: expected 'auto' or 'none'"
                raise ApiError(f"{expected}, got {choice!r:.80}", "unsupported_value")
            replaced.add("tool_choice")
        limits = [body.get("max_tokens"), body.get("max_completion_tokens")]
        limit = next((each for each in limits if each is not None), None)
        num_choices = body.get("n") or 1
        for name, value, most in (
            ("max_tokens", limit or 1, None),
            ("n", num_choices, MAX_CHOICES),
        ):
            if type(value) is not int or value < 1 or (most and value > most):
                raise ApiError(f"{name}: expected a whole number from 1, got {value!r:.80}")
        messages, prompt = [], body.get("prompt") if not is_chat else ""
        try:
            tools = [_tool(each) for each in body.get("tools") or ()]
            if is_chat:
                messages = _messages(body.get("messages"))
            elif not _is_prompt(prompt):
                raise ValueError(f"prompt: expected a text or its tokens, got {prompt!r:.80}")
        except (ValueError, TypeError, KeyError) as error:
            raise ApiError(str(error)) from None
        reads_calls = choice != "none"
        return Request(
            key, messages, prompt or "", tools, reads_calls, num_choices, limit, replaced
        )


def _messages(given: Any) -> Messages:
    """Read messages of text. Raises ValueError for others, and where the last one is an answer."""
    messages = read_messages(given, "messages")
    names: dict[Any, str] = {}  # of tools, by the ids of calls
    for message in messages:
        if message["role"] == "developer":
            message["role"] = "system"
        for call in message.get("tool_calls", ()):
            names[call.get("id")] = call["function"]["name"]
        if message["role"] == "tool" and message.get("tool_call_id") in names:
            message.setdefault("name", names[message["tool_call_id"]])
    if messages[-1]["role"] not in ("user", "tool", "system"):
        raise ValueError("messages: expected one of a user, a tool or the system at the end")
    return messages


def _tool(given: Any) -> dict[str, Any]:
    function = given["function"] if given.get("type") == "function" else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise ValueError(f"tools: expected functions with names, got {given!r:.80}")
    return {"type": "function", "function": {"description": "", "parameters": {}, **function}}


def _is_prompt(prompt: Any) -> bool:
    is_tokens = isinstance(prompt, list) and all(type(each) is int for each in prompt)
    return bool(prompt) and (isinstance(prompt, str) or is_tokens)


def _whole(number: int, choice: Choice, request: Request) -> dict[str, Any]:
    """The choice of a whole response."""
    own: dict[str, Any] = {"text": choice.text}
    if request.is_chat:
        own = {"message": message_of(choice)}
    return {"index": number, **own, "logprobs": None, "finish_reason": choice.finish_reason}


def message_of(choice: Choice) -> dict[str, Any]:
    """Return an answer as a message."""
    message: dict[str, Any] = {"role": "assistant", "content": choice.text or None}
    if choice.calls:
        return message | {"tool_calls": choice.calls}
    return message | {"content": choice.text}


def _parts(number: int, choice: Choice, request: Request) -> list[dict[str, Any]]:
    """The choices of a stream: all of the text at once, then the end."""
    whole = _whole(number, choice, request) | {"finish_reason": None}
    end: dict[str, Any] = {"text": ""}
    if request.is_chat:
        delta = whole.pop("message")
        if choice.calls:
            delta["tool_calls"] = [{"index": n, **call} for n, call in enumerate(choice.calls)]
        whole["delta"], end = delta, {"delta": {}}
    return [whole, {"index": number, **end, "finish_reason": choice.finish_reason}]


async def _refuse(_: HttpRequest, error: Exception) -> Response:
    status = int(getattr(error, "status", 0) or getattr(error, "status_code", 500))
    message = str(error) if status < 500 else f"{type(error).__name__}: {error}"
    code = getattr(error, "code", None)
    kind = "invalid_request_error" if status < 500 else "server_error"
    param = message.partition(":")[0] if message.partition(":")[0].isidentifier() else None
    content = {"message": message, "type": kind, "param": param, "code": code}
    return JSONResponse({"error": content}, status_code=status)
