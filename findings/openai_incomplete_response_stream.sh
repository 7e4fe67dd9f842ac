#!/usr/bin/env bash
# The stream helper of OpenAI's client has no final response for an answer that was cut off.
#
# Versions: Python 3.11, openai 3.57.0.
# Behaviour: a Responses stream ends with the event response.incomplete where the answer reached
# max_output_tokens. `create(stream=True)` gives that event, with the whole response in it.
# `stream().get_final_response()` raises RuntimeError: it waits for response.completed alone. (For
# chat completions the same helper returns a choice that was cut off, with its finish_reason.)
#
# Output seen:
#   create(stream=True): last event response.incomplete, text 'one two'
#   stream().get_final_response(): RuntimeError
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet openai==3.57.0
"$folder/venv/bin/python" - <<'PYTHON'
import json
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from openai import OpenAI

TEXT = "one two"
PART = {"type": "output_text", "text": TEXT, "annotations": [], "logprobs": []}
ITEM = {
    "id": "msg_1", "type": "message", "role": "assistant", "status": "incomplete",
    "content": [PART],
}
RESPONSE = {
    "id": "resp_1", "object": "response", "created_at": 1, "model": "m", "output": [],
    "status": "in_progress", "parallel_tool_calls": True, "tool_choice": "auto", "tools": [],
    "incomplete_details": None, "error": None, "metadata": {}, "instructions": None,
    "temperature": 1.0, "top_p": 1.0,
}
CUT_OFF = RESPONSE | {
    "status": "incomplete", "output": [ITEM],
    "incomplete_details": {"reason": "max_output_tokens"},
}
PLACE = {"item_id": "msg_1", "output_index": 0, "content_index": 0}
EVENTS = [
    {"type": "response.created", "response": RESPONSE},
    {
        "type": "response.output_item.added", "output_index": 0,
        "item": ITEM | {"content": [], "status": "in_progress"},
    },
    {"type": "response.content_part.added", "part": PART | {"text": ""}, **PLACE},
    {"type": "response.output_text.delta", "delta": TEXT, "logprobs": [], **PLACE},
    {"type": "response.output_text.done", "text": TEXT, "logprobs": [], **PLACE},
    {"type": "response.content_part.done", "part": PART, **PLACE},
    {"type": "response.output_item.done", "output_index": 0, "item": ITEM},
    {"type": "response.incomplete", "response": CUT_OFF},
]


class Server(BaseHTTPRequestHandler):
    def do_POST(self):
        self.rfile.read(int(self.headers["content-length"]))
        self.send_response(200)
        self.send_header("content-type", "text/event-stream")
        self.end_headers()
        for number, event in enumerate(EVENTS):
            data = json.dumps(event | {"sequence_number": number})
            self.wfile.write(f"event: {event['type']}\ndata: {data}\n\n".encode())

    def log_message(self, *_):
        pass


server = ThreadingHTTPServer(("127.0.0.1", 0), Server)
threading.Thread(target=server.serve_forever, daemon=True).start()
client = OpenAI(base_url=f"http://127.0.0.1:{server.server_port}/v1", api_key="k", max_retries=0)
wanted = {"model": "m", "input": "count", "max_output_tokens": 2}
*_, last = client.responses.create(stream=True, **wanted)
text = last.response.output_text
print(f"create(stream=True): last event {last.type}, text {text!r}")
with client.responses.stream(**wanted) as stream:
    try:
        stream.get_final_response()
        found = "a response"
    except RuntimeError:
        found = "RuntimeError"
print(f"stream().get_final_response(): {found}")
sys.exit((last.type, text, found) != ("response.incomplete", TEXT, "RuntimeError"))
PYTHON
