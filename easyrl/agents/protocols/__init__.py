"""The protocols in which agents ask: all are forms of the same conversation.

    body ──read()──► Request (chat messages, tools, limits) ──► Answer ──write(), stream()──► body

    chat        OpenAI's chat completions and text completions
    responses   OpenAI's Responses
    messages    Anthropic's Messages

A conversation has OpenAI's chat form everywhere else: messages with `role`, `content`,
`reasoning_content`, `tool_calls` and `tool_call_id`.
"""
