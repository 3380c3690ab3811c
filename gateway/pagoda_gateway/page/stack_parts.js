// Parts of the view of the stack: figures, charts, workers and requests, each rebuilt from the last report.

import { bytes, count, percent, rate, seconds, timeOfDay } from "./format.js";
import { h, svg } from "./dom.js";

export function figure(name, value, unit) {
  return h("div", { class: "figure" }, h("dt", {}, name), h("dd", {}, h("span", { class: "value" }, value), h("span", { class: "unit" }, unit)));
}

const [WIDTH, HEIGHT] = [600, 72];

export function chart(title, values, color) {
  const most = Math.max(1, ...values);
  const point = (value, i) => `${(WIDTH * (i + 120 - values.length)) / 119},${HEIGHT - 3 - ((HEIGHT - 8) * value) / most}`;
  const points = values.map(point);
  const first = points[0]?.split(",")[0];
  const label = `${title}: now ${rate(values.at(-1))}, at most ${rate(Math.max(...values))} lately`;
  const drawing = svg("svg", { viewBox: `0 0 ${WIDTH} ${HEIGHT}`, preserveAspectRatio: "none", role: "img", "aria-label": label, class: "chart" });
  if (points.length > 1) {
    drawing.append(
      svg("polygon", { points: `${first},${HEIGHT} ${points.join(" ")} ${WIDTH},${HEIGHT}`, class: "area" }),
      svg("polyline", { points: points.join(" "), class: "stroke" }));
  }
  const node = h("figure", { class: "chart-box" }, h("figcaption", {}, h("span", {}, title),
    h("span", { class: "number" }, values.length ? `${rate(values.at(-1))} now, ${rate(Math.max(...values))} at most` : "two reports are needed")), drawing);
  node.style.setProperty("--color", color);
  return node;
}

function table(label, heads, rows) {
  return h("div", { class: "wide-table", tabIndex: 0, role: "region", "aria-label": label },
    h("table", {}, h("thead", {}, h("tr", {}, heads.map((head) => h("th", { scope: "col", class: head.number ? "number" : "" }, head.name ?? head)))),
      h("tbody", {}, rows)));
}

const number = (name) => ({ name, number: true });
const cell = (text, className = "number") => h("td", { class: className }, text);

const ALIVE = new Set(["ready", "suspect", "draining"]);

export function workerTable({ report, models }, opened) {
  const title = h("h3", {}, "Workers");
  if (!report) return [title, h("p", { class: "note" }, "No engine core answers, so nothing is known of its workers.")];
  const [alive, ended] = [[], []];
  for (const worker of report.workers) (ALIVE.has(worker.state) ? alive : ended).push(worker);
  const heads = ["Worker", "State", "Model", "Device", number("Rows"), "KV cache", number("Steps"), number("Memory")];
  const shown = alive.length
    ? table("Workers", heads, alive.map((worker) => workerRow(worker, models)))
    : h("p", { class: "note" }, "There is no worker at this moment; requests wait for one.");
  if (!ended.length) return [title, shown];
  const lives = h("details", { open: opened }, h("summary", {}, `${ended.length} earlier ${ended.length === 1 ? "life" : "lives"}`),
    h("ul", { class: "lives" }, ended.reverse().map((worker) => h("li", {}, h("code", {}, worker.worker_id),
      ` ${worker.state}, life ${worker.epoch}, ${count(worker.steps_done)} steps`))));
  return [title, shown, lives];
}

function workerRow(worker, models) {
  const used = worker.num_blocks - worker.num_free_blocks;
  return h("tr", {}, h("td", {}, h("code", {}, worker.worker_id)),
    h("td", {}, h("span", { class: `badge ${worker.state}` }, worker.state)),
    h("td", {}, models.join(", ")), h("td", {}, worker.device), cell(count(worker.num_rows)),
    h("td", {}, meter(used, worker.num_blocks)), cell(count(worker.steps_done)), cell(bytes(worker.rss_bytes)));
}

