"""smolagents: the agent that writes code."""

import os
import sys

from smolagents import CodeAgent, OpenAIServerModel

model = OpenAIServerModel(
    "policy", api_base=os.environ["OPENAI_BASE_URL"], api_key=os.environ["OPENAI_API_KEY"]
)
agent = CodeAgent([], model, max_steps=11, verbosity_level=0)
agent.run(sys.argv[1])
print(1.0)
