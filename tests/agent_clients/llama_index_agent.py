"""llama-index, streamed as it does by itself."""

import asyncio
import os
import sys

from llama_index.core.agent.workflow import FunctionAgent
from llama_index.core.workflow import Context
from llama_index.llms.openai_like import OpenAILike


def multiply(a: int, b: int) -> int:
    """Multiply two numbers."""
    return a * b


async def main():
    llm = OpenAILike(
        model="policy",
        api_base=os.environ["OPENAI_BASE_URL"],
        api_key=os.environ["OPENAI_API_KEY"],
        is_chat_model=True,
        is_function_calling_model=True,
    )
    agent = FunctionAgent(tools=[multiply], llm=llm, system_prompt="Multiply.")
    context = Context(agent)
    for _ in range(3):
        try:
            await agent.run(sys.argv[1], ctx=context, max_iterations=4)
        except Exception as error:
            if "max iterations" not in str(error).lower():
                raise
            break


asyncio.run(main())
print(1.0)
