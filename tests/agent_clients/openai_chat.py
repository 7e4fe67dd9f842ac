"""The client of OpenAI: chat completions, streamed, with tools."""

import json
import sys

from openai import OpenAI

MULTIPLY = {
    "type": "function",
    "function": {
        "name": "multiply",
        "description": "Multiply two numbers.",
        "parameters": {
            "type": "object",
            "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}},
            "required": ["a", "b"],
        },
    },
}

client = OpenAI()
messages = [{"role": "user", "content": sys.argv[1]}]
for _ in range(5):
    with client.chat.completions.stream(
        model="policy", messages=messages, tools=[MULTIPLY]
    ) as stream:
        message = stream.get_final_completion().choices[0].message
    messages.append(message.model_dump(exclude_none=True))
    for call in message.tool_calls or ():
        numbers = json.loads(call.function.arguments)
        result = str(numbers["a"] * numbers["b"])
        messages.append({"role": "tool", "tool_call_id": call.id, "content": result})
    if not message.tool_calls:
        messages.append({"role": "user", "content": "Go on."})
print(1.0)
