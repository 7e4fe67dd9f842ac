#!/usr/bin/env bash
# semantic-kernel gives a later answer the text that stood beside an earlier tool call.
#
# Versions: Python 3.11, semantic-kernel 1.45.0, openai 3.57.0.
# Behaviour: a model may write text beside a call of a tool ("Let me see."), then its answer ("It is
# 6."). `ChatCompletionAgent.invoke_stream` joins the texts of all streams since the user's message:
# in the thread, and so in the next request, the answer is "Let me see. It is 6.", which the model
# has never said, and the message with the call has no text. `get_response` leaves the text beside
# the call out, and keeps the answer. So neither sends a conversation as it was sampled, and a server
# that reuses the tokens of earlier turns (a prefix cache, a trainer) finds other words with streams.
#
# Output seen (the assistant's messages in the request of the second question):
#   get_response: [None, 'It is 6.']
#   invoke_stream: [None, 'Let me see. It is 6.']
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet semantic-kernel==1.45.0 openai==3.57.0
cat > "$folder/ask.py" <<'PYTHON'
import asyncio
import json
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Annotated

CALL = {"index": 0, "id": "call_1", "type": "function"}
CALL["function"] = {"name": "calculator-multiply", "arguments": '{"a": 2, "b": 3}'}
TURNS = [
    {"role": "assistant", "content": "Let me see. ", "tool_calls": [CALL]},
    {"role": "assistant", "content": "It is 6."},
    {"role": "assistant", "content": "Yes."},
]
requests = []


class Model(BaseHTTPRequestHandler):
    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        turn = TURNS[len(requests)]
        requests.append(body)
        reason = "tool_calls" if "tool_calls" in turn else "stop"
        head = {"id": "1", "created": 0, "model": "policy"}
        if body.get("stream"):
            chunk = {**head, "object": "chat.completion.chunk"}
            whole = {"index": 0, "delta": turn, "finish_reason": None}
            end = {"index": 0, "delta": {}, "finish_reason": reason}
            lines = [json.dumps({**chunk, "choices": [each]}) for each in (whole, end)]
            text = "".join(f"data: {line}\n\n" for line in [*lines, "[DONE]"])
            kind = "text/event-stream"
        else:
            choice = {"index": 0, "message": turn, "finish_reason": reason}
            usage = {"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2}
            text = json.dumps(
                {**head, "object": "chat.completion", "choices": [choice], "usage": usage}
            )
            kind = "application/json"
        self.send_response(200)
        self.send_header("content-type", kind)
        self.send_header("content-length", str(len(text)))
        self.end_headers()
        self.wfile.write(text.encode())

    def log_message(self, *_):
        pass


server = ThreadingHTTPServer(("127.0.0.1", 0), Model)
threading.Thread(target=server.serve_forever, daemon=True).start()
from openai import AsyncOpenAI
from semantic_kernel import Kernel
from semantic_kernel.agents import ChatCompletionAgent
from semantic_kernel.connectors.ai.open_ai import OpenAIChatCompletion
from semantic_kernel.functions import kernel_function


class Calculator:
    @kernel_function(description="Multiply two numbers.", name="multiply")
    def multiply(self, a: Annotated[int, "the first"], b: Annotated[int, "the second"]) -> int:
        return a * b


async def main(is_streamed):
    address = f"http://127.0.0.1:{server.server_port}/v1"
    client = AsyncOpenAI(base_url=address, api_key="none")
    service = OpenAIChatCompletion(ai_model_id="policy", async_client=client)
    kernel = Kernel(services=[service])
    kernel.add_plugin(Calculator(), plugin_name="calculator")
    agent = ChatCompletionAgent(kernel=kernel, name="Calculator", instructions="Multiply.")
    thread = None
    for text in ("2 * 3?", "Really?"):
        if is_streamed:
            async for part in agent.invoke_stream(messages=text, thread=thread):
                thread = part.thread
        else:
            answer = await agent.get_response(messages=text, thread=thread)
            thread = answer.thread


asyncio.run(main(sys.argv[1] == "invoke_stream"))
sent = [each.get("content") for each in requests[-1]["messages"] if each["role"] == "assistant"]
print(f"{sys.argv[1]}: {sent}")
PYTHON
for method in get_response invoke_stream; do
  "$folder/venv/bin/python" "$folder/ask.py" "$method"
done | tee "$folder/out.txt"
diff "$folder/out.txt" - <<'EXPECTED'
get_response: [None, 'It is 6.']
invoke_stream: [None, 'Let me see. It is 6.']
EXPECTED
