// A calculator agent for Node 18 or newer, without dependencies: a problem on standard input, the answer on standard output.
//
//     OPENAI_BASE_URL=... OPENAI_API_KEY=... OPENAI_MODEL=... node agent.mjs <<< 'Ann has 23 apples and buys 14 more. How many apples now?'

const SYSTEM_PROMPT = "Solve the problem with the calculator, then answer with the number only.";
const CALCULATOR = {
  type: "function",
  function: {
    name: "calculator",
    description: "Evaluate an arithmetic expression.",
    parameters: {
      type: "object",
      properties: { expression: { type: "string" } },
      required: ["expression"],
    },
  },
};
const MAX_TURNS = 4;

/** Asks the model for the next message. */
async function complete(messages) {
  const response = await fetch(`${process.env.OPENAI_BASE_URL}/chat/completions`, {
    method: "POST",
    headers: { "Content-Type": "application/json", Authorization: `Bearer ${process.env.OPENAI_API_KEY}` },
    body: JSON.stringify({ model: process.env.OPENAI_MODEL, messages, tools: [CALCULATOR] }),
  });
  if (!response.ok) throw new Error(`the model answered ${response.status}: ${await response.text()}`);
  return (await response.json()).choices[0].message;
}

/** Runs the tool; a mistake of the model becomes a message to the model. */
function calculate(call) {
  let expression;
  try {
    ({ expression } = JSON.parse(call.arguments));
  } catch {
    expression = undefined;
  }
  const parts = /^ *(\d+(?:\.\d+)?) *([-+*/]) *(\d+(?:\.\d+)?) *$/.exec(expression ?? "");
  if (!parts) return "error: not an arithmetic expression";
  const [left, right] = [Number(parts[1]), Number(parts[3])];
  if (parts[2] === "/" && right === 0) return "error: division by zero";
  const value = { "+": left + right, "-": left - right, "*": left * right, "/": left / right }[parts[2]];
  return String(Number(value.toFixed(2)));
}

async function solve(problem) {
  const messages = [
    { role: "system", content: SYSTEM_PROMPT },
    { role: "user", content: problem },
  ];
  for (let turn = 0; turn < MAX_TURNS; turn++) {
    const reply = await complete(messages);
    if (!reply.tool_calls?.length) return reply.content ?? "";
    messages.push(reply);
    for (const call of reply.tool_calls) {
      messages.push({ role: "tool", tool_call_id: call.id, content: calculate(call.function) });
    }
  }
  return "";
}

let problem = "";
for await (const chunk of process.stdin) problem += chunk;
console.log(await solve(problem.trim()));
