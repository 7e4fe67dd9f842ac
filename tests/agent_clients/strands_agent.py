"""strands."""

import os
import sys

from strands import Agent, tool
from strands.models.openai import OpenAIModel


@tool
def multiply(a: int, b: int) -> int:
    """Multiply two numbers.

    Args:
        a: the first
        b: the second
    """
    return a * b


model = OpenAIModel(
    client_args={
        "base_url": os.environ["OPENAI_BASE_URL"],
        "api_key": os.environ["OPENAI_API_KEY"],
    },
    model_id="policy",
    params={"max_tokens": 60},
)
agent = Agent(model=model, tools=[multiply], system_prompt="Multiply.", callback_handler=None)
for _ in range(3):
    try:
        agent(sys.argv[1])
    except Exception as error:  # an answer that was cut off
        if "max_tokens" not in str(error).lower() and "MaxTokens" not in type(error).__name__:
            raise
print(1.0)
