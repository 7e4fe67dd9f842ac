"""langchain's agent, which is a graph of langgraph."""

import sys

from langchain.agents import create_agent
from langchain_openai import ChatOpenAI
from langgraph.errors import GraphRecursionError


def multiply(a: int, b: int) -> int:
    """Multiply two numbers."""
    return a * b


agent = create_agent(ChatOpenAI(model="policy"), tools=[multiply], system_prompt="Multiply.")
messages = [{"role": "user", "content": sys.argv[1]}]
for _ in range(3):
    try:
        state = agent.invoke({"messages": messages}, {"recursion_limit": 8})
    except GraphRecursionError:
        break
    messages = [*state["messages"], {"role": "user", "content": "Go on."}]
print(1.0)
