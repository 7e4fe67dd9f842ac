// The client of OpenAI for JavaScript: chat completions, streamed, with tools.
import OpenAI from "openai";

const multiply = {
  type: "function",
  function: {
    name: "multiply",
    description: "Multiply two numbers.",
    parameters: {
      type: "object",
      properties: { a: { type: "integer" }, b: { type: "integer" } },
      required: ["a", "b"],
    },
  },
};
const client = new OpenAI();
const messages = [{ role: "user", content: process.argv[2] }];
for (let turn = 0; turn < 5; turn++) {
  const stream = client.chat.completions.stream({ model: "policy", messages, tools: [multiply] });
  const { message } = (await stream.finalChatCompletion()).choices[0];
  messages.push(message);
  for (const call of message.tool_calls ?? []) {
    const { a, b } = JSON.parse(call.function.arguments);
    messages.push({ role: "tool", tool_call_id: call.id, content: String(a * b) });
  }
  if (!message.tool_calls?.length) messages.push({ role: "user", content: "Go on." });
}
console.log(1.0);
