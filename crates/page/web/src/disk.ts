// The chosen disk: its stages, its last minutes, its slowest requests.

import { ask } from "./api";
import { STAGES, type Stage } from "./counters";
import { drawCurves } from "./curves";
import { $, element, minor, number, table, text } from "./dom";
import { bytes, clock, time } from "./format";
import { drawHeat } from "./heat";
import { type History, drawn } from "./history";
import { isLive } from "./past";
import { problemsOf } from "./overview";
import type { Disk, Queue, SlowRequest } from "./types";

const SLOWEST = 5;

export function showDisk(disk: Disk, history: History): void {
  $("one-name").textContent = disk.name;
  const parts = [disk.path ? `${disk.backend} ${disk.path}` : disk.backend, bytes(disk.size), ...spaceOf(disk), `blocks of ${disk.block_size} bytes`];
  if (disk.serial) parts.push(`serial number ${disk.serial}`);
  if (disk.read_only) parts.push("read-only");
  $("one-about").textContent = parts.join(", ");
  const problems = problemsOf(disk);
  $("one-problem").textContent = problems.join("\n");
  $("one-problem").hidden = !problems.length;
  const isImage = disk.backend === "image";
  for (const id of ["stream", "commit"]) $(id).hidden = !isImage;
  $("resume").hidden = !disk.waiting;
  const seconds = history.of(disk.name);
  showStages(history.stages(disk.name));
  if (isLive()) drawCurves(seconds, { seconds: drawn(seconds), isClock: false });
  drawHeat(seconds);
}

/** Allocation of the files, and free space of their file system. */
function spaceOf({ size, allocated, free }: Disk): string[] {
  if (allocated === undefined || free === undefined) return [];
  const percent = size ? ` (${Math.round((allocated * 100) / size)} %)` : "";
  return [`${bytes(allocated)}${percent} allocated`, `${bytes(free)} free in the file system`];
}

function showStages(stages: Stage[]): void {
  const most = Math.max(1, ...stages.map(([, ns]) => ns));
  const bars = stages.flatMap(([name, ns]) => {
    const bar = element("div", undefined, "bar");
    const fill = element("div");
    fill.style.width = `${(ns * 100) / most}%`;
    bar.append(fill);
    return [element("span", name), bar, element("span", time(ns), "n")];
  });
  $("stages").replaceChildren(...(bars.length ? bars : [element("span", "no request", "faint")]));
}

/** Each stage that took time, in its order. */
function partsOf(request: SlowRequest): string {
  const stages = ["noticed", ...STAGES];
  const parts = request.stages_ns.map((at, stage) => {
    const took = stage > 0 ? at - (request.stages_ns[stage - 1] ?? 0) : 0;
    return { name: stages[stage] ?? "", took };
  });
  const shown = parts.filter((part) => part.took > 0);
  return shown.map((part) => `${part.name} ${time(part.took)}`).join(", ");
}

export async function showSlowest(disk: string): Promise<void> {
  const path = `/v1/latency?slowest=${SLOWEST}&select=${encodeURIComponent(disk)}`;
  const found = await ask<{ queues?: Queue[] }>(path).catch(() => null);
  const requests = (found?.queues ?? []).flatMap((queue) => {
    const where = `${queue.labels.export}/${queue.labels.queue}`;
    return (queue.slow ?? []).map((request) => ({ where, request }));
  });
  requests.sort((a, b) => b.request.total_ns - a.request.total_ns);
  const heads = [number("ended at"), minor(text("queue")), text("operation"), number("took"), text("stages")];
  const rows = requests
    .slice(0, SLOWEST)
    .map(({ where, request }) => [
      request.ended_ms === undefined ? "-" : clock(request.ended_ms / 1000, true),
      where,
      request.operation,
      time(request.total_ns),
      partsOf(request),
    ]);
  table("slow", heads, rows, "none");
}
