// Jobs of disks, and their actions.

import { send } from "./api";
import { ask } from "./dialog";
import { type Cell, element, minor, number, table, text } from "./dom";
import { bytes } from "./format";
import type { Job, Moment } from "./types";

interface Action {
  name: string;
  note: string;
  method: string;
  where?: string;
  body?: unknown;
}

function actionsOf(job: Job): Action[] {
  const cancel = { name: "cancel", note: "The disk stays as it is, and the target is incomplete.", method: "DELETE" };
  const set = (name: string, paused: boolean, note: string) => ({ name, note, method: "PUT", body: { paused } });
  switch (job.state) {
    case "running":
      return [set("pause", true, "The job continues when it is resumed."), cancel];
    case "paused":
      return [set("resume", false, "The job copies again."), cancel];
    case "ready":
      return [{ name: "switch", note: `The disk continues on ${job.target}.`, method: "POST", where: "/switch" }, cancel];
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
  const rows = (statistics.jobs ?? []).map((job): Cell[] => {
    const reason = job.reason ? `: ${job.reason}` : "";
    const state = element("span", job.state + reason, job.state === "failed" ? "bad" : "");
    const actions = element("span", undefined, "buttons");
    for (const { name, note, method, where, body } of actionsOf(job)) {
      const button = element("button", name);
      button.type = "button";
      const path = `/v1/disks/${encodeURIComponent(job.disk)}/job${where ?? ""}`;
      const title = `${name} the ${job.kind} of ${job.disk}`;
      const run = () => send(method, path, body);
      button.onclick = () => ask({ title, note, action: name, run });
      actions.append(button);
    }
    return [job.disk, job.kind, state, progress(job), bytes(job.done), bytes(job.total), job.target ?? "-", actions];
  });
  table("jobs", heads, rows, "no job");
}
