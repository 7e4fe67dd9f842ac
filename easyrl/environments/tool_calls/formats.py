"""The known formats of tool calls, by name.

Calls with JSON (`json_formats`):

    hermes        <tool_call>{"name": "f", "arguments": {"x": 1}}</tool_call>
    llama3        {"name": "f", "parameters": {"x": 1}}; {"name": …}, the whole turn
    hunyuan       <tool_calls>[{"name": "f", "arguments": {"x": 1}}]</tool_calls>
    json_list     the same between other marks: <TOOLCALL>, <|tool_call|>, <|START_ACTION|>
    mistral       [TOOL_CALLS]f[ARGS]{"x": 1}, or [TOOL_CALLS][{"name": "f", …}]
    kimi_k2       <|tool_call_begin|>functions.f:0<|tool_call_argument_begin|>{"x": 1}<|tool_call_…
    deepseek_v3   <｜tool▁call▁begin｜>f<｜tool▁sep｜>{"x": 1}<｜tool▁call▁end｜>
    gpt_oss       <|channel|>commentary to=functions.f <|constrain|>json<|message|>{"x": 1}<|call|>

Calls with tags; a string is written between them as it is (`tag_formats`):

    qwen3_coder   <tool_call><function=f><parameter=x>1</parameter></function></tool_call>
    seed_oss      the same between <seed:tool_call> and </seed:tool_call>
    minimax_m2    <minimax:tool_call><invoke name="f"><parameter name="x">1</parameter></invoke>…
    muse_glimmer  <atem:function_calls><atem:invoke name="f"><atem:parameter name="x">1</atem:par…
    glm           <tool_call>f<arg_key>x</arg_key><arg_value>1</arg_value></tool_call>
    hy3           <tool_call>f<tool_sep><arg_key>x</arg_key><arg_value>1</arg_value></tool_call>

Calls with literals (`literal_formats`):

    gemma4        <|tool_call>call:f{x:1,s:<|"|>text<|"|>}<tool_call|>
    lfm2          <|tool_call_start|>[f(x=1, s='text')]<|tool_call_end|>
"""

from easyrl.environments.tool_calls.format import Format
from easyrl.environments.tool_calls.json_formats import (
    DEEPSEEK_V3,
    GPT_OSS,
    HERMES,
    HUNYUAN,
    JSON_LIST,
    KIMI_K2,
    LLAMA3,
    MISTRAL,
)
from easyrl.environments.tool_calls.literal_formats import GEMMA4, LFM2
from easyrl.environments.tool_calls.tag_formats import (
    GLM,
    HY3,
    MINIMAX_M2,
    MUSE_GLIMMER,
    QWEN3_CODER,
    SEED_OSS,
)

FORMATS: dict[str, Format] = {
    "seed_oss": SEED_OSS,
    "qwen3_coder": QWEN3_CODER,
    "glm": GLM,
    "minimax_m2": MINIMAX_M2,
    "muse_glimmer": MUSE_GLIMMER,
    "hy3": HY3,
    "gemma4": GEMMA4,
    "lfm2": LFM2,
    "gpt_oss": GPT_OSS,
    "kimi_k2": KIMI_K2,
    "deepseek_v3": DEEPSEEK_V3,
    "mistral": MISTRAL,
    "hunyuan": HUNYUAN,
    "json_list": JSON_LIST,
    "hermes": HERMES,
    "llama3": LLAMA3,
}
"""A template has the first format that reads its own call: later ones are more general."""
