// Backups and snapshots of several disks at one moment.

import { ask, send } from "./api";
import { SPEED, type Value, speedOf } from "./changes";
import { type Field, ask as question } from "./dialog";
import { capital } from "./format";
import { $, badFirst, element, medium, minor, table, text } from "./dom";
import type { Backup, Disk, Moment } from "./types";

const ENDED = ["done", "failed", "cancelled"];

/** Backups that are served over NBD, as listed last. Their jobs are ended by their backup. */
const served = new Set<string>();

export const isServed = (backup: string | undefined): boolean => backup !== undefined && served.has(backup);

export const pathOfBackup = (name: string): string => `/v1/backups/${encodeURIComponent(name)}`;

function button(name: string, title: string, note: string, run: () => Promise<void>): HTMLElement {
  const made = element("button", name);
  made.type = "button";
  const action = `${capital(name)} backup`;
  made.onclick = () => question({ title, note, action, run: () => run().finally(showBackups) });
  return made;
}

function actionsOf({ name, pull, jobs }: Backup): HTMLElement {
  const actions = element("span", undefined, "buttons");
  if (jobs.every((job) => ENDED.includes(job.state))) return actions;
  if (pull) {
    const note = "The disks are served no more. The checkpoint is complete: later backups can contain the changes since.";
    actions.append(button("end", `End the backup ${name}`, note, () => send("POST", `${pathOfBackup(name)}/end`)));
  }
  const note = "No disk changes. The copies are incomplete, and the checkpoint is not created.";
  actions.append(button("cancel", `Cancel the backup ${name}`, note, () => send("DELETE", pathOfBackup(name))));
  return actions;
}

const hasFailed = ({ jobs }: Backup): boolean => jobs.some((job) => job.state === "failed");

/** State of all disks of a backup, or of each disk. */
function stateOf(backup: Backup): HTMLElement {
  const { jobs } = backup;
  const of = (job: { state: string; reason?: string }) => (job.reason ? `${job.state}: ${job.reason}` : job.state);
  const isSame = new Set(jobs.map(of)).size === 1;
  const words = isSame && jobs[0] ? of(jobs[0]) : jobs.map((job) => `${job.disk} ${of(job)}`).join("; ");
  return element("span", words, hasFailed(backup) ? "bad" : "");
}

export async function showBackups(): Promise<void> {
  const found = (await ask<Backup[]>("/v1/backups").catch(() => null)) ?? [];
  served.clear();
  for (const { name, pull } of found) if (pull) served.add(name);
  $("kept").hidden = !found.length;
  const heads = [text("backup"), text("disks"), text("state"), medium(text("checkpoint")), medium(text("since"))];
  heads.push(minor(text("served or copied to")), text("actions"));
  const rows = badFirst(found, hasFailed).map((one) => [
    one.name,
    one.jobs.map((job) => job.disk).join(", "),
    stateOf(one),
    one.checkpoint ?? "-",
    one.since ?? "-",
    one.jobs.map((job) => job.target ?? "-").join(", "),
    actionsOf(one),
  ]);
  table("backups", heads, rows, "none");
}

function disksField(disks: Disk[], chosen: string | null): Field {
  const choices = disks.map(({ name }): [string, string] => [name, name]);
  return { name: "disks", label: "Disks", choices, isMultiple: true, isRequired: true, value: chosen ?? undefined };
}

/** Returns the path of a new image. The time makes it unique: no existing image is overwritten. */
function imageOf(folder: string, disk: string, checkpoint: string): string {
  const stamp = new Date().toISOString().replace(/[-:]/g, "").slice(0, 15);
  return `${folder.replace(/\/+$/, "")}/${[disk, checkpoint, stamp].filter(Boolean).join("-")}.qcow2`;
}

function begin(value: Value): Promise<void> {
  const isServed = value("how") === "pull";
  const names = value("disks").split(" ");
  const target = (disk: string) => ({ backend: "image", path: imageOf(value("place"), disk, value("checkpoint")) });
  const disks = names.map((disk) => (isServed ? { disk } : { disk, target: target(disk) }));
  const given = ["name", "checkpoint", "since"].filter((key) => value(key));
  const more = Object.fromEntries(given.map((key) => [key, value(key)]));
  return send("POST", "/v1/backups", { disks, ...(isServed && { pull: value("place") }), ...more, ...speedOf(value) });
}

/** The buttons for several disks. */
export function offerBackups(now: () => Moment | null, chosen: () => string | null): void {
  const disks = () => now()?.status.disks ?? [];
  $("backup-several").onclick = () =>
    question({
      title: "Back up disks",
      note: "The backup has the content of all disks at one moment, its start. With a checkpoint, later backups can contain the changes since.",
      fields: [
        disksField(disks(), chosen()),
        { name: "how", label: "Kind", choices: [["push", "copy to images in a folder"], ["pull", "serve over NBD until the backup is ended"]] },
        { name: "place", label: "Existing folder on the daemon's machine, or the address: unix:PATH or tcp:IP:PORT", placeholder: "/backup", isRequired: true },
        { name: "name", label: "Name of the backup", placeholder: "a new one" },
        { name: "checkpoint", label: "Checkpoint to create or replace", placeholder: "none, or monday" },
        { name: "since", label: "Only changes since the checkpoint", placeholder: "everything" },
        SPEED,
      ],
      action: "Start backup",
      run: (value) => begin(value).finally(showBackups),
    });
  $("snapshot-several").onclick = () =>
    question({
      title: "Snapshot of disks",
      note: "All disks continue in new qcow2 images, from one moment on. Their present content becomes the backing images and is only read.",
      fields: [
        disksField(disks(), chosen()),
        { name: "folder", label: "Existing folder for the new images, on the daemon's machine", placeholder: "/vm", isRequired: true },
      ],
      action: "Take snapshot",
      run: (value) => {
        const names = value("disks").split(" ");
        return send("POST", "/v1/snapshot", { disks: names.map((disk) => ({ disk, path: imageOf(value("folder"), disk, "") })) });
      },
    });
}