function meter(used, all) {
  const fill = h("span", { class: "fill" });
  fill.style.width = `${all ? (100 * used) / all : 0}%`;
  return h("span", { class: "meter" }, h("span", { class: "track" }, fill),
    h("span", { class: "number" }, `${all ? percent(used / all) : "–"}`), h("span", { class: "unit" }, `${count(used)} of ${count(all)} blocks`));
}

// Requests

const KINDS = { queued: "queued", prefill: "prefill", decode: "decode", preempted: "preempted", replaying: "replayed after a loss" };
const CAUSES = { queued_no_worker: "no worker", queued_behind: "behind others", queued_blocks: "no free blocks", queued_budget: "step full", queued_rows: "rows full", queued_adapters: "adapters full" };

export function requestTable(requests) {
  const title = h("h3", {}, "Last requests");
  const note = h("p", { class: "note" }, "With an API key, those of that key only. Numbers: no text is kept.");
  if (!requests.length) return [title, note, h("p", { class: "nothing" }, "None has ended here yet.")];
  const heads = ["Ended", "Request", number("In"), number("Out"), number("First token"), number("Per token"), number("In all"), "Spent on", "End"];
  const longest = Math.max(...requests.map((request) => request.total_s));
  const legend = h("ul", { class: "legend", "aria-hidden": "true" }, Object.entries(KINDS).map(([kind, name]) =>
    h("li", {}, h("span", { class: `swatch ${kind}` }), name)), h("li", {}, h("span", { class: "swatch unknown" }), "not told"));
  return [h("div", { class: "section-head" }, title, legend), note,
    table("Last requests", heads, requests.map((request) => requestRow(request, longest)))];
}

function requestRow(request, longest) {
  const cached = request.cached_prompt_tokens ? h("span", { class: "unit" }, ` ${count(request.cached_prompt_tokens)} cached`) : null;
  const bad = request.end.startsWith("error");
  return h("tr", {}, cell(timeOfDay(request.ended_at), ""),
    h("td", {}, h("code", { title: request.id }, request.id.slice(0, 8))),
    h("td", { class: "number" }, count(request.prompt_tokens), cached), cell(count(request.output_tokens)),
    cell(seconds(request.ttft_s)), cell(seconds(request.tpot_s)), cell(seconds(request.total_s)),
    h("td", { class: "spent-cell" }, spent(request, longest)),
    h("td", {}, h("span", { class: bad ? "badge dead" : "badge plain" }, request.end),
      request.attempts > 1 ? h("span", { class: "unit" }, ` ${request.attempts} attempts`) : null));
}

/** Seconds by kind, in their usual order. If the engine core reported nothing, all of it is `unknown`. */
export function spentOn(request) {
  const kinds = Object.fromEntries(Object.keys(KINDS).map((kind) => [kind, 0]));
  for (const [cause, value] of Object.entries(request.waits_s)) {
    const kind = cause.startsWith("queued") ? "queued" : cause;
    kinds[kind] = (kinds[kind] ?? 0) + value;
  }
  const told = Object.values(kinds).reduce((sum, value) => sum + value, 0);
  return { ...kinds, unknown: told ? 0 : request.total_s };
}

function spent(request, longest) {
  const parts = Object.entries(spentOn(request)).filter(([, value]) => value > 0);
  const bar = h("span", { class: "spent", "aria-hidden": "true" }, parts.map(([kind, value]) => {
    const part = h("span", { class: kind });
    part.style.width = `${(100 * value) / longest}%`;
    return part;
  }));
  const causes = Object.entries(request.waits_s).map(([cause, value]) => `${CAUSES[cause] ? `queued, ${CAUSES[cause]}` : cause}: ${seconds(value)}`);
  const words = causes.length ? causes.join("\n") : "its client left before the engine core told";
  return h("span", { title: words }, bar, h("span", { class: "hidden" }, words));
}
