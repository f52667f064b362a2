// Differences of counters between two moments.

import type { Latencies, Moment, Statistics } from "./types";

/** Stages in the order of a request's way. */
export const STAGES = ["popped", "parsed", "awaited", "received", "submitted", "reaped", "answered", "notified"];

interface Span {
  count: number;
  ns: number;
  buckets: Map<number, number>;
}

type Spans = Record<string, Span>;

const NOTHING: Span = { count: 0, ns: 0, buckets: new Map() };

/** A disk's requests, over all queues and operations. */
function spansOf(statistics: Statistics, disk: string): Spans {
  const sums: Spans = {};
  for (const queue of statistics.queues ?? []) {
    const own: Latencies | undefined =
      queue.disks?.[disk] ?? (queue.labels.disk === disk ? queue.latencies : undefined);
    for (const operation of Object.values(own?.operations ?? {})) {
      for (const [name, histogram] of Object.entries("spans" in operation ? operation.spans : operation)) {
        if (histogram?.count === undefined) continue;
        const sum = (sums[name] ??= { count: 0, ns: 0, buckets: new Map() });
        sum.count += histogram.count;
        sum.ns += histogram.sum_ns;
        for (const [upTo, count] of histogram.buckets) {
          sum.buckets.set(upTo, (sum.buckets.get(upTo) ?? 0) + count);
        }
      }
    }
  }
  return sums;
}

function difference(now: Span, then: Span): Span {
  const buckets = new Map<number, number>();
  for (const [upTo, count] of now.buckets) {
    const more = count - (then.buckets.get(upTo) ?? 0);
    if (more > 0) buckets.set(upTo, more);
  }
  return { count: now.count - then.count, ns: now.ns - then.ns, buckets };
}

function quantile(buckets: Map<number, number>, part: number): number {
  const all = [...buckets].sort((a, b) => a[0] - b[0]);
  const wanted = part * all.reduce((sum, [, count]) => sum + count, 0);
  let seen = 0;
  for (const [upTo, count] of all) {
    seen += count;
    if (seen >= wanted) return upTo;
  }
  return 0;
}

interface Totals {
  reads: number;
  writes: number;
  bytes: number;
}

function totals(statistics: Statistics, disk: string): Totals {
  const sums = { reads: 0, writes: 0, bytes: 0 };
  const own = statistics.disks.find((one) => one.name === disk);
  for (const [kind, io] of Object.entries(own?.operations ?? {})) {
    if (kind === "read") sums.reads += io.requests;
    else sums.writes += io.requests;
    sums.bytes += io.bytes;
  }
  return sums;
}

/** What a disk did between two moments. */
export interface DiskSecond {
  /** Of the later moment, in seconds since the daemon started. */
  at: number;
  reads: number;
  writes: number;
  bytes: number;
  /** In nanoseconds; `null` without requests. */
  p50: number | null;
  p99: number | null;
  /** Requests by their latency's upper bound. */
  latencies: Map<number, number>;
  /** Mean nanoseconds of each stage that requests went through. */
  stages: [string, number][];
}

export function diskSecond(now: Moment, then: Moment, disk: string): DiskSecond {
  const seconds = (now.statistics.at_ns - then.statistics.at_ns) / 1e9;
  const per = (after: number, before: number) => (seconds > 0 ? Math.max(0, (after - before) / seconds) : 0);
  const [after, before] = [totals(now.statistics, disk), totals(then.statistics, disk)];
  const [spans, old] = [spansOf(now.statistics, disk), spansOf(then.statistics, disk)];
  const change = (name: string) => difference(spans[name] ?? NOTHING, old[name] ?? NOTHING);
  const total = change("total");
  const stages = STAGES.map((name) => [name, change(name)] as const).filter(([, span]) => span.count > 0);
  return {
    at: now.statistics.at_ns / 1e9,
    reads: per(after.reads, before.reads),
    writes: per(after.writes, before.writes),
    bytes: per(after.bytes, before.bytes),
    p50: total.count > 0 ? quantile(total.buckets, 0.5) : null,
    p99: total.count > 0 ? quantile(total.buckets, 0.99) : null,
    latencies: total.buckets,
    stages: stages.map(([name, span]) => [name, span.ns / span.count]),
  };
}

/** How often something that is counted happened per second. */
export function rate(now: Moment, then: Moment, after: number, before: number): number {
  const seconds = (now.statistics.at_ns - then.statistics.at_ns) / 1e9;
  return seconds > 0 ? Math.max(0, (after - before) / seconds) : 0;
}
