// A subset of Markdown, rendered to nodes. Anything else stays plain text; nothing becomes a link or an image.

import { copyButton, h } from "./dom.js";

/** Nodes for a text, which may break off anywhere. */
export function markdown(text) {
  const lines = text.split("\n");
  const nodes = [];
  for (let at = 0; at < lines.length; ) {
    const block = BLOCKS.find(({ begins }) => begins.test(lines[at]));
    const length = block.length(lines, at);
    const node = block.node(lines.slice(at, at + length));
    if (node) nodes.push(node);
    at += length;
  }
  return nodes;
}

const FENCE = /^\s*(`{3,}|~{3,})([^`]*)$/;
const HEADING = /^(#{1,6})\s+(.*)$/;
const BULLET = /^\s*[-*+]\s+/;
const NUMBER = /^\s*\d{1,9}[.)]\s+/;
const QUOTE = /^\s*>\s?/;
const TABLE = /^\s*\|.*\|\s*$/;
const RULE = /^\s*([-*_])(\s*\1){2,}\s*$/;

const whileLines = (pattern) => (lines, at) => {
  let end = at + 1;
  while (end < lines.length && pattern.test(lines[end])) end += 1;
  return end - at;
};

const BLOCKS = [
  { begins: FENCE, length: fenceLength, node: codeBlock },
  { begins: /^\s*$/, length: () => 1, node: () => null },
  { begins: HEADING, length: () => 1, node: ([line]) => heading(...line.match(HEADING).slice(1)) },
  { begins: RULE, length: () => 1, node: () => h("hr") },
  { begins: BULLET, length: whileLines(BULLET), node: (lines) => list("ul", lines, BULLET) },
  { begins: NUMBER, length: whileLines(NUMBER), node: (lines) => list("ol", lines, NUMBER) },
  { begins: QUOTE, length: whileLines(QUOTE), node: quote },
  { begins: TABLE, length: whileLines(TABLE), node: table },
  { begins: /^/, length: paragraphLength, node: (lines) => h("p", {}, inline(lines.join("\n"))) },
];

function paragraphLength(lines, at) {
  const others = BLOCKS.slice(0, -1);
  let end = at + 1;
  while (end < lines.length && !others.some(({ begins }) => begins.test(lines[end]))) end += 1;
  return end - at;
}

const closes = (line, mark) => line.trim().startsWith(mark) && !line.trim().replaceAll(mark[0], "");

function fenceLength(lines, at) {
  const mark = lines[at].match(FENCE)[1];
  const end = lines.findIndex((line, i) => i > at && closes(line, mark));
  return (end < 0 ? lines.length : end + 1) - at;
}

function codeBlock(lines) {
  const [, mark, info] = lines[0].match(FENCE);
  const language = info.trim();
  const closed = lines.length > 1 && closes(lines.at(-1), mark);
  const code = lines.slice(1, closed ? -1 : undefined).join("\n");
  const head = h("figcaption", {}, h("span", {}, language || "code"), copyButton(() => code));
  const label = language ? `Code, ${language}` : "Code";
  return h("figure", { class: "code" }, head, h("pre", { tabIndex: 0, role: "region", "aria-label": label }, h("code", {}, code)));
}

/** Headings of an answer rank below those of the page. */
const heading = (marks, text) => h(`h${Math.min(marks.length + 2, 6)}`, {}, inline(text));

function list(tag, lines, mark) {
  const first = tag === "ol" ? { start: parseInt(lines[0], 10) } : {};
  return h(tag, first, lines.map((line) => h("li", {}, inline(line.replace(mark, "")))));
}

function quote(lines) {
  return h("blockquote", {}, markdown(lines.map((line) => line.replace(QUOTE, "")).join("\n")));
}

function table(lines) {
  const cells = (line) => line.trim().slice(1, -1).split("|").map((cell) => cell.trim());
  const isRuler = (line) => cells(line).every((cell) => /^:?-+:?$/.test(cell));
  if (lines.length < 2 || !isRuler(lines[1])) return h("p", {}, inline(lines.join("\n")));
  const row = (line, tag) => h("tr", {}, cells(line).map((cell) => h(tag, tag === "th" ? { scope: "col" } : {}, inline(cell))));
  const body = lines.slice(2).map((line) => row(line, "td"));
  return h("div", { class: "wide-table", tabIndex: 0, role: "region", "aria-label": "Table" },
    h("table", {}, h("thead", {}, row(lines[0], "th")), h("tbody", {}, body)));
}

const INLINE = /(`+)([^`]|[^`][\s\S]*?[^`])\1(?!`)|\*\*(?=\S)([\s\S]*?\S)\*\*|\*(?=[^\s*])([^*\n]*?[^\s*])\*|~~(?=\S)([\s\S]*?\S)~~/g;

function inline(text) {
  const nodes = [];
  let from = 0;
  for (const match of text.matchAll(INLINE)) {
    const [whole, , code, strong, em, del] = match;
    nodes.push(text.slice(from, match.index));
    if (code !== undefined) nodes.push(h("code", {}, code));
    else if (strong !== undefined) nodes.push(h("strong", {}, inline(strong)));
    else if (em !== undefined) nodes.push(h("em", {}, inline(em)));
    else nodes.push(h("del", {}, inline(del)));
    from = match.index + whole.length;
  }
  return [...nodes, text.slice(from)];
}
