"""A random chat model that makes tool calls: its vocabulary has whole ones. The docs' examples."""

import re
import string
from pathlib import Path

from transformers import AutoTokenizer, LlamaTokenizer

from easyrl.data.hub import resolve_model
from tiny_models import tiny_model

TEMPLATE = (
    "{% if tools %}{{ tools | map(attribute='function') | map(attribute='name') | join(',') }}\n"
    "{% endif %}{% for message in messages %}{% if message['role'] == 'assistant' %}"
    "A{{ message['content'] }}{% for call in message['tool_calls'] or [] %}"
    '<tool_call>{"name": "{{ call[\'function\'][\'name\'] }}", "arguments": '
    "{{ call['function']['arguments'] | tojson }}}</tool_call>{% endfor %}<eos>\n"
    "{% elif message['role'] == 'tool' %}T{{ message['content'] }}\n"
    "{% else %}U{{ message['content'] }}\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}A{% endif %}"
)
"""Lists the names of the tools; calls are in the format of Hermes."""


def call(name, arguments):
    return f'<tool_call>{{"name": "{name}", "arguments": {arguments}}}</tool_call>'


def chat_tokenizer(calls=(), template=TEMPLATE):
    tokenizer = AutoTokenizer.from_pretrained(resolve_model("tiny"))
    tokenizer.add_tokens([*calls])
    tokenizer.chat_template = template
    return tokenizer


def llama_tokenizer(**settings):
    """Make a tokenizer of Llama's kind with a token for each character."""
    letters = [*string.ascii_letters, *"[]/ \n▁"]
    names = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *letters]
    vocabulary = {name: number for number, name in enumerate(dict.fromkeys(names))}
    return LlamaTokenizer(vocab=vocabulary, merges=[], **settings)


def chat_model(folder, calls=(), template=TEMPLATE, context=1024):
    """Write a random model: every token is about as likely as every other. `context`: its longest
    sequence."""
    tokenizer = chat_tokenizer(calls, template)
    ends = {"eos_token_id": tokenizer.eos_token_id, "bos_token_id": None}
    sizes = {"vocab_size": len(tokenizer), "max_position_embeddings": context}
    model = tiny_model("qwen2", None, 0.05, 0, **sizes, **ends, tie_word_embeddings=False)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return str(folder)


def example(name, page="environments.md"):
    """Return the code of the page under the comment `# name`."""
    page = Path(__file__).parent.parent / "docs" / page
    start = r"^```\w+\n((?:#![^\n]*\n)?"
    found = re.search(rf"{start}# {re.escape(name)}\b.*?)^```", page.read_text(), re.M | re.S)
    assert found is not None
    return found[1]
