"""The client of Anthropic, with tools."""

import sys

from anthropic import Anthropic

MULTIPLY = {
    "name": "multiply",
    "description": "Multiply two numbers.",
    "input_schema": {
        "type": "object",
        "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}},
        "required": ["a", "b"],
    },
}

client = Anthropic()
messages = [{"role": "user", "content": sys.argv[1]}]
for _ in range(4):
    with client.messages.stream(
        model="policy", max_tokens=60, messages=messages, tools=[MULTIPLY]
    ) as stream:
        message = stream.get_final_message()
    messages.append({"role": "assistant", "content": message.content})
    blocks = []
    for block in message.content:
        if block.type == "tool_use":
            result = str(block.input["a"] * block.input["b"])
            blocks.append({"type": "tool_result", "tool_use_id": block.id, "content": result})
    messages.append({"role": "user", "content": blocks or "Go on."})
print(1.0)
