// Differences of counters between two moments.

import type { Histogram, Latencies, Moment, Statistics } from "./types";

/** Stages in the order of a request's way. */
export const STAGES = ["popped", "parsed", "awaited", "received", "submitted", "reaped", "answered", "notified"];

interface Span {
  count: number;
  ns: number;
}

/** Requests by the upper bound of their latency, in nanoseconds. */
export type Buckets = Map<number, number>;

/** Counters of a disk, over all queues and operations. */
export interface Sums {
  reads: number;
  writes: number;
  bytes: number;
  spans: Map<string, Span>;
  latencies: Buckets;
}

const nothing = (): Sums => ({ reads: 0, writes: 0, bytes: 0, spans: new Map(), latencies: new Map() });

type Spans = Partial<Record<string, Histogram>>;

const spansOf = ({ operations }: Latencies): Spans[] =>
  Object.values(operations).map((operation) => ("spans" in operation ? (operation.spans as Spans) : operation));

function addBuckets(sums: Buckets, { buckets }: Histogram): void {
  for (const [upTo, count] of buckets) sums.set(upTo, (sums.get(upTo) ?? 0) + count);
}

function addLatencies(sums: Sums, latencies: Latencies): void {
  for (const spans of spansOf(latencies)) {
    for (const [name, histogram] of Object.entries(spans)) {
      if (!histogram?.count) continue;
      let span = sums.spans.get(name);
      if (!span) sums.spans.set(name, (span = { count: 0, ns: 0 }));
      span.count += histogram.count;
      span.ns += histogram.sum_ns;
      if (name === "total") addBuckets(sums.latencies, histogram);
    }
  }
}

/** Returns the sums of all disks. Reads each queue once. */
export function sumsOf(statistics: Statistics): Map<string, Sums> {
  const all = new Map<string, Sums>();
  for (const { name, operations } of statistics.disks) {
    const sums = nothing();
    for (const [kind, io] of Object.entries(operations)) {
      if (kind === "read") sums.reads += io.requests;
      else sums.writes += io.requests;
      sums.bytes += io.bytes;
    }
    all.set(name, sums);
  }
  for (const { labels, latencies, disks } of statistics.queues ?? []) {
    for (const [name, own] of Object.entries(disks ?? {})) {
      const sums = all.get(name);
      if (sums) addLatencies(sums, own);
    }
    const sums = labels.disk === undefined || disks?.[labels.disk] ? undefined : all.get(labels.disk);
    if (sums && latencies) addLatencies(sums, latencies);
  }
  return all;
}

/** Returns the latencies of all exports, over all queues and operations. */
export function latenciesOfExports({ queues }: Statistics): Map<string, Buckets> {
  const all = new Map<string, Buckets>();
  for (const { labels, latencies } of queues ?? []) {
    let sums = all.get(labels.export);
    if (!sums) all.set(labels.export, (sums = new Map()));
    for (const { total } of latencies ? spansOf(latencies) : []) if (total) addBuckets(sums, total);
  }
  return all;
}

const requestsOf = (buckets: Buckets): number => [...buckets.values()].reduce((sum, count) => sum + count, 0);

function quantile(buckets: Buckets, part: number): number {
  const all = [...buckets].sort((a, b) => a[0] - b[0]);
  const wanted = part * requestsOf(buckets);
  let seen = 0;
  for (const [upTo, count] of all) {
    seen += count;
    if (seen >= wanted) return upTo;
  }
  return 0;
}

/** Rows of the heat map: from 1 µs to 100 ms, ten for each power of ten. */
export const ROWS = 50;
const ROWS_PER_DECADE = 10;
const LOWEST = Math.log10(1000);

/** Returns pairs of a row of the heat map and its number of requests, in one list that takes little memory. */
function heatOf(latencies: Buckets): number[] {
  const counts = new Map<number, number>();
  for (const [ns, count] of latencies) {
    const row = Math.floor((Math.log10(Math.max(ns, 1)) - LOWEST) * ROWS_PER_DECADE);
    const at = Math.min(Math.max(row, 0), ROWS - 1);
    counts.set(at, (counts.get(at) ?? 0) + count);
  }
  return [...counts].flat();
}

/** What a disk did between two moments. Hundreds of disks have hundreds of these each. */
export interface DiskSecond {
  /** Of the later moment, in seconds since the daemon started. */
  at: number;
  reads: number;
  writes: number;
  bytes: number;
  /** In nanoseconds; `null` without requests. */
  p50: number | null;
  p99: number | null;
  /** Pairs of a row of the heat map and its number of requests. */
  heat: number[];
}

/** Mean nanoseconds of a stage. */
export type Stage = [string, number];

const NO_HEAT: number[] = [];

function difference(now: Buckets, then: Buckets): Buckets {
  const buckets: Buckets = new Map();
  for (const [upTo, count] of now) {
    const more = count - (then.get(upTo) ?? 0);
    if (more > 0) buckets.set(upTo, more);
  }
  return buckets;
}

function grown(name: string, now: Sums, then: Sums): Span {
  const [after, before] = [now.spans.get(name), then.spans.get(name)];
  return { count: (after?.count ?? 0) - (before?.count ?? 0), ns: (after?.ns ?? 0) - (before?.ns ?? 0) };
}

/** Returns each stage that requests went through between two sums of a disk. */
export function stagesOf(now: Sums = nothing(), then: Sums = nothing()): Stage[] {
  const spans = STAGES.map((name) => [name, grown(name, now, then)] as const).filter(([, span]) => span.count > 0);
  return spans.map(([name, span]) => [name, span.ns / span.count]);
}

/** Returns the difference of two sums of a disk, `seconds` apart. */
export function diskSecond(at: number, seconds: number, now: Sums = nothing(), then: Sums = nothing()): DiskSecond {
  const per = (after: number, before: number) => (seconds > 0 ? Math.max(0, (after - before) / seconds) : 0);
  const latencies = grown("total", now, then).count > 0 ? difference(now.latencies, then.latencies) : null;
  return {
    at,
    reads: per(now.reads, then.reads),
    writes: per(now.writes, then.writes),
    bytes: per(now.bytes, then.bytes),
    p50: latencies && quantile(latencies, 0.5),
    p99: latencies && quantile(latencies, 0.99),
    heat: latencies ? heatOf(latencies) : NO_HEAT,
  };
}

/** Requests of an export per second, and their latencies in nanoseconds; `null` without requests. */
export interface ExportSecond {
  requests: number;
  p50: number | null;
  p99: number | null;
}

/** Returns the difference of the latencies of an export, `seconds` apart. */
export function exportSecond(seconds: number, now: Buckets = new Map(), then: Buckets = new Map()): ExportSecond {
  const latencies = difference(now, then);
  if (!latencies.size || seconds <= 0) return { requests: 0, p50: null, p99: null };
  return { requests: requestsOf(latencies) / seconds, p50: quantile(latencies, 0.5), p99: quantile(latencies, 0.99) };
}

/** How often something that is counted happened per second. */
export function rate(now: Moment, then: Moment, after: number, before: number): number {
  const seconds = (now.statistics.at_ns - then.statistics.at_ns) / 1e9;
  return seconds > 0 ? Math.max(0, (after - before) / seconds) : 0;
}
