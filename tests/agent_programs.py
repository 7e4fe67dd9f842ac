"""Agents of whole runs: the game of `environments.guess`, with an OpenAI client or without."""

import json
import os
import signal
import sys
import urllib.request
from pathlib import Path

MAX_GUESSES = 12


def play(secret, ask):
    messages = [{"role": "user", "content": "0-99"}]
    for number in range(MAX_GUESSES):
        text = ask(messages)
        if not text.strip().isdecimal():
            return 0.0
        if int(text) == secret:
            return 1.0 - number / MAX_GUESSES
        messages.append({"role": "assistant", "content": text})
        messages.append({"role": "user", "content": "higher" if secret > int(text) else "lower"})
    return 0.0


def solve(row, client):
    def ask(messages):
        answer = client.chat.completions.create(model="policy", messages=messages)
        return answer.choices[0].message.content

    return play(row["secret"], ask)


def unlucky(row, client):
    """Kill the process of the agents, once."""
    reward = solve(row, client)
    try:
        (Path(os.environ["AGENT_FOLDER"]) / "killed").touch(exist_ok=False)
    except FileExistsError:
        return reward
    os.kill(os.getpid(), signal.SIGKILL)
    return reward


def calculate(row, base_url, api_key):
    from smolagents import OpenAIServerModel, ToolCallingAgent, tool

    @tool
    def multiply(a: int, b: int) -> int:
        """Multiply two numbers.

        Args:
            a: the first
            b: the second
        """
        return a * b

    model = OpenAIServerModel("policy", api_base=base_url, api_key=api_key)
    agent = ToolCallingAgent([multiply], model, max_steps=2, verbosity_level=0)
    answer = str(agent.run(f"What is {row['a']} * {row['b']}?"))
    return {"right": float(str(row["a"] * row["b"]) in answer), "length": -len(answer) / 1000}


def main():
    url, key = os.environ["OPENAI_BASE_URL"], os.environ["OPENAI_API_KEY"]

    def ask(messages):
        body = json.dumps({"messages": messages}).encode()
        headers = {"Authorization": f"Bearer {key}", "Content-Type": "application/json"}
        request = urllib.request.Request(f"{url}/chat/completions", body, headers)
        with urllib.request.urlopen(request) as response:
            return json.load(response)["choices"][0]["message"]["content"]

    reward = play(int(sys.argv[1]), ask)
    if reward > 0.5:
        Path(os.environ["EASYRL_REWARD_FILE"]).write_text(json.dumps({"found": reward}))
    print("done\n", reward or "null")


if __name__ == "__main__":
    main()
