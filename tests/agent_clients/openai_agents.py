"""openai-agents: its default is the Responses protocol."""

import sys

from agents import Agent, Runner, function_tool, set_tracing_disabled
from agents.exceptions import MaxTurnsExceeded

set_tracing_disabled(True)


@function_tool
def multiply(a: int, b: int) -> int:
    """Multiply two numbers."""
    return a * b


agent = Agent(name="Calculator", instructions="Multiply.", tools=[multiply], model="policy")
history = sys.argv[1]
for _ in range(3):
    try:
        result = Runner.run_sync(agent, history, max_turns=4)
    except MaxTurnsExceeded:
        break
    history = [*result.to_input_list(), {"role": "user", "content": "Go on."}]
print(1.0)
