// The client of Anthropic for JavaScript.
import Anthropic from "@anthropic-ai/sdk";

const client = new Anthropic();
const messages = [{ role: "user", content: process.argv[2] }];
for (let turn = 0; turn < 4; turn++) {
  const stream = client.messages.stream({ model: "policy", max_tokens: 30, messages });
  const { content } = await stream.finalMessage();
  messages.push({ role: "assistant", content }, { role: "user", content: "Go on." });
}
console.log(1.0);
