"""An OpenAI-compatible endpoint on loopback. Its server runs in a thread; the answers come from the
thread of the engine.

    client ──HTTP──► server: reads, refuses ──Request──► take() … Request.reply
                       ▲                                       │
                       └───────────────────────────────────────┘
"""

import asyncio
import contextlib
import json
import math
import os
import socket
import threading
import time
from collections import Counter
from collections.abc import Mapping
from concurrent.futures import Future, InvalidStateError
from dataclasses import dataclass, field
from queue import SimpleQueue
from typing import Any

import uvicorn
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request as HttpRequest
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from easyrl.agents.program import MODEL
from easyrl.config import ConfigError
from easyrl.config.rollout import SamplingChoice
from easyrl.config.spec import EpisodeSpec
from easyrl.data.chat import read_messages
from easyrl.devices import LOOPBACK
from easyrl.processes import raise_open_files
from easyrl.types import Messages

IGNORED = {
    "metadata",
    "model",
    "parallel_tool_calls",
    "prompt_cache_key",
    "safety_identifier",
    "service_tier",
    "store",
    "user",
}
"""Fields of a request that change nothing."""
READ = {
    "max_completion_tokens",
    "max_tokens",
    "messages",
    "n",
    "prompt",
    "stream",
    "stream_options",
    "tool_choice",
    "tools",
}
"""Fields that are not about sampling."""
NEUTRAL_ONLY = {"logit_bias", "logprobs", "top_logprobs", "echo", "suffix", "response_format"}
"""Fields that are not supported, so that only NEUTRAL values are accepted."""
NEUTRAL: list[Any] = [False, "", {}, {"type": "text"}]
MAX_CHOICES = 64
NEVER_SECONDS = 10**6  # the server closes no connection of an agent that does something else


class ApiError(Exception):
    """The refusal of a request, with OpenAI's name of the reason and an HTTP status."""

    def __init__(self, message: str, code: str = "invalid_value", status: int = 400) -> None:
        super().__init__(message)
        self.code = code
        self.status = status


def no_episode() -> ApiError:
    return ApiError("expected the key of an episode that has not ended", "invalid_api_key", 401)


@dataclass(slots=True, eq=False)
class Request:
    """A request that was read, and the answer that its client waits for."""

    key: str  # of its episode
    messages: Messages  # [] in a text completion
    prompt: str  # of a text completion
    tools: list[dict[str, Any]]
    reads_calls: bool  # not with tool_choice=none
    num_choices: int
    max_tokens: int | None
    replaced: set[str]  # fields whose values the run's own replace
    answer: Future[dict[str, Any]] = field(default_factory=Future)
    digest: bytes = b""  # of its messages
    continued: bytes = b""  # digest of the answered conversation that they continue

    def reply(self, answer: dict[str, Any] | ApiError) -> None:
        with contextlib.suppress(InvalidStateError):  # the client is gone
            if isinstance(answer, ApiError):
                self.answer.set_exception(answer)
            else:
                self.answer.set_result(answer)


