// Conversations, and the answers being received; each conversation has at most one.

import { factsOf, streamChat } from "./api.js";
import { MessageView, resultsForm } from "./message.js";
import { SettingsError, bodyOf } from "./request.js";
import { asSent, fold, newAnswer } from "./answer.js";
import { askKey, confirmed, showCode } from "./dialogs.js";
import { button, byId, h, say } from "./dom.js";
import { conversations as kept } from "./storage.js";

const newId = () => crypto.randomUUID?.() ?? `${Date.now()}-${String(Math.random()).slice(2)}`;
const TITLE_CHARS = 60;

export class Chat {
  /** `model` returns the model to ask; `onKey` is called when the key has changed. */
  constructor(settings, model, onKey) {
    this.settings = settings;
    this.model = model;
    this.onKey = onKey;
    this.all = kept.all();
    this.runs = new Map(); // conversation -> the abort controller of its answer
    this.views = new WeakMap(); // message -> its view
    this.actions = {
      again: (message) => this.again(message),
      edit: (message, text, send) => this.edit(message, text, send),
      remove: (message) => this.removeMessage(message),
      code: (message) => showCode(this.bodyFor(message)),
      key: () => this.giveKey(),
    };
    this.listen();
    this.open(this.all[0] ?? this.begin());
  }

  listen() {
    byId("new").addEventListener("click", () => this.open(this.begin()));
    byId("clear").addEventListener("click", () => this.clear());
    byId("stop").addEventListener("click", () => this.runs.get(this.current)?.abort());
    byId("code").addEventListener("click", () => this.showDraftAsCode());
    byId("composer").addEventListener("submit", (event) => {
      event.preventDefault();
      this.send();
    });
    byId("draft").addEventListener("keydown", (event) => {
      if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
      event.preventDefault();
      this.send();
    });
    byId("draft").addEventListener("input", () => this.showComposer());
    byId("messages").addEventListener("scroll", () => this.noteScroll(), { passive: true });
  }

  async giveKey() {
    if (await askKey()) this.onKey();
  }

  // Conversations

  begin() {
    const empty = this.all.find((each) => !each.messages.length);
    if (empty) return empty;
    const fresh = { id: newId(), changed: Date.now(), messages: [] };
    this.all.unshift(fresh);
    return fresh;
  }

  open(conversation) {
    this.current = conversation;
    this.follows = true;
    document.body.classList.remove("shows-conversations");
    byId("open-conversations").ariaExpanded = "false";
    this.render();
    if (matchMedia("(min-width: 861px)").matches) byId("draft").focus();
  }

  async clear() {
    if (!(await confirmed("Delete all conversations of this browser?", "Delete all"))) return;
    for (const run of this.runs.values()) run.abort();
    kept.clear();
    this.all = [];
    this.open(this.begin());
  }

  async forget(conversation) {
    if (!(await confirmed(`Delete “${titleOf(conversation)}”?`, "Delete"))) return;
    this.runs.get(conversation)?.abort();
    kept.remove(conversation.id);
    this.all = this.all.filter((each) => each !== conversation);
    this.open(this.current === conversation ? (this.all[0] ?? this.begin()) : this.current);
  }

  save(conversation) {
    if (!this.all.includes(conversation)) return; // deleted while its answer arrived
    conversation.changed = Date.now();
    if (!kept.save(conversation)) say("This browser has no room left to keep the conversation");
  }

  // Messages

  send() {
    const text = byId("draft").value;
    if (!text.trim() || this.runs.has(this.current)) return;
    const asked = this.fieldsToAsk();
    if (!asked) return;
    byId("draft").value = "";
    this.current.messages.push({ id: newId(), role: "user", content: text });
    this.answer(asked);
  }

  /** Answer again from this message on; later messages are removed. */
  again(message) {
    const asked = this.fieldsToAsk();
    if (!asked || this.runs.has(this.current)) return;
    const { messages } = this.current;
    messages.splice(messages.indexOf(message));
    this.answer(asked);
  }

  edit(message, text, send) {
    const asked = send ? this.fieldsToAsk() : null;
    if ((send && !asked) || this.runs.has(this.current)) return;
    if (message.content !== text) delete message.tokens;
    message.content = text;
    const { messages } = this.current;
    if (send) messages.splice(messages.indexOf(message) + 1);
    this.save(this.current);
    this.views.delete(message);
    if (send) this.answer(asked);
    else this.render();
  }

  removeMessage(message) {
    if (this.runs.has(this.current)) return;
    const { messages } = this.current;
    messages.splice(messages.indexOf(message), 1);
    this.save(this.current);
    this.render();
    byId("draft").focus();
    say("Message deleted");
  }

  sendResults(results) {
    const asked = this.fieldsToAsk();
    if (!asked) return;
    this.current.messages.push(...results.map((result) => ({ id: newId(), ...result })));
    this.answer(asked);
  }

