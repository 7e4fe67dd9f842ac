"""litellm."""

import os
import sys

from litellm import completion

messages = [{"role": "user", "content": sys.argv[1]}]
for _ in range(4):
    answer = completion(
        model="openai/policy",
        messages=messages,
        api_base=os.environ["OPENAI_BASE_URL"],
        api_key=os.environ["OPENAI_API_KEY"],
        max_tokens=30,
    )
    messages.append(answer.choices[0].message.model_dump())
    messages.append({"role": "user", "content": "Go on."})
print(1.0)
