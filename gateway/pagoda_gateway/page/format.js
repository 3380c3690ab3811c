// Human-readable numbers.

export function seconds(value) {
  if (value === null || value === undefined) return "–";
  if (value < 0.001) return `${(1e6 * value).toFixed(0)} µs`;
  if (value < 1) return `${(1000 * value).toFixed(value < 0.1 ? 1 : 0)} ms`;
  if (value < 60) return `${value.toFixed(value < 10 ? 2 : 1)} s`;
  return `${Math.floor(value / 60)} min ${Math.round(value % 60)} s`;
}

export function rate(value) {
  if (!Number.isFinite(value)) return "–";
  return value < 100 ? value.toFixed(1) : Math.round(value).toLocaleString("en");
}

export function bytes(value) {
  if (!value) return "–";
  const units = ["B", "KiB", "MiB", "GiB", "TiB"];
  const power = Math.min(Math.floor(Math.log2(value) / 10), units.length - 1);
  return `${(value / 1024 ** power).toFixed(power > 2 ? 1 : 0)} ${units[power]}`;
}

export const count = (value) => value.toLocaleString("en");
export const percent = (part) => `${(100 * part).toFixed(part > 0 && part < 0.1 ? 1 : 0)} %`;
export const timeOfDay = (unixSeconds) => new Date(1000 * unixSeconds).toLocaleTimeString("en-GB");

/** A probability from its logarithm. */
export function probability(logprob) {
  const value = Math.exp(logprob);
  return value > 0 && value < 0.0001 ? "< 0.01 %" : `${(100 * value).toFixed(value < 0.1 ? 2 : 1)} %`;
}