  /** The request without its messages; null if a setting is invalid, with its field marked. */
  fieldsToAsk() {
    try {
      const { messages, ...asked } = bodyOf(this.settings.values, this.model(), []);
      return { ...asked, system: messages };
    } catch (error) {
      if (!(error instanceof SettingsError)) throw error;
      this.settings.judge();
      document.body.classList.add("shows-parameters");
      document.body.classList.remove("no-shows-parameters");
      this.settings.focus(error.field);
      return null;
    }
  }

  bodyFor(message) {
    const before = this.current.messages.slice(0, this.current.messages.indexOf(message));
    return bodyFrom(message.asked, before);
  }

  showDraftAsCode() {
    const asked = this.fieldsToAsk();
    const text = byId("draft").value;
    const draft = text.trim() ? [{ role: "user", content: text }] : [];
    if (asked) showCode(bodyFrom(asked, [...this.current.messages, ...draft]));
  }

  // An answer

  async answer(asked) {
    const conversation = this.current;
    const body = bodyFrom(asked, conversation.messages);
    const answer = newAnswer(asked, performance.now());
    const run = new AbortController();
    conversation.messages.push(answer);
    this.runs.set(conversation, run);
    this.follows = true;
    this.save(conversation);
    this.render();
    say("Answering");
    try {
      for await (const chunk of streamChat(body, run.signal)) {
        fold(answer, chunk, performance.now());
        this.showSoon(answer);
      }
    } catch (error) {
      if (run.signal.aborted) answer.finish = "stopped";
      else answer.error = factsOf(error);
    }
    this.ended(conversation, answer);
  }

  ended(conversation, answer) {
    answer.busy = false;
    this.runs.delete(conversation);
    this.save(conversation);
    if (conversation !== this.current) return;
    this.render();
    if (!answer.error) say(answer.finish === "stopped" ? "Stopped" : `Answer: ${answer.content}`);
  }

  /** At most once per frame, however fast tokens arrive. */
  showSoon(answer) {
    if (this.frame) return;
    this.frame = requestAnimationFrame(() => {
      this.frame = null;
      if (!answer.busy) return;
      this.views.get(answer)?.update();
      this.scroll();
    });
  }

  // The page

  render() {
    const { messages } = this.current;
    for (const message of messages) {
      const view = this.views.get(message) ?? new MessageView(message, this.actions);
      this.views.set(message, view);
      view.update();
    }
    const nodes = messages.map((message) => this.views.get(message).element);
    const open = openCalls(messages);
    if (open.length) nodes.push(resultsForm(open, (results) => this.sendResults(results)));
    const focus = focusIn(byId("chat-main"));
    byId("messages").replaceChildren(...(nodes.length ? nodes : [welcome((text) => this.suggest(text))]));
    this.showComposer();
    this.showList();
    this.scroll();
    if (focus && !focusIn(byId("chat-main"))) byId("draft").focus();
  }

  suggest(text) {
    byId("draft").value = text;
    this.send();
  }

  showComposer() {
    const busy = this.runs.has(this.current);
    if (busy ? focusIn(byId("send")) : focusIn(byId("stop"))) byId("draft").focus();
    byId("stop").hidden = !busy;
    byId("send").hidden = busy;
    byId("send").disabled = !byId("draft").value.trim();
  }

  showList() {
    const begun = this.all.filter((each) => each.messages.length);
    byId("conversation-list").replaceChildren(...begun.map((each) => {
      const title = titleOf(each);
      const current = each === this.current ? { "aria-current": "true" } : {};
      return h("li", {}, button(title, () => this.open(each), "conversation", current),
        button("×", () => this.forget(each), "forget", { "aria-label": `Delete ${title}` }));
    }));
    byId("clear").hidden = !begun.length;
  }

  noteScroll() {
    const place = byId("messages");
    this.follows = place.scrollHeight - place.scrollTop - place.clientHeight < 40;
  }

  scroll() {
    const place = byId("messages");
    if (this.follows) place.scrollTop = place.scrollHeight;
  }
}

const bodyFrom = ({ system, ...fields }, messages) => {
  const { model, ...rest } = fields;
  const sent = messages.filter((message) => !message.error || message.content).map(asSent);
  return { ...(model ? { model } : {}), messages: [...system, ...sent], ...rest };
};

function titleOf(conversation) {
  const text = conversation.messages.find((message) => message.role === "user")?.content.trim().split("\n")[0] || "Untitled";
  return text.length > TITLE_CHARS ? `${text.slice(0, TITLE_CHARS)}…` : text;
}

const focusIn = (place) => place.contains(document.activeElement);

/** Calls of the last answer that have no result yet. */
function openCalls(messages) {
  const last = messages.at(-1);
  return last?.role === "assistant" && !last.busy && !last.error ? (last.calls ?? []) : [];
}

const SUGGESTIONS = ["What is the capital of France?", "Count from 1 to 60.", "What is 17 + 25?"];

function welcome(ask) {
  return h("div", { class: "welcome" }, h("h2", {}, "What would you like to know?"),
    h("p", {}, "Conversations stay in this browser."),
    h("div", { class: "suggestions" }, SUGGESTIONS.map((text) => button(text, () => ask(text), ""))));
}
