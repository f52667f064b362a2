// Jobs of disks, and their actions.

import { send } from "./api";
import { isServed, pathOfBackup } from "./backups";
import { SPEED, type Value, speedOf } from "./changes";
import { type Field, ask } from "./dialog";
import { type Cell, badFirst, element, minor, number, table, text } from "./dom";
import { bytes, capital } from "./format";
import type { Job, Moment } from "./types";

interface Action {
  name: string;
  note: string;
  method: string;
  path: string;
  fields?: Field[];
  body?: (value: Value) => unknown;
}

function actionsOf(job: Job): Action[] {
  const path = `/v1/disks/${encodeURIComponent(job.disk)}/job`;
  const note = "The disk stays as it is, and the target is incomplete.";
  // A backup ends on all of its disks.
  const cancel = { name: "cancel", note, method: "DELETE", path: job.backup ? pathOfBackup(job.backup) : path };
  const set = (name: string, paused: boolean, note: string) => ({ name, note, method: "PUT", path, body: () => ({ paused }) });
  const body = (value: Value) => ({ speed: speedOf(value).speed ?? 0 });
  const present = job.speed ? String(job.speed) : "";
  const speed = { name: "speed", note: "Applies at once.", method: "PUT", path, fields: [{ ...SPEED, value: present }], body };
  if (isServed(job.backup) && job.state !== "failed") return [];
  switch (job.state) {
    case "running":
      return [set("pause", true, "The job continues when it is resumed."), speed, cancel];
    case "paused":
      return [set("resume", false, "The job copies again."), speed, cancel];
    case "ready":
      return [{ name: "switch", note: `The disk continues on ${job.target}.`, method: "POST", path: `${path}/switch` }, cancel];
    case "failed":
      return [{ name: "forget", note: "Removes the failed job from the list and from the problems.", method: "DELETE", path }];
    default:
      return [];
  }
}

/** Share of the disk that is processed. */
function progress(job: Job): HTMLElement {
  const bar = element("progress");
  bar.max = Math.max(1, job.total);
  bar.value = job.done;
  bar.ariaLabel = `${job.kind} of ${job.disk}`;
  const cell = element("span", `${Math.floor((job.done * 100) / Math.max(1, job.total))} % `);
  cell.append(bar);
  return cell;
}

export function showJobs({ statistics }: Moment): void {
  const heads = [text("disk"), text("job"), text("state"), text("progress"), minor(number("done")), minor(number("of"))];
  heads.push(minor(text("target")), text("actions"));
  // Also a switch that failed has a reason.
  const jobs = badFirst(statistics.jobs ?? [], (job) => job.state === "failed" || job.reason !== undefined);
  const rows = jobs.map((job): Cell[] => {
    const reason = job.reason ? `: ${job.reason}` : "";
    const state = element("span", undefined, job.state === "failed" ? "bad" : "");
    state.append(element("span", job.state, "word"), reason);
    const actions = element("span", undefined, "buttons");
    for (const { name, note, method, path, fields, body } of actionsOf(job)) {
      const button = element("button", name);
      button.type = "button";
      const title = `${capital(name)} the ${job.kind} of ${job.disk}`;
      const run = (value: Value) => send(method, path, body?.(value));
      button.onclick = () => ask({ title, note, fields, action: capital(name), run });
      actions.append(button);
    }
    return [job.disk, element("span", job.kind, "word"), state, progress(job), bytes(job.done), bytes(job.total), job.target ?? "-", actions];
  });
  table("jobs", heads, rows, "no job");
}
