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
  return short(value, 1024).trim().toUpperCase() + (value >= 1024 ? "iB" : " B");
}

/** Returns the word with a capital letter, for titles and buttons. */
export const capital = (word: string): string => word.charAt(0).toUpperCase() + word.slice(1);

/** Time of day on this machine. */
export function clock(seconds: number, hasSeconds: boolean): string {
  return new Date(seconds * 1000).toTimeString().slice(0, hasSeconds ? 8 : 5);
}

export function time(ns: number): string {
  if (ns >= 1e9) return `${(ns / 1e9).toFixed(2)} s`;
  if (ns >= 1e6) return `${(ns / 1e6).toFixed(2)} ms`;
  if (ns >= 1e3) return `${(ns / 1e3).toFixed(1)} µs`;
  return `${ns.toFixed(0)} ns`;
}

/** Returns the number of a size such as 300M or 2 GiB, in bytes. */
export function sizeOf(text: string): number {
  const found = /^([0-9]+)\s*([KMGTP]?)(i?B)?$/i.exec(text.trim());
  const value = Number(found?.[1]) * 1024 ** UNITS.indexOf((found?.[2] ?? "").toUpperCase().replace("K", "k"));
  if (!Number.isSafeInteger(value)) throw new Error(`${text}: give a number, or a size such as 300M or 20G`);
  return value;
}

/** Without seconds, in UTC. */
export function date(seconds: number): string {
  return new Date(seconds * 1000).toISOString().replace("T", " ").slice(0, 16);
}
