// A message on the page. All of its text is in text nodes.

import { button, copyButton, h } from "./dom.js";
import { count, rate, seconds } from "./format.js";
import { markdown } from "./markdown.js";
import { speed } from "./answer.js";
import { tokenView } from "./tokens.js";

const NAMES = { user: "You", assistant: "Answer", tool: "Result of a tool" };
const ENDS = { length: "cut off by the limit of tokens", stopped: "stopped", tool_calls: "calls tools" };

/** `actions` are the actions on a message, each a function of it. */
export class MessageView {
  constructor(message, actions) {
    this.message = message;
    this.actions = actions;
    this.body = h("div", { class: "body" });
    this.foot = h("div", { class: "foot" });
    const label = NAMES[message.role];
    this.element = h("article", { class: `message ${message.role}`, "aria-label": label, tabIndex: -1 },
      h("h2", { class: "hidden" }, label), this.body, this.foot);
    this.showsTokens = true;
    this.opened = false;
    this.update();
  }

  /** Show the message as it is now. */
  update() {
    const { message } = this;
    this.body.replaceChildren(...[
      message.reasoning && this.reasoning(),
      ...this.content(),
      ...(message.calls ?? []).map(callView),
      message.busy && !message.content && !message.reasoning && h("p", { class: "waiting" }, "Waiting for the first token"),
      message.error && errorView(message.error, () => this.actions.again(message), this.actions.key),
    ].filter(Boolean));
    this.foot.replaceChildren(...this.figures(), this.buttons());
    this.element.classList.toggle("busy", Boolean(message.busy));
    this.element.ariaBusy = String(Boolean(message.busy));
  }

  reasoning() {
    const { message } = this;
    const label = message.busy && !message.content ? "Reasoning…" : "Reasoning";
    const node = h("details", { class: "reasoning", open: this.opened }, h("summary", {}, label),
      h("div", { class: "prose" }, markdown(message.reasoning)));
    node.addEventListener("toggle", () => (this.opened = node.open));
    return node;
  }

  content() {
    const { message } = this;
    if (!message.content) return [];
    if (message.role !== "assistant") return [h("div", { class: "plain" }, message.content)];
    if (this.hasTokens && this.showsTokens) return [tokenView(message.tokens)];
    return [h("div", { class: "prose" }, markdown(message.content))];
  }

  get hasTokens() {
    return Boolean(this.message.tokens?.length) && !this.message.busy;
  }

  figures() {
    const { message } = this;
    if (message.role !== "assistant" || message.begun === undefined) return [];
    const { ttft, perSecond } = speed(message);
    const usage = message.usage;
    const cached = usage?.prompt_tokens_details?.cached_tokens;
    const parts = [
      ttft !== null && `first token after ${seconds(ttft)}`,
      perSecond !== null && `${rate(perSecond)} tokens/s`,
      usage && `${count(usage.prompt_tokens)} in${cached ? ` (${count(cached)} cached)` : ""}, ${count(usage.completion_tokens)} out`,
      ENDS[message.finish],
    ].filter(Boolean);
    return [h("span", { class: "figures" }, parts.join(" · "))];
  }

  buttons() {
    const { message, actions } = this;
    if (message.busy) return h("span", { class: "actions" });
    const isAnswer = message.role === "assistant";
    const tokens = isAnswer && this.hasTokens && button(this.showsTokens ? "Text" : "Tokens", () => {
      this.showsTokens = !this.showsTokens;
      this.update();
    });
    return h("span", { class: "actions" },
      tokens,
      message.content && copyButton(() => message.content),
      isAnswer && !message.error && button("Regenerate", () => actions.again(message)),
      !message.error && button("Edit", () => this.edit()),
      isAnswer && message.asked && button("Code", () => actions.code(message)),
      button("Delete", () => actions.remove(message)));
  }

  edit() {
    const { message, actions } = this;
    const input = h("textarea", { class: "edit", value: message.content, "aria-label": `Edit: ${NAMES[message.role]}` });
    input.rows = Math.min(16, message.content.split("\n").length + 1);
    const leave = () => {
      this.update();
      this.element.focus();
    };
    const save = () => actions.edit(message, input.value, false);
    const send = () => actions.edit(message, input.value, true);
    input.addEventListener("keydown", (event) => {
      if (event.key === "Escape") leave();
      if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) (message.role === "user" ? send : save)();
    });
    this.body.replaceChildren(input);
    this.foot.replaceChildren(h("span", { class: "actions" },
      message.role === "user" && button("Send again", send, "primary"),
      button("Save", save, ""), button("Cancel", leave)));
    input.focus();
  }
}

function callView(call) {
  return h("div", { class: "call" }, h("span", { class: "call-name" }, "calls ", h("code", {}, call.name)),
    h("pre", { tabIndex: 0, role: "region", "aria-label": `Arguments of ${call.name}` }, h("code", {}, pretty(call.arguments))));
}

function pretty(text) {
  try {
    return JSON.stringify(JSON.parse(text), null, 2);
  } catch {
    return text; // not complete yet, or not JSON: shown unchanged
  }
}

/** The server's error, unchanged. */
export function errorView(error, again, key) {
  const facts = [error.status && `status ${error.status}`, error.code, error.param && `field ${error.param}`].filter(Boolean);
  return h("div", { class: "error", role: "alert" },
    h("p", { class: "error-message" }, error.message),
    facts.length ? h("p", { class: "error-facts" }, facts.join(" · ")) : null,
    h("div", { class: "error-actions" },
      error.status === 401 && key && button("Give an API key", key, ""),
      again && button("Try again", again, "")));
}

/** The form for tool results of an answer's calls. */
export function resultsForm(calls, send) {
  const inputs = calls.map((call) => h("textarea", { rows: 2, class: "code", id: `result-${call.id}` }));
  const fields = calls.map((call, i) => h("div", { class: "field" },
    h("label", { for: `result-${call.id}` }, "Result of ", h("code", {}, call.name)), inputs[i]));
  const submit = (event) => {
    event.preventDefault();
    send(calls.map((call, i) => ({ role: "tool", call: call.id, content: inputs[i].value })));
  };
  return h("form", { class: "results", onsubmit: submit, "aria-label": "Results of tools" }, fields,
    h("div", { class: "row" }, h("button", { class: "primary" }, "Send results")));
}
