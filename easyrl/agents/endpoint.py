"""An OpenAI-compatible endpoint on loopback. Its server runs in a thread; the answers come from the
thread of the engine.

    client ──HTTP──► server: reads, refuses ──Request──► take() … Request.reply
                       ▲                                       │
                       └───────────────────────────────────────┘
"""

import asyncio
import contextlib
import json
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
    *("model", "user", "metadata", "store", "stream", "stream_options", "parallel_tool_calls"),
    *("service_tier", "prompt_cache_key", "safety_identifier", "messages", "prompt", "tools"),
    *("tool_choice", "n", "max_tokens", "max_completion_tokens"),  # these are read otherwise
}
OTHERS = {"logit_bias", "logprobs", "top_logprobs", "echo", "suffix", "response_format"}
NEUTRAL: list[Any] = [False, "", {}, {"type": "text"}]
"""Values of OTHERS that change nothing."""
MAX_CHOICES = 64
NEVER_SECONDS = 10**6  # the server closes no connection of an agent that does something else


class ApiError(Exception):
    def __init__(self, message: str, code: str = "invalid_value", status: int = 400) -> None:
        super().__init__(message)
        self.code, self.status = code, status


def no_episode() -> ApiError:
    return ApiError("expected the key of an episode that has not ended", "invalid_api_key", 401)


@dataclass(slots=True, eq=False)
class Request:
    key: str  # of its episode
    messages: Messages  # [] in a text completion
    prompt: str  # of a text completion
    tools: list[dict[str, Any]]
    reads_calls: bool  # not with tool_choice=none
    num_choices: int
    max_tokens: int | None
    replaced: set[str]  # fields that were ignored
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
        self._ignores = spec.ignores_sampling
        stop = list(spec.stop)
        self._sampling: dict[str, list[Any]] = {
            "frequency_penalty": [0],
            "presence_penalty": [0],
            "min_p": [0],
            "seed": [],
            "repetition_penalty": [1],
            "stop": [stop, *stop] if len(stop) == 1 else [stop],
        }
        for name in ("temperature", "top_p", "top_k"):
            values = (getattr(each, name) for each in (spec.sampling, sampling))
            self._sampling[name] = list(dict.fromkeys(values))
        self._requests: SimpleQueue[Request] = SimpleQueue()
        self._wake_fd = os.eventfd(0, os.EFD_NONBLOCK)
        # With the protocol asyncio sends at once: 40 ms less for each answer.
        listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind((LOOPBACK, port))
            listener.listen()
        except OSError as error:
            listener.close()
            raise ConfigError(f"--port: expected a free port, got {port}: {error}") from None
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
        serve = lambda: asyncio.run(self._server.serve(sockets=[listener]))  # noqa: E731
        threading.Thread(target=serve, daemon=True, name="endpoint").start()

    def fileno(self) -> int:
        """Readable when `take` has something."""
        return self._wake_fd

    def take(self) -> list[Request]:
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
        key, is_chat = self._key_of(http), "chat" in http.url.path
        try:
            body = json.loads(await http.body())
            request = self._read(key, body, is_chat=is_chat)
        except (ApiError, ValueError, TypeError, KeyError, AttributeError) as error:
            if not self.takes_any_key:
                self.refused[key] += 1
            text = str(error) or "expected a JSON object"
            raise (error if isinstance(error, ApiError) else ApiError(text)) from None
        self._requests.put(request)
        os.eventfd_write(self._wake_fd, 1)
        answer = await asyncio.wrap_future(request.answer)
        head = {"id": f"easyrl-{time.monotonic_ns():x}", "created": int(time.time())}
        head |= {"model": str(body.get("model") or MODEL), "object": "text_completion"}
        if is_chat:
            head["object"] = "chat.completion.chunk" if body.get("stream") else "chat.completion"
        if not body.get("stream"):
            return JSONResponse(head | answer)
        parts = [{"choices": [_as_delta(choice)]} for choice in answer["choices"]]
        parts[-1]["usage"] = answer["usage"]
        if (body.get("stream_options") or {}).get("include_usage"):
            parts.append({"choices": [], "usage": answer["usage"]})
        lines = [f"data: {json.dumps(head | part)}\n\n" for part in parts]
        return Response("".join([*lines, "data: [DONE]\n\n"]), media_type="text/event-stream")

    def _read(self, key: str, body: Mapping[str, Any], *, is_chat: bool) -> Request:
        """Check the fields of a request. Raises ApiError or ValueError, which names the field."""
        replaced = set()
        for name, value in body.items():
            allowed = self._sampling.get(name, NEUTRAL if name in OTHERS else [])
            if value is None or name in IGNORED or value in allowed:
                continue
            if name not in self._sampling:
                raise ApiError(f"{name}: this field is not supported", "unsupported_parameter")
            if not self._ignores:
                expected = " or ".join(map(str, allowed)) or "none"
                same = "as in the run (rollout.agent_sampling=ignore replaces others)"
                raise ApiError(f"{name}: expected {expected}, {same}, got {value!r:.80}")
            replaced.add(name)
        choice = body.get("tool_choice") or "auto"
        if choice == "required" and self._ignores:
            replaced.add("tool_choice")
        elif choice not in ("auto", "none"):
            raise ValueError(f"tool_choice: expected 'auto' or 'none', got {choice!r:.80}")
        limit = body.get("max_completion_tokens") or body.get("max_tokens")
        num = 1 if body.get("n") is None else body["n"]
        for name, value in (("n", num), ("max_tokens", 1 if limit is None else limit)):
            if type(value) is not int or value < 1 or num > MAX_CHOICES:
                raise ValueError(f"{name}: expected a whole number from 1, got {value!r:.80}")
        messages = _read_chat(body.get("messages")) if is_chat else []
        prompt, tools = body.get("prompt") or "", body.get("tools") or []
        if not (is_chat or (prompt and isinstance(prompt, str))):
            raise ValueError(f"prompt: expected a text, got {prompt!r:.80}")
        tools = [
            {"type": "function", "function": {"description": "", "parameters": {}} | function}
            for function in (each.get("function") or {} for each in tools)
        ]
        if not all(isinstance(each["function"].get("name"), str) for each in tools):
            raise ValueError(f"tools: expected functions with names, got {body['tools']!r:.80}")
        return Request(key, messages, prompt, tools, choice != "none", num, limit, replaced)


