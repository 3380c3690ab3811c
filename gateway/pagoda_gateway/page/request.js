// Builds a request from settings and messages, and the code that makes the same request.

export const NUMBERS = [
  ["temperature", "Temperature"], ["top_p", "Top p"], ["top_k", "Top k"], ["min_p", "Min p"],
  ["max_tokens", "Max tokens"], ["seed", "Seed"], ["presence_penalty", "Presence penalty"],
  ["frequency_penalty", "Frequency penalty"], ["repetition_penalty", "Repetition penalty"],
];

/** A setting that does not parse, so that it cannot be sent to the server. */
export class SettingsError extends Error {
  constructor(field, message) {
    super(message);
    this.field = field;
  }
}

function number(name, text) {
  const value = Number(text);
  if (!Number.isFinite(value)) throw new SettingsError(name, `${text} is no number`);
  const whole = Number.isInteger(value);
  if (whole && !Number.isSafeInteger(value)) throw new SettingsError(name, "a browser counts to 2^53 only");
  return value;
}

export function parsed(name, text) {
  try {
    return JSON.parse(text);
  } catch (error) {
    throw new SettingsError(name, `This is not JSON: ${error.message}`);
  }
}

const UNESCAPED = { "\\n": "\n", "\\t": "\t", "\\\\": "\\" };
const unescape = (line) => line.replace(/\\[nt\\]/g, (pair) => UNESCAPED[pair]);

/** The body's fields besides model and messages. The server checks ranges. Throws SettingsError. */
export function fieldsOf(settings) {
  const fields = {};
  for (const [name] of NUMBERS) {
    const text = (settings[name] ?? "").trim();
    if (text) fields[name] = number(name, text);
  }
  const stop = (settings.stop ?? "").split("\n").filter(Boolean).map(unescape);
  if (stop.length) fields.stop = stop;
  if (settings.logprobs) {
    fields.logprobs = true;
    fields.top_logprobs = number("top_logprobs", (settings.top_logprobs ?? "").trim() || "5");
  }
  if (settings.format === "json_object") fields.response_format = { type: "json_object" };
  if (settings.format === "json_schema") {
    const schema = parsed("schema", settings.schema ?? "");
    fields.response_format = { type: "json_schema", json_schema: { name: "answer", schema } };
  }
  if (settings.use_tools) fields.tools = parsed("tools", settings.tools ?? "");
  const extra = (settings.extra ?? "").trim();
  return extra ? { ...fields, ...parsed("extra", extra) } : fields;
}

/** `messages` as the API takes them. Throws SettingsError. */
export function bodyOf(settings, model, messages) {
  const system = (settings.system ?? "").trim() ? [{ role: "system", content: settings.system }] : [];
  return {
    ...(model ? { model } : {}),
    messages: [...system, ...messages],
    stream: true,
    stream_options: { include_usage: true },
    ...fieldsOf(settings),
  };
}

const inShell = (text) => `'${text.replaceAll("'", "'\\''")}'`;

function curl(url, body, keyed) {
  const lines = [`curl -N ${inShell(url)}`, "-H 'content-type: application/json'"];
  if (keyed) lines.push('-H "authorization: Bearer $PAGODA_API_KEY"');
  return [...lines, `-d ${inShell(JSON.stringify(body, null, 2))}`].join(" \\\n  ");
}

/** A value as a Python literal. */
export function inPython(value, indent = "") {
  if (value === null) return "None";
  if (value === true) return "True";
  if (value === false) return "False";
  if (typeof value !== "object") return JSON.stringify(value);
  const inner = `${indent}    `;
  const items = Array.isArray(value)
    ? value.map((item) => inPython(item, inner))
    : Object.entries(value).map(([name, item]) => `${JSON.stringify(name)}: ${inPython(item, inner)}`);
  const [open, close] = Array.isArray(value) ? "[]" : "{}";
  return items.length ? `${open}\n${items.map((item) => `${inner}${item},\n`).join("")}${indent}${close}` : open + close;
}

const OF_OPENAI = new Set([
  "model", "messages", "stream", "stream_options", "temperature", "top_p", "max_tokens", "seed", "presence_penalty",
  "frequency_penalty", "stop", "logprobs", "top_logprobs", "response_format", "tools",
]);

function python(url, body, keyed) {
  const own = Object.entries(body).filter(([name]) => OF_OPENAI.has(name));
  const others = Object.fromEntries(Object.entries(body).filter(([name]) => !OF_OPENAI.has(name)));
  const given = own.map(([name, value]) => `    ${name}=${inPython(value, "    ")},`);
  if (Object.keys(others).length) given.push(`    extra_body=${inPython(others, "    ")},`);
  return [
    ...(keyed ? ["import os", ""] : []),
    "from openai import OpenAI", "",
    `client = OpenAI(base_url=${JSON.stringify(url.replace("/chat/completions", ""))}, ` +
      `api_key=${keyed ? 'os.environ["PAGODA_API_KEY"]' : '"none"'})`,
    "stream = client.chat.completions.create(", ...given, ")",
    "for chunk in stream:",
    "    if chunk.choices:",
    '        print(chunk.choices[0].delta.content or "", end="", flush=True)',
  ].join("\n");
}

function javascript(url, body, keyed) {
  const key = keyed ? ", authorization: `Bearer ${process.env.PAGODA_API_KEY}`" : "";
  return [
    `const response = await fetch(${JSON.stringify(url)}, {`,
    '  method: "POST",',
    `  headers: { "content-type": "application/json"${key} },`,
    `  body: JSON.stringify(${JSON.stringify(body, null, 2).replaceAll("\n", "\n  ")}),`,
    "});",
    "let rest = \"\";",
    "for await (const text of response.body.pipeThrough(new TextDecoderStream())) {",
    '  const lines = (rest + text).split("\\n");',
    "  rest = lines.pop();",
    "  for (const line of lines) {",
    '    if (!line.startsWith("data: ") || line === "data: [DONE]") continue;',
    "    const chunk = JSON.parse(line.slice(6));",
    '    process.stdout.write(chunk.choices[0]?.delta.content ?? "");',
    "  }",
    "}",
  ].join("\n");
}

export const LANGUAGES = { curl, Python: python, JavaScript: javascript };
