#!/usr/bin/env bash
# dspy answers from a cache on disk, also when the model behind the address is another one.
#
# Versions: Python 3.11, dspy 3.4.1, litellm 1.110.2.
# Behaviour: dspy.LM keeps answers in ~/.dspy_cache by default, for all programs of the user. The key
# has the model's name, the messages and the sampling settings, but neither the address nor the key
# of the API. A server that answers under a fixed name, as one does whose weights change while a
# policy is trained, is asked once for a prompt; every later process gets that text, from another
# port as well, and at temperature 1 too. All samples of a prompt are then the same text, and an
# evaluation of new weights repeats the old answers. `cache=False` asks each time.
#
# Output seen (two servers one after the other, each process a new one):
#   server 1, by default: answer 1, requests 1
#   server 2, by default: answer 1, requests 0
#   server 2, cache=False: answer 2, requests 1
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet dspy==3.4.1 litellm==1.110.2
cat > "$folder/ask.py" <<'PYTHON'
import json
import os
import sys
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer

os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"
number, caching = sys.argv[1:]
num_requests = 0


class Model(BaseHTTPRequestHandler):
    def do_POST(self):
        global num_requests
        num_requests += 1
        self.rfile.read(int(self.headers["content-length"]))
        message = {"role": "assistant", "content": f"answer {number}"}
        choice = {"index": 0, "message": message, "finish_reason": "stop"}
        usage = {"prompt_tokens": 1, "completion_tokens": 2, "total_tokens": 3}
        body = {"id": "1", "object": "chat.completion", "created": 0, "model": "policy"}
        text = json.dumps({**body, "choices": [choice], "usage": usage}).encode()
        self.send_response(200)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)

    def log_message(self, *_):
        pass


server = HTTPServer(("127.0.0.1", 0), Model)
threading.Thread(target=server.serve_forever, daemon=True).start()
import dspy

options = {} if caching == "default" else {"cache": False}
address = f"http://127.0.0.1:{server.server_port}/v1"
lm = dspy.LM("openai/policy", api_base=address, api_key=f"key {number}", temperature=1.0, **options)
(answer,) = lm("What is 12 * 7?")
text = answer if isinstance(answer, str) else answer["text"]
print(f"server {number}, {'by default' if not options else 'cache=False'}: {text}, requests {num_requests}")
PYTHON
export HOME=$folder
unset DSPY_CACHEDIR OPENAI_BASE_URL OPENAI_API_KEY
for words in "1 default" "2 default" "2 off"; do
  # shellcheck disable=SC2086
  "$folder/venv/bin/python" "$folder/ask.py" $words
done | tee "$folder/out.txt"
diff "$folder/out.txt" - <<'EXPECTED'
server 1, by default: answer 1, requests 1
server 2, by default: answer 1, requests 0
server 2, cache=False: answer 2, requests 1
EXPECTED
test -d "$HOME/.dspy_cache"
