// The recorded history of the chosen disk: the last hour by second, or the last day by minute.

import { ask, report } from "./api";
import { type Point, drawCurves } from "./curves";
import { $ } from "./dom";

/** Range that the charts show. */
type Range = "live" | "hour" | "day";

/** Response of `/v1/history`. Intervals without I/O are absent. */
interface Recorded {
  interval_seconds: number;
  from: number;
  to: number;
  at: number[];
  reads: number[];
  writes: number[];
  bytes: number[];
  p50_ns: number[];
  p99_ns: number[];
  errors: number[];
}

let range: Range = "live";

export const isLive = (): boolean => range === "live";

/** Returns a point for every interval, also for those without I/O. */
export function pointsOf(found: Recorded): Point[] {
  const step = found.interval_seconds;
  const index = new Map(found.at.map((at, place) => [at, place]));
  const first = found.at[0] ?? found.to;
  const start = first - Math.floor((first - found.from) / step) * step;
  const points: Point[] = [];
  for (let at = start; at <= found.to; at += step) {
    const place = index.get(at);
    const value = (values: number[]) => (place === undefined ? 0 : (values[place] ?? 0));
    points.push({
      at,
      reads: value(found.reads),
      writes: value(found.writes),
      p50: value(found.p50_ns) || null,
      p99: value(found.p99_ns) || null,
    });
  }
  return points;
}

/** Shows the history of a disk, unless the live range is chosen. */
export async function showPast(disk: string): Promise<void> {
  if (range === "live") return;
  const interval = range === "hour" ? "second" : "minute";
  const path = `/v1/history?interval=${interval}&disk=${encodeURIComponent(disk)}`;
  const found = await ask<Recorded>(path).catch(() => null);
  if (!found || isLive()) return;
  const seconds = range === "hour" ? 3600 : 86_400;
  drawCurves(pointsOf(found), { seconds, isClock: true });
  const errors = found.errors.reduce((sum, count) => sum + count, 0);
  $("past-errors").textContent = errors ? `${errors} I/Os failed in this time` : "";
}

/** The buttons that choose the range. A report has no history. */
export function offerRanges(chosen: () => string | null, live: () => void): void {
  $("ranges").hidden = report !== null;
  for (const one of ["live", "hour", "day"] as Range[]) {
    $(`range-${one}`).onclick = () => {
      range = one;
      for (const other of ["live", "hour", "day"]) {
        $(`range-${other}`).ariaPressed = String(other === one);
      }
      $("past-errors").textContent = "";
      const disk = chosen();
      if (one === "live") live();
      else if (disk !== null) showPast(disk);
    };
  }
}
