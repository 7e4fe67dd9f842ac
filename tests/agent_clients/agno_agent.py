"""agno."""

import os
import sys

from agno.agent import Agent
from agno.db.in_memory import InMemoryDb
from agno.models.openai.like import OpenAILike


def multiply(a: int, b: int) -> str:
    """Multiply two numbers."""
    return str(a * b)


model = OpenAILike(
    id="policy", base_url=os.environ["OPENAI_BASE_URL"], api_key=os.environ["OPENAI_API_KEY"]
)
agent = Agent(
    model=model,
    tools=[multiply],
    db=InMemoryDb(),
    add_history_to_context=True,
    instructions="Multiply.",
    telemetry=False,
)
for _ in range(3):
    agent.run(sys.argv[1], session_id="one")
print(1.0)
