"""The client of OpenAI: Responses, first with the items, then with the id of the one before."""

import json
import sys

from openai import OpenAI

MULTIPLY = {
    "type": "function",
    "name": "multiply",
    "description": "Multiply two numbers.",
    "parameters": {
        "type": "object",
        "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}},
        "required": ["a", "b"],
    },
}

client = OpenAI()
items = [{"role": "user", "content": sys.argv[1]}]
for _ in range(4):
    response = client.responses.create(model="policy", input=items, tools=[MULTIPLY])
    items += response.output
    for item in response.output:
        if item.type == "function_call":
            numbers = json.loads(item.arguments)
            result = str(numbers["a"] * numbers["b"])
            output = {"type": "function_call_output", "call_id": item.call_id, "output": result}
            items.append(output)
    items.append({"role": "user", "content": "Go on."})
print(1.0)
