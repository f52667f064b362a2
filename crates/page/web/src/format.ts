// Numbers for people.

const UNITS = ["", "k", "M", "G", "T", "P"];

export function short(value: number, base = 1000): string {
  let at = 0;
  while (value >= base && at < UNITS.length - 1) {
    value /= base;
    at += 1;
  }
  const isWhole = at === 0 && Number.isInteger(value);
  const digits = value >= 100 || isWhole ? 0 : value >= 10 ? 1 : 2;
  return `${value.toFixed(digits)} ${UNITS[at]}`;
}

export function bytes(value: number): string {
  return short(value, 1024).trim() + (value >= 1024 ? "iB" : " B");
}

export function time(ns: number): string {
  if (ns >= 1e9) return `${(ns / 1e9).toFixed(2)} s`;
  if (ns >= 1e6) return `${(ns / 1e6).toFixed(2)} ms`;
  if (ns >= 1e3) return `${(ns / 1e3).toFixed(1)} µs`;
  return `${ns.toFixed(0)} ns`;
}

/** Without seconds, in UTC. */
export function date(seconds: number): string {
  return new Date(seconds * 1000).toISOString().replace("T", " ").slice(0, 16);
}
