// Jobs of disks, and their actions.

import { change } from "./changes";
import { type Cell, element, number, table, text } from "./dom";
import { bytes } from "./format";
import type { Job, Moment } from "./types";

interface Action {
  name: string;
  question?: string;
  method: string;
  where?: string;
  body?: unknown;
}

function actionsOf(job: Job): Action[] {
  const cancel = { name: "cancel", question: `Cancel the ${job.kind} of ${job.disk}?`, method: "DELETE" };
  switch (job.state) {
    case "running":
      return [{ name: "pause", method: "PUT", body: { paused: true } }, cancel];
    case "paused":
      return [{ name: "resume", method: "PUT", body: { paused: false } }, cancel];
    case "ready": {
      const question = `Switch ${job.disk} to ${job.target}?`;
      return [{ name: "switch", question, method: "POST", where: "/switch" }, cancel];
    }
    default:
      return [];
  }
}

export function showJobs({ statistics }: Moment): void {
  const heads = [text("disk"), text("job"), text("state"), number("done"), number("of"), text("target"), text("")];
  const rows = (statistics.jobs ?? []).map((job): Cell[] => {
    const reason = job.reason ? `: ${job.reason}` : "";
    const state = element("span", job.state + reason, job.state === "failed" ? "bad" : "");
    const actions = element("span");
    for (const { name, question, method, where, body } of actionsOf(job)) {
      const button = element("button", name);
      button.type = "button";
      const path = `/v1/disks/${encodeURIComponent(job.disk)}/job${where ?? ""}`;
      button.onclick = () => {
        if (!question || confirm(question)) change(name, method, path, body);
      };
      actions.append(button);
    }
    return [job.disk, job.kind, state, bytes(job.done), bytes(job.total), job.target ?? "-", actions];
  });
  table("jobs", heads, rows, "no job");
}
