// The head of the page, and the tables of everything that is served.

import { rate } from "./counters";
import { $, type Cell, element, number, table, text } from "./dom";
import { bytes, short, time } from "./format";
import type { History } from "./history";
import type { Disk, Moment } from "./types";

const isWell = (disk: Disk): boolean => disk.state === "ready" && !disk.waiting && !disk.reservations_unknown && !disk.warning && !disk.damage;

/** The disks that need attention, then the others, each in the daemon's order. */
export const byNeed = (disks: Disk[]): Disk[] => [...disks.filter((one) => !isWell(one)), ...disks.filter(isWell)];

/** Reason, next attempt and command for each problem of a disk. */
export function problemsOf(disk: Disk): string[] {
  const problems: string[] = [];
  if (disk.state !== "ready") {
    const next = disk.next_try_seconds;
    const attempt = next === undefined ? "" : `; next attempt in ${next} s`;
    problems.push(`${disk.state}: ${disk.reason ?? "no reason given"}${attempt}`);
  }
  if (disk.waiting) {
    const reason = disk.waiting_reason ?? "see the log of the daemon";
    problems.push(`${disk.waiting} failed I/Os wait: ${reason}; lunette disk resume ${disk.name} tries them again`);
  }
  if (disk.reservations_unknown) {
    problems.push(`reservations unknown, SCSI reads and writes wait: ${disk.reservations_unknown}; see lunette state list`);
  }
  if (disk.damage) problems.push(disk.damage);
  if (disk.warning) problems.push(disk.warning);
  return problems;
}

/** Kinds of problems that the head counts by object. */
const COUNTED = ["disk", "listener", "export"];

export function showHead({ status }: Moment): void {
  const wrong = status.disks.filter((disk) => !isWell(disk)).length;
  const waiting = status.waiting_listeners?.length ?? 0;
  const warned = status.exports.filter((one) => one.warning);
  const problems: string[] = [];
  if (wrong) problems.push(`${wrong} of ${status.disks.length} disks ${wrong === 1 ? "needs" : "need"} attention`);
  if (waiting) problems.push(waiting === 1 ? "1 listener waits" : `${waiting} listeners wait`);
  const warnings = warned.length === 1 ? "1 export has a warning" : `${warned.length} exports have warnings`;
  if (warned.length) problems.push(warnings);
  const others = status.problems?.filter((one) => !COUNTED.includes(one.object)).length ?? 0;
  if (others) problems.push(others === 1 ? "1 more problem" : `${others} more problems`);
  $("state").textContent = problems.join(", ") || "all is well";
  $("state").className = problems.length ? "bad" : "good";
  const up = status.uptime_seconds;
  const since = up >= 3600 ? `${(up / 3600).toFixed(1)} h` : `${up} s`;
  const workers = `${status.workers} ${status.workers === 1 ? "worker" : "workers"}`;
  const host = status.host ? `${status.host}, ` : "";
  $("about").textContent = `${host}version ${status.version}, up ${since}, ${workers}`;
  document.title = status.host ? `${status.host} - Lunette` : "Lunette";
}

export function showDisks(
  now: Moment,
  history: History,
  chosen: string | null,
  choose: (name: string) => void,
): void {
  const heads = [text("disk"), text("on"), number("size"), text("state"), number("reads/s"), number("writes/s")];
  heads.push(number("bytes/s"), number("p50"), number("p99"), number("in flight"), number("errors"));
  const rows = byNeed(now.status.disks).map((disk): Cell[] => {
    const name = element("button", disk.name, "name");
    name.type = "button";
    name.onclick = () => choose(disk.name);
    name.setAttribute("aria-pressed", String(disk.name === chosen));
    const waiting = disk.waiting ? `, ${disk.waiting} waiting` : "";
    const state = element("span", disk.state + waiting, isWell(disk) ? "good" : "bad");
    const last = history.of(disk.name).at(-1);
    const took = (ns: number | null | undefined) => (ns ? time(ns) : "-");
    const counted = now.statistics.disks.find((one) => one.name === disk.name);
    const errors = Object.values(counted?.errors ?? {}).reduce((sum, count) => sum + count, 0);
    return [
      name,
      disk.backend,
      bytes(disk.size),
      state,
      short(last?.reads ?? 0),
      short(last?.writes ?? 0),
      bytes(last?.bytes ?? 0),
      took(last?.p50),
      took(last?.p99),
      String(counted?.in_flight ?? 0),
      String(errors),
    ];
  });
  table("disks", heads, rows, "no disk");
}

export function showExports({ status }: Moment): void {
  const heads = [text("export"), text("kind"), text("connected"), text("disks"), text("socket")];
  const rows = status.exports.map((one): Cell[] => {
    const waiting = status.waiting_listeners?.filter((listener) => listener.export === one.name) ?? [];
    const wait = waiting.map(({ address, reason }) => `${address} waits: ${reason}`).join("; ");
    return [
      one.name,
      one.kind,
      one.connected ? "yes" : "no",
      one.luns.map((lun) => lun.disk).join(", "),
      wait || one.warning ? element("span", wait || one.warning, "bad") : (one.socket ?? "-"),
    ];
  });
  table("exports", heads, rows, "no export");
}

export function showWorkers(now: Moment, then: Moment | null): void {
  const heads = [text("worker"), number("busy iterations/s"), number("empty/s"), number("sleeps/s")];
  const rows = now.statistics.workers.map((worker) => {
    const before = then?.statistics.workers.find((one) => one.worker === worker.worker);
    const per = (count: "busy_iterations" | "empty_iterations" | "sleeps") =>
      short(then && before ? rate(now, then, worker[count], before[count]) : 0);
    return [String(worker.worker), per("busy_iterations"), per("empty_iterations"), per("sleeps")];
  });
  table("workers", heads, rows, "no worker");
}
