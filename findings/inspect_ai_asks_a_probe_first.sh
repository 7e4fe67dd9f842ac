#!/usr/bin/env bash
# inspect-ai asks an OpenAI model one question of its own before those of a task.
#
# Versions: Python 3.11, inspect-ai 0.3.285, openai 3.57.0.
# Behaviour: for a model `openai/NAME` whose name it does not know, the first request of a process is
# a probe to /v1/responses, without the task's system message and tools. It stands in no log: the
# log of the evaluation has one call of the model, the server has had two. A server that takes the
# first request for the task's prompt, counts requests, or plays back recorded answers in order, is
# one off.
#
# Output seen:
#   success, model calls in its log: 1
#   request to /v1/responses: Please say 'hello, world'
#   request to /v1/responses: 2 * 3?
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet inspect-ai==0.3.285 openai==3.57.0
cat > "$folder/ask.py" <<'PYTHON'
import json
import os
import tempfile
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

requests = []


class Model(BaseHTTPRequestHandler):
    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        requests.append((self.path, body))
        text = {"type": "output_text", "text": "6", "annotations": []}
        message = {"type": "message", "id": "m", "role": "assistant", "status": "completed"}
        answer = {
            "id": "1",
            "object": "response",
            "created_at": 0,
            "model": "policy",
            "status": "completed",
            "output": [{**message, "content": [text]}],
            "parallel_tool_calls": True,
            "tool_choice": "auto",
            "tools": [],
        }
        text = json.dumps(answer)
        self.send_response(200)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(text)))
        self.end_headers()
        self.wfile.write(text.encode())

    def log_message(self, *_):
        pass


server = ThreadingHTTPServer(("127.0.0.1", 0), Model)
threading.Thread(target=server.serve_forever, daemon=True).start()
os.environ["OPENAI_BASE_URL"] = f"http://127.0.0.1:{server.server_port}/v1"
os.environ["OPENAI_API_KEY"] = "none"
from inspect_ai import Task, eval
from inspect_ai.dataset import Sample

task = Task(dataset=[Sample(input="2 * 3?", target="6")])
[log] = eval(task, model="openai/policy", display="none", log_dir=tempfile.mkdtemp())
num_logged = sum(event.event == "model" for event in log.samples[0].events)
print(f"{log.status}, model calls in its log: {num_logged}")
for path, body in requests:
    given = body.get("input") or body.get("messages")
    if isinstance(given, list):
        given = given[-1]["content"]
    if isinstance(given, list):
        given = given[0]["text"]
    print(f"request to {path}: {given}")
PYTHON
"$folder/venv/bin/python" "$folder/ask.py" | tee "$folder/out.txt"
diff "$folder/out.txt" - <<'EXPECTED'
success, model calls in its log: 1
request to /v1/responses: Please say 'hello, world'
request to /v1/responses: 2 * 3?
EXPECTED
