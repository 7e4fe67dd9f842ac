// The AI SDK: its OpenAI provider, whose default is Responses, and the one for compatible servers.
import { createOpenAI } from "@ai-sdk/openai";
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { generateText, stepCountIs, tool } from "ai";
import { z } from "zod";

const baseURL = process.env.OPENAI_BASE_URL;
const apiKey = process.env.OPENAI_API_KEY;
const multiply = tool({
  description: "Multiply two numbers.",
  inputSchema: z.object({ a: z.number(), b: z.number() }),
  execute: async ({ a, b }) => a * b,
});
const models = [
  createOpenAI({ baseURL, apiKey })("policy"),
  createOpenAICompatible({ name: "easyrl", baseURL, apiKey })("policy"),
];
for (const model of models) {
  const messages = [{ role: "user", content: process.argv[2] }];
  for (let turn = 0; turn < 2; turn++) {
    const result = await generateText({
      model,
      messages,
      tools: { multiply },
      stopWhen: stepCountIs(3),
    });
    messages.push(...result.response.messages, { role: "user", content: "Go on." });
  }
}
console.log(1.0);