def _read_chat(given: Any) -> Messages:
    """Read messages of text. Raises ValueError for others, and if the last one is an answer."""
    messages = read_messages(given, "messages")
    names: dict[Any, str] = {}  # of functions, by the ids of their calls
    for message in messages:
        message["role"] = {"developer": "system"}.get(message["role"], message["role"])
        for call in message.get("tool_calls", ()):
            names[call.get("id")] = call["function"]["name"]
        if message.get("tool_call_id") in names:
            message.setdefault("name", names[message["tool_call_id"]])
    if messages[-1]["role"] not in ("user", "tool", "system"):
        raise ValueError("messages: expected one of a user, a tool or the system at the end")
    return messages


def _as_delta(choice: Mapping[str, Any]) -> dict[str, Any]:
    """Return a choice as the only part of its stream."""
    part = {**choice}
    if delta := part.pop("message", None):
        calls = [{"index": n, **call} for n, call in enumerate(delta.get("tool_calls", ()))]
        part["delta"] = {**delta, "tool_calls": calls} if calls else delta
    return part


async def _refuse(http: HttpRequest, error: Exception) -> Response:
    status = int(getattr(error, "status", 0) or getattr(error, "status_code", 500))
    message, name = str(error), str(error).partition(":")[0]
    content = {
        "message": message or type(error).__name__,
        "type": "invalid_request_error" if status < 500 else "server_error",
        "param": name if name.isidentifier() else None,
        "code": getattr(error, "code", None),
    }
    return JSONResponse({"error": content}, status_code=status)
