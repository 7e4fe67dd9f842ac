"""Tool calls: read what a model writes as a call, by the format of its chat template.

text of a turn ─► `formats`: what is written ─► `arguments`: the tool's schema ─► ToolCall
                                                                               or BadCall
calls            reads a turn: finds the calls in it, and skips thoughts
probe            finds the format of a chat template
formats          the known formats; `json_formats`, `tag_formats` and `literal_formats` have
                 their readers, `format` what these have in common
arguments        compares arguments with the JSON schema of the tool
values           reads JSON and Python literals
"""

from easyrl.environments.tool_calls.calls import (
    BadCall,
    Calls,
    ToolCall,
    Turn,
    read_calls,
    read_turn,
)

__all__ = ["BadCall", "Calls", "ToolCall", "Turn", "read_calls", "read_turn"]
