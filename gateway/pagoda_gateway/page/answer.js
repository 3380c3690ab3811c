// An answer is the sum of its chunks, with their arrival times.

/** An empty message of the assistant. `asked` is the request without its messages; times are in milliseconds. */
export function newAnswer(asked, now) {
  return {
    id: crypto.randomUUID?.() ?? String(Math.random()).slice(2),
    role: "assistant", content: "", reasoning: "", calls: [], tokens: [],
    asked, begun: now, first: null, last: null, usage: null, finish: null, busy: true,
  };
}

/** Add a chunk that arrived at `now`. */
export function fold(answer, chunk, now) {
  answer.usage = chunk.usage ?? answer.usage;
  answer.request = chunk.id ?? answer.request;
  const choice = chunk.choices?.[0];
  if (!choice) return;
  const delta = choice.delta ?? {};
  const reasoning = delta.reasoning_content ?? delta.reasoning ?? "";
  answer.content += delta.content ?? "";
  answer.reasoning += reasoning;
  for (const call of delta.tool_calls ?? []) foldCall(answer.calls, call);
  answer.tokens.push(...(choice.logprobs?.content ?? []));
  answer.finish = choice.finish_reason ?? answer.finish;
  if (delta.content || reasoning || delta.tool_calls?.length || choice.logprobs?.content?.length) {
    answer.first ??= now;
    answer.last = now;
  }
}

function foldCall(calls, part) {
  calls[part.index] ??= { id: part.id, name: part.function?.name ?? "", arguments: "" };
  calls[part.index].arguments += part.function?.arguments ?? "";
}

/** Seconds to the first token and tokens per second after it; null if unknown. Tool calls arrive whole. */
export function speed(answer) {
  const ttft = answer.first === null ? null : (answer.first - answer.begun) / 1000;
  const gaps = (answer.usage?.completion_tokens ?? 0) - 1;
  const spent = (answer.last - answer.first) / 1000;
  return { ttft, perSecond: gaps > 0 && spent > 0 && !answer.calls.length ? gaps / spent : null };
}

/** A message as the API takes it; reasoning is not sent back, as most templates drop it. */
export function asSent(message) {
  if (message.role === "tool") return { role: "tool", tool_call_id: message.call, content: message.content };
  if (!message.calls?.length) return { role: message.role, content: message.content };
  const calls = message.calls.map((call) => (
    { id: call.id, type: "function", function: { name: call.name, arguments: call.arguments } }));
  return { role: "assistant", content: message.content || null, tool_calls: calls };
}
