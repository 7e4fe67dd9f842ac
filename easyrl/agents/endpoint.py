"""The endpoint of agents on loopback. Its server runs in a thread; the answers come from the thread
of the engine.

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
from collections import Counter, deque
from collections.abc import Mapping
from queue import SimpleQueue
from typing import Any, NamedTuple
from urllib.parse import urlsplit

import uvicorn
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.requests import Request as HttpRequest
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from easyrl.agents.protocols.base import (
    MODEL,
    Answer,
    ApiError,
    Protocol,
    Request,
    no_episode,
)
from easyrl.agents.protocols.chat import ChatCompletions, TextCompletions
from easyrl.agents.protocols.fields import FieldRules
from easyrl.agents.protocols.messages import AnthropicMessages
from easyrl.agents.protocols.responses import Responses
from easyrl.config import ConfigError
from easyrl.config.rollout import SamplingChoice
from easyrl.config.spec import EpisodeSpec
from easyrl.devices import LOOPBACK
from easyrl.processes import raise_open_files

LEAST_BODY_BYTES = 2**20
BODY_BYTES_PER_TOKEN = 32
"""A body may have LEAST_BODY_BYTES, and these for each token of a sequence: a larger one does not
fit, and to tokenize it would keep the engine waiting."""
ADDRESS_BYTES_PER_BYTE = 2
"""In each turn a request may show all image files of an episode once more, as an unchanged screen:
a body may have these bytes for each of theirs. (base64 takes four thirds.)"""
MAX_PICTURE_BYTES = 2**28
"""That a body may have for pictures, unless one turn may have more: it is parsed in memory."""
MAX_DISCARDED_BYTES = 2**28
NEVER_SECONDS = 10**6  # the server closes no connection of an agent that does something else
LOCAL_NAMES = (LOOPBACK, "localhost", "::1")
UNSERVED = {
    "/audio": "audio",
    "/batches": "batches",
    "/conversations": "stored conversations (use previous_response_id)",
    "/embeddings": "embeddings",
    "/files": "files",
    "/images": "images",
    "/moderations": "moderations",
    "/rerank": "reranking",
    "/responses/": "stored responses by their id (use previous_response_id)",
    "/complete": "Anthropic's text completions",
    "/api/": "Ollama's API",
}
"""Beginnings of paths that clients know, and what they are for."""
SERVED = "served are /chat/completions, /completions, /responses, /messages and /models"


class _Received(NamedTuple):
    """A request as its client sent it."""

    protocol: Protocol
    request: Request
    body: Mapping[str, Any]


class Endpoint:
    """The server. `keys` may call it, or any key where `takes_any_key`."""

    def __init__(self, spec: EpisodeSpec, sampling: SamplingChoice, port: int = 0) -> None:
        """`sampling`: of the engine; requests may also name that of training. `port`: 0: a free
        one. Raises ConfigError if it is taken."""
        raise_open_files()
        self.keys: set[str] = set()
        self.takes_any_key = False
        self.refused: Counter[str] = Counter()  # requests that could not be read, by key
        self._refusals: deque[str] = deque()  # why
        most_tokens = spec.limits.max_prompt_length + spec.limits.max_completion_length
        self._most_bytes = LEAST_BODY_BYTES + BODY_BYTES_PER_TOKEN * most_tokens
        self._shows_pictures = spec.shows_pictures
        if spec.shows_pictures:
            bytes_of_turn = ADDRESS_BYTES_PER_BYTE * spec.max_image_bytes
            bytes_of_episode = min(bytes_of_turn * spec.max_turns, MAX_PICTURE_BYTES)
            self._most_bytes += max(bytes_of_turn, bytes_of_episode)
        self._requests: SimpleQueue[Request] = SimpleQueue()
        self._wake_fd = os.eventfd(0, os.EFD_NONBLOCK)
        listener = _listen(port)
        self.url = f"http://{LOOPBACK}:{listener.getsockname()[1]}/v1"
        rules = FieldRules(spec, sampling)
        messages = AnthropicMessages(rules)
        self._protocols: dict[str, Protocol] = {
            "/chat/completions": ChatCompletions(rules),
            "/completions": TextCompletions(rules),
            "/responses": Responses(rules),
            "/messages": messages,
            "/messages/count_tokens": AnthropicMessages(rules, counts_only=True),
        }
        every_path = Route("/{path:path}", self._answer, methods=["GET", "POST", "DELETE"])
        errors = (ApiError, HTTPException, ClientDisconnect, Exception)
        handlers: Any = dict.fromkeys(errors, self._refuse)
        app = Starlette(routes=[every_path], exception_handlers=handlers)
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

    def take_refusals(self) -> list[str]:
        """Return why requests since the last call could not be read."""
        return [self._refusals.popleft() for _ in range(len(self._refusals))]

    def forget(self, key: str) -> None:
        """Refuse the key of an episode from now on."""
        self.keys.discard(key)
        self.refused.pop(key, None)
        for protocol in self._protocols.values():
            protocol.forget(key)

    def close(self) -> None:
        self._server.should_exit = self._server.force_exit = True

    # -- requests ---------------------------------------------------------------------------------

    async def _answer(self, http: HttpRequest) -> Response:
        """Answer any request."""
        _check_origin(http)
        path = _path_of(http)
        if path == "/models" or path.startswith("/models/"):
            return self._show_models(http, path)
        protocol = self._protocols.get(path)
        if protocol is None:
            raise _not_served(path)
        if http.method != "POST":
            raise ApiError(f"expected POST, got {http.method}", "method_not_allowed", 405)
        received = await self._receive(http, protocol)
        self._requests.put(received.request)
        os.eventfd_write(self._wake_fd, 1)
        answer = await asyncio.wrap_future(received.request.answer)
        response = _write(received, answer)
        if not self._is_known(received.request.caller):  # its episode has ended meanwhile
            protocol.forget(received.request.caller)
        return response

    def _is_known(self, key: str) -> bool:
        return self.takes_any_key or key in self.keys

    def _key_of(self, http: HttpRequest) -> str:
        scheme, _, token = http.headers.get("authorization", "").partition(" ")
        key = token if scheme.lower() == "bearer" else http.headers.get("x-api-key", "")
        if not self._is_known(key):
            raise no_episode()
        return key

    async def _receive(self, http: HttpRequest, protocol: Protocol) -> _Received:
        """Read a request. Raises ApiError."""
        key = self._key_of(http)
        try:
            body = _parse(await self._body_of(http))
            return _Received(protocol, protocol.read(key, body), body)
        except (ApiError, ValueError, TypeError, LookupError, AttributeError) as error:
            refusal = error
            if not isinstance(error, ApiError):
                refusal = ApiError(str(error) or "expected a JSON object")
        except RecursionError:
            refusal = ApiError("expected a JSON object that is nested less deeply")
        if not self.takes_any_key:
            self.refused[key] += 1
            self._refusals.append(str(refusal))
        raise refusal from None

    async def _body_of(self, http: HttpRequest) -> bytes:
        """Return the body of a request. Raises ApiError for one that is too large: it is not kept,
        but read, since clients that cannot send all of it do not see the refusal."""
        body = bytearray()
        num_bytes = 0
        async for part in http.stream():
            num_bytes += len(part)
            if num_bytes <= self._most_bytes:
                body += part
            elif num_bytes > MAX_DISCARDED_BYTES:
                break
        if num_bytes > self._most_bytes:
            raise self._too_large(num_bytes)
        return bytes(body)

    def _too_large(self, num_bytes: int) -> ApiError:
        keys = "data.max_prompt_length and rollout.max_completion_length"
        if self._shows_pictures:
            keys = f"data.max_image_bytes, {keys}"
        text = (
            f"expected a body of at most {self._most_bytes} bytes, which is more than {keys} "
            f"allow, got {num_bytes} bytes"
        )
        return ApiError(text, "context_length_exceeded", 413)

    def _show_models(self, http: HttpRequest, path: str) -> Response:
        """Describe the model, under any name."""
        self._key_of(http)
        name = path.removeprefix("/models").strip("/") or MODEL
        model = {"id": name, "object": "model", "created": 0, "owned_by": "easyrl"}
        model |= {"type": "model", "display_name": name, "created_at": "1970-01-01T00:00:00Z"}
        if path == "/models":
            ends = {"has_more": False, "first_id": name, "last_id": name}
            return JSONResponse({"object": "list", "data": [model], **ends})
        return JSONResponse(model)

    async def _refuse(self, http: HttpRequest, error: Exception) -> Response:
        """Answer a request with an error in the form of its protocol."""
        status = 500
        if isinstance(error, (ApiError, HTTPException)):
            status = error.status if isinstance(error, ApiError) else error.status_code
        elif isinstance(error, ClientDisconnect):
            status = 499
        protocol = self._protocols.get(_path_of(http), self._protocols["/chat/completions"])
        return JSONResponse(protocol.refusal(error, status), status_code=status)


def _write(received: _Received, answer: Answer) -> Response:
    """Write an answer in the protocol of its request."""
    protocol = received.protocol
    request = received.request
    body = received.body
    is_streamed = body.get("stream") and not request.counts_only
    if is_streamed:
        events = protocol.stream(request, body, answer)
        return Response("".join(events), media_type="text/event-stream")
    return JSONResponse(protocol.write(request, body, answer))


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


def _check_origin(http: HttpRequest) -> None:
    """Raise ApiError for a request that a web page has made: browsers send where it comes from, and
    a page's server may give its own name this machine's address."""
    host = http.headers.get("host", "")
    if _name_of(f"//{host}") not in LOCAL_NAMES:
        raise ApiError(f"Host: expected {LOOPBACK} or localhost, got {host!r:.80}", status=403)
    origin = http.headers.get("origin")
    if origin is not None and _name_of(origin) not in LOCAL_NAMES:
        raise ApiError(f"Origin: expected none or this machine, got {origin!r:.80}", status=403)


def _name_of(address: str) -> str | None:
    try:
        return urlsplit(address).hostname
    except ValueError:  # it is no address
        return None


def _path_of(http: HttpRequest) -> str:
    """Return the path behind the version: clients may add `/v1` to an address that has it."""
    path = http.url.path.rstrip("/")
    while path.startswith("/v1/"):
        path = path.removeprefix("/v1")
    return path


def _not_served(path: str) -> ApiError:
    for beginning, name in UNSERVED.items():
        if f"{path}/".startswith(beginning):
            return ApiError(f"{name}: not served; {SERVED}", "not_found", 404)
    return ApiError(f"no such path: {path!r:.80}; {SERVED}", "not_found", 404)


def _parse(body: bytes) -> dict[str, Any]:
    """Return a body that is a JSON object. Raises ApiError, or RecursionError."""
    try:
        parsed = json.loads(body, parse_constant=_refuse_constant)
        json.dumps(parsed, ensure_ascii=False).encode()  # raises for half a surrogate pair
    except ValueError as error:
        raise ApiError(f"expected a JSON object in UTF-8, got {body!r:.80}: {error}") from None
    if not isinstance(parsed, dict):
        raise ApiError(f"expected a JSON object, got {parsed!r:.80}")
    if not isinstance(parsed.get("stream"), bool | None):
        raise ApiError(f"stream: expected true or false, got {parsed['stream']!r:.80}")
    return parsed


def _refuse_constant(name: str) -> float:
    raise ValueError(f"{name} is no number of JSON")
