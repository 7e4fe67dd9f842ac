#!/usr/bin/env bash
# Anthropic's client 2 has no sampling parameters: temperature, top_p and top_k raise TypeError.
#
# Versions: Python 3.11, anthropic 2.14.0 and 0.77.0.
# Behaviour: Messages.create and Messages.stream of release 2 do not take them, whatever the server
# is. A program that evaluates at temperature 0 fails before a request is sent. `extra_body` sends
# them as before. Release 0 took them by name.
#
# Output seen:
#   0.77.0: temperature, top_k, top_p are parameters
#   2.14.0: none of them; TypeError; sent with extra_body: {'temperature': 0.0}
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
for version in 0.77.0 2.14.0; do
  python3 -m venv "$folder/$version"
  "$folder/$version/bin/pip" install --quiet "anthropic==$version"
  "$folder/$version/bin/python" - <<'PYTHON'
import inspect
import json
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import anthropic

NAMES = ("temperature", "top_k", "top_p")
received = {}


class Server(BaseHTTPRequestHandler):
    def do_POST(self):
        received.update(json.loads(self.rfile.read(int(self.headers["content-length"]))))
        message = {
            "id": "msg_1", "type": "message", "role": "assistant", "model": "m",
            "content": [{"type": "text", "text": "yes"}], "stop_reason": "end_turn",
            "stop_sequence": None, "usage": {"input_tokens": 1, "output_tokens": 1},
        }
        body = json.dumps(message).encode()
        self.send_response(200)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_):
        pass


server = ThreadingHTTPServer(("127.0.0.1", 0), Server)
threading.Thread(target=server.serve_forever, daemon=True).start()
address = f"http://127.0.0.1:{server.server_port}"
client = anthropic.Anthropic(base_url=address, api_key="k", max_retries=0)
taken = [name for name in NAMES if name in inspect.signature(client.messages.create).parameters]
version = anthropic.__version__
if version.startswith("0."):
    print(f"{version}: {', '.join(taken)} are parameters")
    sys.exit(taken != list(NAMES))
request = {"model": "m", "max_tokens": 5, "messages": [{"role": "user", "content": "well?"}]}
try:
    client.messages.create(temperature=0.0, **request)
    error = "no error"
except TypeError:
    error = "TypeError"
client.messages.create(extra_body={"temperature": 0.0}, **request)
sent = {name: received[name] for name in NAMES if name in received}
print(f"{version}: {taken or 'none of them'}; {error}; sent with extra_body: {sent}")
sys.exit((taken, error, sent) != ([], "TypeError", {"temperature": 0.0}))
PYTHON
done
