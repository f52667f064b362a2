// The daemon's API. A client with a tunnel to the control socket needs no token.

import type { Report } from "./types";

declare const MOMENT: Report | undefined;

/** Of a report; `null`: there is a daemon. */
export const report: Report | null = typeof MOMENT === "undefined" ? null : MOMENT;

const TOKEN = "token";
/** A daemon that sends nothing for this long does not answer, in milliseconds. */
const SILENCE_MAX = 10_000;

let token = "";

/** The token of this tab, or of the address: that stays in the browser, and leaves its history. */
export function takeToken(): void {
  token = sessionStorage.getItem(TOKEN) ?? "";
  if (location.hash.startsWith("#token=")) {
    setToken(decoded(location.hash.slice("#token=".length)));
    history.replaceState(null, "", location.pathname);
  }
}

/** Text without percent-encoding. A text with a `%` that encodes nothing was never encoded. */
function decoded(text: string): string {
  try {
    return decodeURIComponent(text);
  } catch {
    return text;
  }
}

export function setToken(value: string): void {
  token = value;
  sessionStorage.setItem(TOKEN, token);
}

export const hasToken = (): boolean => token !== "";

export class ApiError extends Error {
  constructor(
    readonly status: number,
    message: string,
  ) {
    super(message);
  }
}

async function request(path: string, options: RequestInit = {}): Promise<Response> {
  const headers = new Headers(options.headers);
  if (token) headers.set("Authorization", `Bearer ${token}`);
  const answer = await fetch(path, { ...options, headers, cache: "no-store" });
  if (!answer.ok) {
    // RFC 9457
    const problem = await answer.json().catch(() => null);
    throw new ApiError(answer.status, problem?.detail ?? `${answer.status} ${answer.statusText}`);
  }
  return answer;
}

export async function ask<T>(path: string): Promise<T | null> {
  if (report) return (report.answers[path] as T | undefined) ?? null;
  return (await request(path)).json();
}

export async function send(method: string, path: string, body?: unknown): Promise<void> {
  const headers = { "Content-Type": "application/json" };
  await request(path, body === undefined ? { method } : { method, headers, body: JSON.stringify(body) });
}

/** Server-sent events of the daemon until they end, `stop` says so, or nothing comes any more. */
export async function listen(
  path: string,
  stop: AbortController,
  heard: (event: string, data: string) => Promise<void>,
): Promise<void> {
  const silence = () => setTimeout(() => stop.abort(new Error("it sends nothing")), SILENCE_MAX);
  let timer = silence();
  try {
    const answer = await request(path, { signal: stop.signal });
    if (!answer.body) return;
    const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
    let parts: string[] = [];
    let last = "";
    for (;;) {
      const { value, done } = await reader.read();
      if (done) return;
      clearTimeout(timer);
      timer = silence();
      // Only the part with the end of an event is searched: a moment arrives in many parts.
      parts.push(value);
      if (!(last + value).includes("\n\n")) {
        last = value.at(-1) ?? last;
        continue;
      }
      const blocks = parts.join("").split("\n\n");
      parts = [blocks.pop() ?? ""];
      last = parts[0]?.at(-1) ?? "";
      for (const block of blocks) await hear(block, heard);
    }
  } finally {
    clearTimeout(timer);
  }
}

/** One event: lines of `field: value`. */
async function hear(block: string, heard: (event: string, data: string) => Promise<void>): Promise<void> {
  const lines = block.split("\n");
  const field = (name: string) =>
    lines.filter((line) => line.startsWith(name)).map((line) => line.slice(name.length).trimStart());
  const data = field("data:");
  if (data.length) await heard(field("event:")[0] ?? "message", data.join("\n"));
}
