"""autogen, whose reflection on tools is a turn without them."""

import asyncio
import os
import sys

from autogen_agentchat.agents import AssistantAgent
from autogen_ext.models.openai import OpenAIChatCompletionClient


async def multiply(a: int, b: int) -> int:
    """Multiply two numbers."""
    return a * b


async def main():
    client = OpenAIChatCompletionClient(
        model="policy",
        base_url=os.environ["OPENAI_BASE_URL"],
        api_key=os.environ["OPENAI_API_KEY"],
        model_info={
            "vision": False,
            "function_calling": True,
            "json_output": True,
            "family": "unknown",
            "structured_output": True,
        },
    )
    agent = AssistantAgent(
        "calculator",
        model_client=client,
        tools=[multiply],
        reflect_on_tool_use=True,
        max_tool_iterations=3,
    )
    for _ in range(3):
        await agent.run(task=sys.argv[1])


asyncio.run(main())
print(1.0)
