"""smolagents: the agent that calls tools."""

import os
import sys

from smolagents import OpenAIServerModel, ToolCallingAgent, tool


@tool
def multiply(a: int, b: int) -> int:
    """Multiply two numbers.

    Args:
        a: the first
        b: the second
    """
    return a * b


model = OpenAIServerModel(
    "policy", api_base=os.environ["OPENAI_BASE_URL"], api_key=os.environ["OPENAI_API_KEY"]
)
agent = ToolCallingAgent([multiply], model, max_steps=4, verbosity_level=0)
agent.run(sys.argv[1])
print(1.0)
