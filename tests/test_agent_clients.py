"""Programs of agent libraries, as their own first examples are written, trained as commands. Each
library is installed in an environment of its own: `make test-agents`."""

import os
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import pytest

from runs import assert_on_policy, lines_of, succeed, write_rows
from tool_models import call, chat_model

CLIENTS = Path(__file__).parent / "agent_clients"
ENVIRONMENTS = Path(os.environ.get("EASYRL_AGENT_CLIENTS", "build/agent_clients")).resolve()
CALLS = [call("multiply", f'{{"a": {a}, "b": {b}}}') for a in (2, 3) for b in (4, 5)]


class Library(NamedTuple):
    """What is installed together, and the programs that are run with it."""

    requirements: tuple[str, ...]
    programs: dict[str, set[str]]
    """By file: reasons why a turn may begin a branch."""


LIBRARIES = {
    "openai": Library(
        ("openai==3.57.0", "anthropic==2.14.0"),
        {"openai_chat.py": set(), "openai_responses.py": set(), "anthropic_messages.py": set()},
    ),
    "openai_agents": Library(("openai-agents==0.24.0",), {"openai_agents.py": set()}),
    "langchain": Library(
        ("langchain==1.5.2", "langgraph==1.2.24", "langchain-openai==1.7.4"),
        {"langchain_agent.py": set(), "langchain_structured.py": set()},
    ),
    "pydantic_ai": Library(("pydantic-ai-slim[openai]==2.68.0",), {"pydantic_ai_agent.py": set()}),
    "strands": Library(("strands-agents[openai]==1.62.0",), {"strands_agent.py": set()}),
    "agno": Library(("agno==3.1.10", "openai==3.57.0"), {"agno_agent.py": set()}),
    "autogen": Library(
        ("autogen-agentchat==0.7.5", "autogen-ext[openai]==0.7.5"), {"autogen_agent.py": set()}
    ),
    "llama_index": Library(
        ("llama-index-core==0.14.25", "llama-index-llms-openai-like==0.8.1"),
        {"llama_index_agent.py": set()},
    ),
    "smolagents": Library(
        ("smolagents[openai]==1.26.0",),
        # Its last request has another system message.
        {"smolagents_tools.py": {"messages"}, "smolagents_code.py": {"messages"}},
    ),
    "instructor": Library(("instructor==1.17.0",), {"instructor_model.py": set()}),
    "dspy": Library(("dspy==3.4.1",), {"dspy_program.py": set()}),
    "litellm": Library(("litellm==1.110.2",), {"litellm_completion.py": set()}),
}
PACKAGES = {
    "javascript": Library(
        (
            "openai@6.49.0",
            "ai@6",
            "@ai-sdk/openai@3",
            "@ai-sdk/openai-compatible@2",
            "zod@4",
            "@anthropic-ai/sdk@1",
        ),
        {"openai.mjs": set(), "ai_sdk.mjs": set(), "anthropic.mjs": set()},
    )
}


def programs(libraries):
    return [(name, program) for name, library in libraries.items() for program in library.programs]


def python_with(name):
    """Return the interpreter of an environment, which is made once."""
    folder = ENVIRONMENTS / name
    interpreter = folder / "bin" / "python"
    if not (folder / "installed").exists():
        subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True)
        install = [str(interpreter), "-m", "pip", "install", "--quiet"]
        subprocess.run([*install, *LIBRARIES[name].requirements], check=True)
        (folder / "installed").touch()
    return interpreter


def train(command, folder):
    """Train an agent for an iteration; return what its episodes were like."""
    model = chat_model(folder / "model", CALLS, context=32768)
    questions = [{"question": f"What is {a} * 7?"} for a in (12, 13)]
    rows = write_rows(folder / "rows.jsonl", questions)
    words = ["--model", model, "--dataset", str(rows), "--iterations", "1", "--no-live"]
    words += ["--agent", f"{command} {{question}}", "rollout.agent_sampling=ignore"]
    words += ["rollout.num_generations=2", "rollout.max_turns=40", "reward.on_error=stop"]
    reward = folder / "reward.py"  # not all episodes have the same
    reward.write_text("def length(completions, **_): return [len(str(c)) for c in completions]\n")
    words += ["--reward", f"{reward}:length"]
    words += ["train.prompts_per_iteration=2", "train.save_every=9", "data.num_held_out=0"]
    words += ["data.max_prompt_length=20000", "rollout.max_completion_length=4000"]
    run = folder / "run"
    succeed(*words, "--output", str(run), timeout=900)
    assert_on_policy(run)
    samples = lines_of(run / "samples.jsonl")
    reasons = {reason for each in samples for reason in each.get("branch_reasons", {})}
    (line,) = lines_of(run / "metrics.jsonl")
    print(f"turns {line['episodes/turns']}, sequences {line['episodes/branches']}, {reasons or ''}")
    assert {each["ended_by"] for each in samples} <= {"answer", "length"}
    return reasons


@pytest.mark.agents
@pytest.mark.long
@pytest.mark.parametrize(("name", "program"), programs(LIBRARIES))
def test_a_program_of_a_library_is_trained_as_it_is(name, program, tmp_path):
    words = [str(python_with(name)), str(CLIENTS / program)]
    found = train(shlex.join(words), tmp_path)
    assert found <= LIBRARIES[name].programs[program]


@pytest.mark.agents
@pytest.mark.long
@pytest.mark.skipif(shutil.which("npm") is None, reason="needs npm")
@pytest.mark.parametrize(("name", "program"), programs(PACKAGES))
def test_a_program_in_javascript_is_trained_as_it_is(name, program, tmp_path):
    folder = ENVIRONMENTS / name
    if not (folder / "node_modules").exists():
        folder.mkdir(parents=True)
        install = ["npm", "install", "--silent", "--prefix", str(folder)]
        subprocess.run([*install, *PACKAGES[name].requirements], check=True)
    shutil.copy(CLIENTS / program, folder)  # node looks for packages beside the program
    found = train(shlex.join(["node", str(folder / program)]), tmp_path)
    assert found <= PACKAGES[name].programs[program]
