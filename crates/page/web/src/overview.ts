// The head of the page, and the tables of everything that is served.

import { type DiskSecond, rate } from "./counters";
import { $, type LazyCell, badFirst, element, longTable, medium, minor, number, table, text } from "./dom";
import { bytes, short, time } from "./format";
import type { History } from "./history";
import type { Disk, DiskCounters, Export, Moment, Status, Worker } from "./types";

/** Number of disks from which the table has a filter. */
const FILTERED_FROM = 8;

const isWell = (disk: Disk): boolean =>
  disk.state === "ready" && !disk.waiting && !disk.reservations_unknown && !disk.warning && !disk.slow_ns && !disk.damage && !disk.failures?.length;

/** Free space below which a file system is nearly full, in bytes. */
const FEW_BYTES = 2 ** 30;

/** The file system is nearly full, and has no space for everything that the disk may still allocate. */
const isScarce = ({ size, allocated, free }: Disk): boolean =>
  free !== undefined && allocated !== undefined && free < FEW_BYTES && free < size - allocated;

/** The disks that need attention first. */
export const byNeed = (disks: Disk[]): Disk[] => badFirst(disks, (one) => !isWell(one));

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
  if (disk.failures?.length && !disk.waiting) {
    const classes = disk.failures.map((one) => `${one.count} ${one.class}`);
    problems.push(`I/Os failed in the last hour: ${classes.join(", ")}`);
  }
  if (disk.reservations_unknown) {
    problems.push(`reservations unknown, SCSI reads and writes wait: ${disk.reservations_unknown}; see lunette state list`);
  }
  if (disk.damage) problems.push(disk.damage);
  if (disk.warning) problems.push(disk.warning);
  if (disk.slow_ns) problems.push(`slow: 1 % of its requests take longer than ${time(disk.slow_ns)}; see the stages and the slowest requests below`);
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

const took = (ns: number | null | undefined): string => (ns ? time(ns) : "-");

/** The sums of all disks in the last second, and the slowest of them. */
export function showTotals({ status }: Moment, history: History): void {
  const seconds = status.disks.flatMap(({ name }) => history.of(name).at(-1) ?? []);
  const sum = (of: (one: DiskSecond) => number) => seconds.reduce((all, one) => all + of(one), 0);
  const slowest = Math.max(...seconds.map((one) => one.p99 ?? 0), 0);
  const connected = status.exports.filter((one) => one.connected).length;
  const figures = [
    ["reads/s", short(sum((one) => one.reads))],
    ["writes/s", short(sum((one) => one.writes))],
    ["bytes/s", bytes(sum((one) => one.bytes))],
    ["highest p99", took(slowest)],
    ["connected exports", `${connected} of ${status.exports.length}`],
  ];
  const items = figures.map(([name, figure]) => {
    const item = element("div");
    item.append(element("dt", name), element("dd", figure));
    return item;
  });
  $("totals").replaceChildren(...items);
}

/** Column that sorts the table of disks; none: those that need attention first. */
let sorted: string | null = null;

interface Row {
  cells: LazyCell[];
  /** Values to sort by, per column; text ascending, numbers descending. */
  keys: (string | number)[];
}

function rowOf(disk: Disk, counted: DiskCounters | undefined, history: History, chosen: string | null, choose: (name: string) => void): Row {
  const last = history.of(disk.name).at(-1);
  const size = (value: number | undefined) => (value === undefined ? "" : bytes(value));
  const state = disk.state + (disk.waiting ? `, ${disk.waiting} waiting` : "");
  const errors = Object.values(counted?.errors ?? {}).reduce((sum, count) => sum + count, 0);
  const [reads, writes, rate, inFlight] = [last?.reads ?? 0, last?.writes ?? 0, last?.bytes ?? 0, counted?.in_flight ?? 0];
  const numbers: LazyCell[] = [short(reads), short(writes), bytes(rate), took(last?.p50), took(last?.p99), String(inFlight), String(errors)];
  numbers.push(bytes(disk.size), size(disk.allocated));
  const free = size(disk.free);
  numbers.push(isScarce(disk) ? { value: `${free} scarce`, make: () => element("span", free, "bad") } : free);
  const [isChosen, isGood] = [disk.name === chosen, isWell(disk)];
  const name = () => {
    const button = element("button", disk.name, "name");
    button.type = "button";
    button.onclick = () => choose(disk.name);
    button.setAttribute("aria-pressed", String(isChosen));
    return button;
  };
  const storage = () => {
    const cell = element("span", disk.path ? `${disk.backend} ` : disk.backend);
    if (disk.path) cell.append(element("span", disk.path, "path"));
    return cell;
  };
  return {
    cells: [
      { value: `${disk.name} ${isChosen}`, make: name },
      { value: `${state} ${isGood}`, make: () => element("span", state, isGood ? "good" : "bad") },
      ...numbers,
      { value: `${disk.backend} ${disk.path}`, make: storage },
    ],
    keys: [
      disk.name,
      disk.state,
      reads,
      writes,
      rate,
      last?.p50 ?? 0,
      last?.p99 ?? 0,
      inFlight,
      errors,
      disk.size,
      disk.allocated ?? 0,
      // The scarcest first.
      disk.free === undefined ? 0 : 1 / (disk.free + 1),
      `${disk.backend} ${disk.path ?? ""}`,
    ],
  };
}

