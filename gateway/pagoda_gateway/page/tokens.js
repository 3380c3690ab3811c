// Tokens of an answer with their probabilities: under the pointer, or with the arrow keys.

import { h } from "./dom.js";
import { probability } from "./format.js";

const LEVELS = [0.9, 0.5, 0.2, 0]; // the less likely a token, the stronger its mark

const level = (logprob) => LEVELS.findIndex((least) => Math.exp(logprob) >= least);
const visible = (token) => token.replaceAll("\n", "↵\n").replaceAll("\t", "⇥\t") || "∅";
const named = (token) => JSON.stringify(token);

export function tokenView(tokens) {
  const detail = h("div", { class: "token-detail", hidden: true });
  const list = h("div", { class: "tokens", role: "listbox", "aria-label": "Tokens of the answer", "aria-orientation": "horizontal" },
    tokens.map(item));
  const view = h("div", { class: "token-view" }, list, detail);
  const show = (node) => showDetail(view, detail, node, tokens[Number(node.dataset.at)]);
  const hide = () => (detail.hidden = true);
  list.addEventListener("pointerover", ({ target }) => target.role === "option" && show(target));
  list.addEventListener("pointerleave", hide);
  list.addEventListener("focusin", ({ target }) => target.role === "option" && show(target));
  list.addEventListener("focusout", hide);
  list.addEventListener("keydown", (event) => move(event, [...list.children]));
  return view;
}

function item(entry, at) {
  const label = `${named(entry.token)}, ${probability(entry.logprob)}`;
  const props = { class: "token", role: "option", tabIndex: at ? -1 : 0, "aria-label": label, "aria-selected": "false" };
  const node = h("span", props, visible(entry.token));
  node.dataset.at = at;
  node.dataset.level = level(entry.logprob);
  return node;
}

const STEPS = { ArrowRight: 1, ArrowDown: 1, ArrowLeft: -1, ArrowUp: -1, Home: -Infinity, End: Infinity };

function move(event, items) {
  const step = STEPS[event.key];
  if (event.key === "Escape") event.target.blur();
  if (step === undefined) return;
  event.preventDefault();
  const at = items.indexOf(event.target);
  const next = Math.max(0, Math.min(items.length - 1, at + step));
  items[at].tabIndex = -1;
  items[at].ariaSelected = "false";
  items[next].tabIndex = 0;
  items[next].ariaSelected = "true";
  items[next].focus();
}

function showDetail(view, detail, node, entry) {
  const others = entry.top_logprobs ?? [];
  const known = others.some((other) => other.token === entry.token && other.logprob === entry.logprob);
  const rows = [...(known ? [] : [entry]), ...others].map((other) => row(other, other.token === entry.token));
  detail.replaceChildren(h("table", {}, h("tbody", {}, rows)));
  detail.hidden = false;
  const [at, around] = [node.getClientRects()[0], view.getBoundingClientRect()];
  const left = Math.min(at.left - around.left, around.width - detail.offsetWidth);
  detail.style.left = `${Math.max(0, left)}px`;
  detail.style.top = `${at.bottom - around.top + 6}px`;
}

function row(entry, chosen) {
  const bar = h("span", { class: "token-bar" });
  bar.style.width = `${Math.max(1, 100 * Math.exp(entry.logprob))}%`;
  return h("tr", { class: chosen ? "chosen" : "" },
    h("td", {}, h("code", {}, named(entry.token)), chosen ? h("span", { class: "hidden" }, " (chosen)") : null),
    h("td", { class: "bar-cell" }, bar), h("td", { class: "number" }, probability(entry.logprob)));
}