class Endpoint:
    """The server. `keys` may call it, or any key where `takes_any_key`."""

    def __init__(self, spec: EpisodeSpec, sampling: SamplingChoice, port: int = 0) -> None:
        """`sampling`: of the engine; requests may also name that of training. `port`: 0: a free
        one. Raises ConfigError if it is taken."""
        raise_open_files()
        self.keys: set[str] = set()
        self.takes_any_key = False
        self.refused: Counter[str] = Counter()  # requests that could not be read, by key
        self._ignores_sampling = spec.ignores_sampling
        self._allowed_sampling = _allowed_sampling(spec, sampling)
        self._requests: SimpleQueue[Request] = SimpleQueue()
        self._wake_fd = os.eventfd(0, os.EFD_NONBLOCK)
        listener = _listen(port)
        self.url = f"http://{LOOPBACK}:{listener.getsockname()[1]}/v1"
        routes = [
            Route("/v1/chat/completions", self._complete, methods=["POST"]),
            Route("/v1/completions", self._complete, methods=["POST"]),
            Route("/v1/models", self._list_models),
        ]
        handlers: Any = dict.fromkeys((ApiError, HTTPException, Exception), _refuse)
        app = Starlette(routes=routes, exception_handlers=handlers)
        options: Any = {"lifespan": "off", "log_config": None, "access_log": False}
        self._server = uvicorn.Server(
            uvicorn.Config(app, timeout_keep_alive=NEVER_SECONDS, proxy_headers=False, **options)
        )
        threading.Thread(target=self._serve, args=(listener,), daemon=True, name="endpoint").start()

    def _serve(self, listener: socket.socket) -> None:
        asyncio.run(self._server.serve(sockets=[listener]))

    def fileno(self) -> int:
        """Readable when `take` has something."""
        return self._wake_fd

    def take(self) -> list[Request]:
        """Return the requests that have come since the last call."""
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self._wake_fd)
        return [self._requests.get() for _ in range(self._requests.qsize())]

    def close(self) -> None:
        self._server.should_exit = self._server.force_exit = True

    def _key_of(self, http: HttpRequest) -> str:
        key = http.headers.get("authorization", "").removeprefix("Bearer ")
        if not self.takes_any_key and key not in self.keys:
            raise no_episode()
        return key

    async def _list_models(self, http: HttpRequest) -> Response:
        self._key_of(http)
        model = {"id": MODEL, "object": "model", "created": 0, "owned_by": "easyrl"}
        return JSONResponse({"object": "list", "data": [model]})

    async def _complete(self, http: HttpRequest) -> Response:
        """Answer a request for a chat or text completion."""
        key = self._key_of(http)
        is_chat = "chat" in http.url.path
        try:
            body = json.loads(await http.body())
            request = self._read(key, body, is_chat=is_chat)
        except (ApiError, ValueError, TypeError, KeyError, AttributeError) as error:
            if not self.takes_any_key:
                self.refused[key] += 1
            if isinstance(error, ApiError):
                raise
            raise ApiError(str(error) or "expected a JSON object") from None
        self._requests.put(request)
        os.eventfd_write(self._wake_fd, 1)
        answer = await asyncio.wrap_future(request.answer)
        is_streamed = bool(body.get("stream"))
        kind = "text_completion"
        if is_chat:
            kind = "chat.completion.chunk" if is_streamed else "chat.completion"
        head = {
            "id": f"easyrl-{time.monotonic_ns():x}",
            "created": int(time.time()),
            "model": str(body.get("model") or MODEL),
            "object": kind,
        }
        if not is_streamed:
            return JSONResponse(head | answer)
        options = body.get("stream_options") or {}
        has_usage = bool(options.get("include_usage"))
        return _as_stream(head, answer, has_usage=has_usage)

    def _read(self, key: str, body: Mapping[str, Any], *, is_chat: bool) -> Request:
        """Check the fields of a request. Raises ApiError or ValueError, which names the field."""
        replaced = self._check_sampling(body)
        tool_choice = body.get("tool_choice") or "auto"
        if tool_choice == "required" and self._ignores_sampling:
            replaced.add("tool_choice")
        elif tool_choice not in ("auto", "none"):
            raise ValueError(f"tool_choice: expected 'auto' or 'none', got {tool_choice!r:.80}")
        num_choices = 1 if body.get("n") is None else body["n"]
        _check_count("n", num_choices, MAX_CHOICES)
        max_tokens = body.get("max_completion_tokens") or body.get("max_tokens")
        if max_tokens is not None:
            _check_count("max_tokens", max_tokens)
        messages = _read_chat(body.get("messages")) if is_chat else []
        prompt = body.get("prompt") or ""
        if not is_chat and not (prompt and isinstance(prompt, str)):
            raise ValueError(f"prompt: expected a text, got {prompt!r:.80}")
        return Request(
            key=key,
            messages=messages,
            prompt=prompt,
            tools=_read_tools(body.get("tools") or []),
            reads_calls=tool_choice != "none",
            num_choices=num_choices,
            max_tokens=max_tokens,
            replaced=replaced,
        )

    def _check_sampling(self, body: Mapping[str, Any]) -> set[str]:
        """Return the fields that ask for other sampling than the run's, where such are replaced.
        Raises ApiError for others, and for fields that are not supported."""
        replaced: set[str] = set()
        for name, value in body.items():
            if value is None or name in IGNORED or name in READ:
                continue
            if name not in self._allowed_sampling:
                if name in NEUTRAL_ONLY and value in NEUTRAL:
                    continue
                raise ApiError(f"{name}: this field is not supported", "unsupported_parameter")
            allowed = self._allowed_sampling[name]
            if value in allowed:
                continue
            if not self._ignores_sampling:
                expected = " or ".join(map(str, allowed)) or "none"
                same = "as in the run (rollout.agent_sampling=ignore replaces others)"
                raise ApiError(f"{name}: expected {expected}, {same}, got {value!r:.80}")
            replaced.add(name)
        return replaced