function compare(a: string | number | undefined, b: string | number | undefined): number {
  if (typeof a === "number" && typeof b === "number") return b - a;
  return String(a).localeCompare(String(b), undefined, { numeric: true });
}

export function showDisks(
  now: Moment,
  history: History,
  chosen: string | null,
  choose: (name: string) => void,
  again: () => void,
): void {
  const heads = [text("disk"), text("state"), medium(number("reads/s")), medium(number("writes/s"))];
  heads.push(minor(number("bytes/s")), minor(number("p50")), number("p99"), minor(number("in flight")), number("errors"));
  heads.push(minor(number("size")), minor(number("allocated")), minor(number("free")), minor(text("storage")));
  const column = heads.findIndex((head) => head.name === sorted);
  for (const head of heads) {
    head.isSorted = head.name === sorted;
    head.sort = () => {
      sorted = sorted === head.name ? null : head.name;
      again();
    };
  }
  const disks = now.status.disks;
  $("filter").hidden = disks.length < FILTERED_FROM;
  const wanted = $<HTMLInputElement>("filter").value.trim().toLowerCase();
  const isWanted = (disk: Disk) => `${disk.name} ${disk.path ?? ""} ${disk.state}`.toLowerCase().includes(wanted);
  const counters = new Map(now.statistics.disks.map((one) => [one.name, one]));
  const rows = byNeed(disks)
    .filter(isWanted)
    .map((disk) => rowOf(disk, counters.get(disk.name), history, chosen, choose));
  if (column >= 0) rows.sort((a, b) => compare(a.keys[column], b.keys[column]));
  longTable("disks", heads, rows.map((row) => row.cells), disks.length ? "no disk has this text" : "no disk");
}

/** Closed listeners of an export, or its warning. */
function problemOfExport(one: Export, status: Status): string {
  const waiting = status.waiting_listeners?.filter((listener) => listener.export === one.name) ?? [];
  return waiting.map(({ address, reason }) => `${address} waits: ${reason}`).join("; ") || (one.warning ?? "");
}

export function showExports({ status }: Moment, history: History): void {
  const heads = [text("export"), text("connected"), minor(text("kind")), medium(text("disks"))];
  heads.push(medium(number("requests/s")), minor(number("p50")), number("p99"), text("socket or listener"));
  const open = status.open_listeners ?? [];
  const all = status.exports.map((one) => ({ one, problem: problemOfExport(one, status) }));
  const rows = badFirst(all, ({ problem }) => problem !== "").map(({ one, problem }): LazyCell[] => {
    const last = history.ofExport(one.name);
    const portals = one.kind === "iscsi" ? open.filter((listener) => listener.export === one.name) : [];
    const places = [one.socket ?? [], one.addresses ?? [], portals.map((portal) => portal.address)];
    const place = places.flat().join(", ") || "-";
    return [
      one.name,
      one.connected ? "yes" : "no",
      one.kind,
      one.luns.map((lun) => lun.disk).join(", "),
      short(last?.requests ?? 0),
      took(last?.p50),
      took(last?.p99),
      { value: `${problem}\n${place}`, make: () => element("span", problem || place, problem ? "bad" : undefined) },
    ];
  });
  longTable("exports", heads, rows, "no export");
}

export function showWorkers(now: Moment, then: Moment | null): void {
  const heads = [text("worker"), number("work"), medium(number("polling with a result")), number("polling without a result"), number("sleep")];
  heads.push(medium(number("sleeps/s")));
  const rows = now.statistics.workers.map((worker) => {
    const before = then?.statistics.workers.find((one) => one.worker === worker.worker);
    const per = (of: (one: Worker) => number | undefined) => (then && before ? rate(now, then, of(worker) ?? 0, of(before) ?? 0) : 0);
    const share = (of: (one: Worker) => number | undefined) => `${Math.min(per(of) / 1e7, 100).toFixed(1)} %`;
    return [
      String(worker.worker),
      share((one) => one.work_ns),
      share((one) => one.poll_found_ns),
      share((one) => one.poll_empty_ns),
      share((one) => one.sleep_ns),
      short(per((one) => one.sleeps)),
    ];
  });
  table("workers", heads, rows, "no worker");
}
