"""pydantic-ai: chat completions, with a tool and an output type."""

import os
import sys

from pydantic import BaseModel
from pydantic_ai import Agent, NativeOutput, PromptedOutput
from pydantic_ai.exceptions import UnexpectedModelBehavior
from pydantic_ai.models.openai import OpenAIChatModel
from pydantic_ai.providers.openai import OpenAIProvider


class Product(BaseModel):
    """A product of two numbers."""

    value: int


provider = OpenAIProvider(
    base_url=os.environ["OPENAI_BASE_URL"], api_key=os.environ["OPENAI_API_KEY"]
)
model = OpenAIChatModel("policy", provider=provider)


def multiply(a: int, b: int) -> int:
    """Multiply two numbers."""
    return a * b


agent = Agent(model, instructions="Multiply.", tools=[multiply])
history = None
for _ in range(3):
    result = agent.run_sync(sys.argv[1], message_history=history)
    history = result.all_messages()
for output in (Product, NativeOutput(Product), PromptedOutput(Product)):
    typed = Agent(model, output_type=output, tools=[multiply], model_settings={"max_tokens": 30})
    try:
        typed.run_sync(sys.argv[1])
    except UnexpectedModelBehavior:  # its answers do not fit
        continue
print(1.0)