def _allowed_sampling(spec: EpisodeSpec, of_engine: SamplingChoice) -> dict[str, list[Any]]:
    """Return the values that a request may give for each field about sampling."""
    stop = list(spec.stop)
    allowed: dict[str, list[Any]] = {
        "frequency_penalty": [0],
        "presence_penalty": [0],
        "min_p": [0],
        "seed": [],
        "repetition_penalty": [1],
        "stop": [stop, *stop] if len(stop) == 1 else [stop],  # one may be given without a list
    }
    for name in ("temperature", "top_p", "top_k"):
        values = (getattr(spec.sampling, name), getattr(of_engine, name))
        allowed[name] = list(dict.fromkeys(values))
    return allowed


def _listen(port: int) -> socket.socket:
    """Return a socket that listens on loopback. Raises ConfigError."""
    # With the protocol asyncio sends at once: 40 ms less for each answer.
    listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((LOOPBACK, port))
        listener.listen()
    except OSError as error:
        listener.close()
        raise ConfigError(f"--port: expected a free port, got {port}: {error}") from None
    return listener


def _check_count(name: str, value: Any, most: float = math.inf) -> None:
    if type(value) is not int or not 1 <= value <= most:
        raise ValueError(f"{name}: expected a whole number from 1, got {value!r:.80}")


def _read_tools(given: Any) -> list[dict[str, Any]]:
    """Return the descriptions of tools as chat templates take them. Raises ValueError."""
    tools: list[dict[str, Any]] = []
    for each in given:
        function = {"description": "", "parameters": {}} | (each.get("function") or {})
        if not isinstance(function.get("name"), str):
            raise ValueError(f"tools: expected functions with names, got {given!r:.80}")
        tools.append({"type": "function", "function": function})
    return tools


def _read_chat(given: Any) -> Messages:
    """Read messages of text. Raises ValueError for others, and if the last one is an answer."""
    messages = read_messages(given, "messages")
    names: dict[Any, str] = {}  # of functions, by the ids of their calls
    for message in messages:
        if message["role"] == "developer":
            message["role"] = "system"
        for call in message.get("tool_calls", ()):
            names[call.get("id")] = call["function"]["name"]
        if message.get("tool_call_id") in names:
            message.setdefault("name", names[message["tool_call_id"]])
    if messages[-1]["role"] not in ("user", "tool", "system"):
        raise ValueError("messages: expected one of a user, a tool or the system at the end")
    return messages


def _as_stream(head: Mapping[str, Any], answer: Mapping[str, Any], *, has_usage: bool) -> Response:
    """Return an answer as server-sent events: each choice is one part. `has_usage`: a part of its
    own has the number of tokens, too."""
    parts: list[dict[str, Any]] = []
    for choice in answer["choices"]:
        parts.append({"choices": [_as_delta(choice)]})
    usage = answer["usage"]
    parts[-1]["usage"] = usage
    if has_usage:
        parts.append({"choices": [], "usage": usage})
    stream = ""
    for part in parts:
        data = json.dumps({**head, **part})
        stream += f"data: {data}\n\n"
    stream += "data: [DONE]\n\n"
    return Response(stream, media_type="text/event-stream")


def _as_delta(choice: Mapping[str, Any]) -> dict[str, Any]:
    """Return a choice as the only part of its stream."""
    part = dict(choice)
    message = part.pop("message", None)
    if message is None:  # of a text completion
        return part
    delta = dict(message)
    calls: list[dict[str, Any]] = []
    for index, call in enumerate(message.get("tool_calls", ())):
        calls.append({"index": index, **call})
    if calls:
        delta["tool_calls"] = calls
    part["delta"] = delta
    return part


async def _refuse(http: HttpRequest, error: Exception) -> Response:
    """Answer a request with an error in OpenAI's form."""
    status = 500
    if isinstance(error, ApiError):
        status = error.status
    elif isinstance(error, HTTPException):  # of starlette, as for a wrong path
        status = error.status_code
    message = str(error)
    name = message.partition(":")[0]  # errors begin with the field that they are about
    content = {
        "message": message or type(error).__name__,
        "type": "invalid_request_error" if status < 500 else "server_error",
        "param": name if name.isidentifier() else None,
        "code": getattr(error, "code", None),
    }
    return JSONResponse({"error": content}, status_code=status)
