// Converts totals to rates: the difference of two reports over the time between them.

const KEPT = 120;

export class Rates {
  constructor() {
    this.points = []; // {output, prompt}: tokens per second
    this.last = null;
  }

  get latest() {
    return this.points.at(-1) ?? { output: NaN, prompt: NaN };
  }

  series(name) {
    return this.points.map((point) => point[name]);
  }

  /** Start again if the engine core is gone or a different one; ignore a repeated report. */
  add({ report, load }) {
    if (!report) {
      this.last = null;
      return;
    }
    const { last } = this;
    const now = {
      engine: load.engine_id,
      at: report.at_s,
      output: report.totals.output_tokens,
      prompt: report.totals.prompt_tokens - report.totals.cached_prompt_tokens,
    };
    if (last && last.engine === now.engine && last.at === now.at) return;
    this.last = now;
    if (!last || last.engine !== now.engine || now.at < last.at) return;
    const per = (name) => Math.max(0, now[name] - last[name]) / (now.at - last.at);
    this.points.push({ output: per("output"), prompt: per("prompt") });
    this.points.splice(0, this.points.length - KEPT);
  }
}
