// The heat map: a column for each second, a row for each tenth of a decade.

import type { DiskSecond } from "./counters";
import { $, style } from "./dom";
import { drawn } from "./history";

const ROWS = 50;
const DECADES = 5;
const LOWEST = Math.log10(1000);

function column(latencies: Map<number, number>): number[] {
  const counts = new Array<number>(ROWS).fill(0);
  for (const [ns, count] of latencies) {
    const row = Math.floor(((Math.log10(Math.max(ns, 1)) - LOWEST) / DECADES) * ROWS);
    const at = Math.min(Math.max(row, 0), ROWS - 1);
    counts[at] = (counts[at] ?? 0) + count;
  }
  return counts;
}

export function drawHeat(seconds: DiskSecond[]): void {
  const canvas = $<HTMLCanvasElement>("heat");
  const pen = canvas.getContext("2d");
  if (!pen) return;
  // This clears it, too.
  canvas.width = drawn(seconds);
  const columns = seconds.map((second) => column(second.latencies));
  const most = Math.max(1, ...columns.map((counts) => Math.max(...counts)));
  pen.fillStyle = style("--accent");
  columns.forEach((counts, x) => {
    counts.forEach((count, y) => {
      if (!count) return;
      pen.globalAlpha = 0.15 + (0.85 * Math.log1p(count)) / Math.log1p(most);
      pen.fillRect(canvas.width - columns.length + x, ROWS - 1 - y, 1, 1);
    });
  });
  pen.globalAlpha = 1;
}
