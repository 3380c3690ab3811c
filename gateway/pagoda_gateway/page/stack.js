// The state of the stack: polled every second while its view is shown, every few seconds for the word in the header.

import { Rates } from "./rates.js";
import { chart, figure, requestTable, workerTable } from "./stack_parts.js";
import { count, percent, rate } from "./format.js";
import { errorView } from "./message.js";
import { factsOf, getJson } from "./api.js";
import { h } from "./dom.js";

const WATCHED_MS = 1000;
const ASIDE_MS = 5000;

export class StackView {
  /** `showState(good, text)` is called with the state of the stack; `giveKey` asks for a key. */
  constructor(place, { showState, giveKey }) {
    this.place = place;
    this.showState = showState;
    this.giveKey = giveKey;
    this.rates = new Rates();
    this.parts = {
      banner: h("div", { class: "banner" }),
      figures: h("dl", { class: "figures-row" }),
      charts: h("div", { class: "charts" }),
      workers: h("section"),
      requests: h("section"),
    };
    place.replaceChildren(h("div", { class: "stack-inner" }, h("h2", { class: "hidden" }, "Stack"), ...Object.values(this.parts)));
    this.watched = false;
    this.asking = null;
  }

  /** Set whether the view is shown from now on. */
  watch(watched) {
    this.watched = watched;
    this.now();
  }

  /** Poll at once, and then at its interval. A hidden page does not poll. */
  now() {
    clearTimeout(this.timer);
    this.asking?.abort();
    if (!document.hidden) this.ask();
  }

  async ask() {
    const asking = (this.asking = new AbortController());
    let failed = null;
    try {
      const stack = await getJson("stack", asking.signal);
      this.rates.add(stack);
      this.tell(stack);
      if (this.watched) this.show(stack);
    } catch (error) {
      failed = error;
    }
    if (asking.signal.aborted) return;
    if (failed) this.fail(failed);
    this.timer = setTimeout(() => this.ask(), this.watched ? WATCHED_MS : ASIDE_MS);
  }

  tell(stack) {
    const workers = stack.load.num_workers;
    const { output } = this.rates.latest;
    const speed = Number.isFinite(output) ? `, ${rate(output)} tokens/s` : "";
    const well = `${workers} ${workers === 1 ? "worker" : "workers"}${speed}`;
    this.showState(!stack.problems.length, stack.problems[0] ?? well);
  }

  fail(error) {
    this.showState(false, error.status === 401 ? "needs a key" : "not reached");
    if (this.shownError === error.message) return; // an alert is read once
    this.shownError = error.message;
    const { banner, ...others } = this.parts;
    banner.replaceChildren(errorView(factsOf(error), null, this.giveKey));
    if (error.status === 401) for (const part of Object.values(others)) part.replaceChildren();
    else if (others.figures.hasChildNodes()) banner.append(h("p", { class: "note" }, "What follows is what was known last."));
  }

  show(stack) {
    this.shownError = null;
    const problems = stack.problems.map((problem) => h("li", {}, problem));
    this.parts.banner.replaceChildren(...(problems.length ? [h("div", { class: "warning" }, "Not ready:", h("ul", {}, problems))] : []));
    this.parts.figures.replaceChildren(...this.figures(stack));
    this.parts.charts.replaceChildren(
      chart("Output tokens per second", this.rates.series("output"), "var(--decode)"),
      chart("Prompt tokens per second, less what was cached", this.rates.series("prompt"), "var(--prefill)"));
    const scrolled = [...this.place.querySelectorAll(".wide-table")].map((table) => table.scrollLeft);
    const focused = document.activeElement?.getAttribute("aria-label");
    this.parts.workers.replaceChildren(...workerTable(stack, this.opened("workers")));
    this.parts.requests.replaceChildren(...requestTable(stack.requests));
    this.place.querySelectorAll(".wide-table").forEach((table, i) => {
      table.scrollLeft = scrolled[i] ?? 0;
      if (focused && table.getAttribute("aria-label") === focused) table.focus();
    });
  }

  opened(part) {
    return Boolean(this.parts[part].querySelector("details[open]"));
  }

  figures({ load, report, num_open: open }) {
    const totals = report?.totals;
    const lookedUp = totals ? totals.prompt_tokens : 0;
    return [
      figure("Running", count(load.num_running), "requests, of all gateways"),
      figure("Waiting", count(load.num_waiting), "for a worker"),
      figure("Open here", count(open), "requests of this gateway"),
      figure("KV cache", percent(load.kv_usage), totals ? `of ${count(totals.blocks_total)} blocks` : "in use"),
      figure("Output", rate(this.rates.latest.output), "tokens per second"),
      figure("From the prefix cache", lookedUp ? percent(totals.cached_prompt_tokens / lookedUp) : "–", "of prompt tokens so far"),
    ];
  }
}
