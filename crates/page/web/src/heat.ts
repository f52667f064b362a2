// The heat map: a column for each second, a row for each tenth of a decade.

import { type DiskSecond, ROWS } from "./counters";
import { $, style } from "./dom";
import { drawn } from "./history";

export function drawHeat(seconds: DiskSecond[]): void {
  const canvas = $<HTMLCanvasElement>("heat");
  const pen = canvas.getContext("2d");
  if (!pen) return;
  // This clears it, too.
  canvas.width = drawn(seconds);
  const counts = (heat: number[]) => heat.filter((_, at) => at % 2 === 1);
  const most = Math.max(1, ...seconds.map(({ heat }) => Math.max(0, ...counts(heat))));
  pen.fillStyle = style("--accent");
  seconds.forEach(({ heat }, x) => {
    for (let at = 0; at < heat.length; at += 2) {
      const [row, count] = [heat[at] ?? 0, heat[at + 1] ?? 0];
      pen.globalAlpha = 0.15 + (0.85 * Math.log1p(count)) / Math.log1p(most);
      pen.fillRect(canvas.width - seconds.length + x, ROWS - 1 - row, 1, 1);
    }
  });
  pen.globalAlpha = 1;
}
