// All requests of this page go to the server it came from, with the key if there is one.

import { apiKey } from "./storage.js";

/** An error of the server, unchanged. `status` is 0 if the server could not be reached. */
export class ApiError extends Error {
  constructor(status, message, detail = {}) {
    super(message);
    this.status = status;
    this.detail = detail;
  }
}

/** The part of an error that is shown, and stored with a message. */
export function factsOf(error) {
  const detail = error instanceof ApiError ? error.detail : {};
  return { message: error.message, status: error.status ?? 0, code: detail.code, param: detail.param };
}

export const urlOf = (path) => new URL(path, document.baseURI.split("#")[0]).href;

async function ask(path, options = {}) {
  const key = apiKey.get();
  const headers = { ...options.headers, ...(key ? { authorization: `Bearer ${key}` } : {}) };
  let response;
  try {
    response = await fetch(urlOf(path), { ...options, headers, credentials: "omit" });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new ApiError(0, `The server cannot be reached: ${error.message}`);
  }
  if (!response.ok) throw await refusal(response);
  return response;
}

async function refusal(response) {
  const text = await response.text();
  try {
    const { error } = JSON.parse(text);
    return new ApiError(response.status, error.message, error);
  } catch {
    return new ApiError(response.status, text || response.statusText || `status ${response.status}`);
  }
}

export async function getJson(path, signal) {
  return (await ask(path, { signal })).json();
}

/** Chunks of an answer as they arrive. Throws ApiError, also if the stream is cut off. */
export async function* streamChat(body, signal) {
  const options = { method: "POST", headers: { "content-type": "application/json" }, body: JSON.stringify(body), signal };
  const response = await ask("v1/chat/completions", options);
  for await (const data of events(response.body)) {
    if (data === "[DONE]") return;
    const chunk = JSON.parse(data);
    if (chunk.error) throw new ApiError(response.status, chunk.error.message, chunk.error);
    yield chunk;
  }
  throw new ApiError(0, "The stream ended before the answer did.");
}

/** The data of server-sent events; comments are ignored. */
export async function* events(stream) {
  const reader = stream.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  try {
    for (;;) {
      const { value, done } = await reader.read().catch(lost);
      if (done) return;
      const parts = (rest + value).split(/\r?\n\r?\n/);
      rest = parts.pop();
      for (const part of parts) {
        const lines = part.split(/\r?\n/).filter((line) => line.startsWith("data:"));
        if (lines.length) yield lines.map((line) => line.slice(5).replace(/^ /, "")).join("\n");
      }
    }
  } finally {
    reader.cancel().catch(() => {});
  }
}

function lost(error) {
  if (error.name === "AbortError") throw error;
  throw new ApiError(0, `The connection was lost: ${error.message}`);
}
