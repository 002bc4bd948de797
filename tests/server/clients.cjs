// What people do with OpenAI's client for Node: `node tests/server/clients.cjs URL`; NODE_PATH says where it is installed.
const assert = require("node:assert");
const OpenAI = require("openai");

const MODEL = "tiny";
const SHORT = { model: MODEL, max_tokens: 6, temperature: 0 };
const LONG = { ...SHORT, max_tokens: 200 };
const TURN = { role: "user", content: "Hi" };
const PICK = { type: "object", properties: { city: { enum: ["Rome", "Oslo"] } }, required: ["city"] };
const TOOL = { type: "function", function: { name: "pick", description: "Pick.", parameters: PICK } };

async function main(url) {
  const client = new (OpenAI.OpenAI ?? OpenAI)({ baseURL: `${url}/v1`, apiKey: "none", maxRetries: 0 });
  const chat = client.chat.completions;
  const first = await chat.create({ ...SHORT, messages: [TURN], store: false });
  const history = [TURN, first.choices[0].message, TURN];
  const stream = await chat.create({ ...SHORT, messages: history, stream: true, stream_options: { include_usage: true } });
  let text = "", usage = null;
  for await (const chunk of stream) {
    text += chunk.choices[0]?.delta?.content ?? "";
    usage = chunk.usage ?? usage;
  }
  assert.ok(text.length > 0 && usage.completion_tokens === SHORT.max_tokens);
  const called = await chat.create({ ...LONG, messages: [TURN], tools: [TOOL], tool_choice: "required" });
  const call = called.choices[0].message.tool_calls[0];
  assert.ok(["Rome", "Oslo"].includes(JSON.parse(call.function.arguments).city));
  const result = { role: "tool", tool_call_id: call.id, content: "ok" };
  const last = await chat.create({ ...SHORT, messages: [TURN, called.choices[0].message, result], tools: [TOOL] });
  assert.ok(last.usage.total_tokens > 0);
  const runner = chat.stream({ ...SHORT, messages: [TURN] }); // the helper that puts chunks together
  assert.strictEqual((await runner.finalChatCompletion()).choices[0].finish_reason, "length");
  assert.strictEqual((await client.embeddings.create({ model: MODEL, input: ["a", "b"] })).data.length, 2);
  console.log(`openai-node ${require("openai/version").VERSION}`);
}

main(process.argv[2]).catch((error) => { console.error(error); process.exit(1); });
