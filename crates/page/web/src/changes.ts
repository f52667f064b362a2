// Changes, each after a confirmation. Readers get no controls for changes.

import { send } from "./api";
import { $ } from "./dom";

/** How long a refusal stays to be read, in milliseconds. */
const PROBLEM_SHOWN = 10_000;

let problemUntil = 0;

/** Says what went wrong; a refusal stays for some seconds, though all else goes on. */
export function showProblem(words: string, isRefusal: boolean): void {
  $("problem").textContent = words;
  $("problem").hidden = false;
  if (isRefusal) problemUntil = Date.now() + PROBLEM_SHOWN;
}

export function allGoesOn(): void {
  $("problem").hidden = Date.now() >= problemUntil;
}

/** True: the daemon has done it. */
export async function change(what: string, method: string, path: string, body?: unknown): Promise<boolean> {
  try {
    await send(method, path, body);
    problemUntil = 0;
    return true;
  } catch (error) {
    showProblem(`${what}: ${(error as Error).message}`, true);
    return false;
  }
}

const pathOf = (disk: string): string => `/v1/disks/${encodeURIComponent(disk)}`;

function resize(disk: string): void {
  const question = `New size of ${disk} in bytes. Shrinking a disk discards the data beyond its new end.`;
  const size = prompt(question);
  if (size && /^[0-9]+$/.test(size) && confirm(`Resize ${disk} to ${size} bytes?`)) {
    change("resize", "PUT", `${pathOf(disk)}/size`, { size: Number(size) });
  }
}

function limit(disk: string): void {
  const iops = prompt(`Maximum requests per second of ${disk}; empty: no limit`);
  if (iops !== null && /^[0-9]*$/.test(iops)) {
    change("limit", "PUT", `${pathOf(disk)}/limits`, iops ? { iops: Number(iops) } : {});
  }
}

function snapshot(disk: string): void {
  const question =
    `Path of a new image on the daemon's machine for ${disk}; the present content of the disk becomes its backing image`;
  const path = prompt(question);
  if (path && confirm(`Continue ${disk} in ${path}?`)) {
    change("snapshot", "POST", "/v1/snapshot", { disks: [{ disk, path }] });
  }
}

function remove(disk: string): void {
  if (confirm(`Remove the disk ${disk}? The daemon refuses while exports use it.`)) {
    change("remove", "DELETE", pathOf(disk));
  }
}

/** The buttons of the chosen disk. */
export function offerChanges(chosen: () => string | null): void {
  const offered = { resize, limit, snapshot, remove };
  for (const [id, run] of Object.entries(offered)) {
    $(id).onclick = () => {
      const disk = chosen();
      if (disk !== null) run(disk);
    };
  }
}

/** Kinds of disks with a place that is not a path: key and label of the place. */
const PLACES: Record<string, [string, string]> = { rbd: ["image", "POOL/IMAGE"], nbd: ["uri", "nbd://HOST/EXPORT"] };

/** The form for a new disk, and an export of it. */
export function offerDisks(choose: (name: string) => void): void {
  const form = $<HTMLFormElement>("add");
  const field = (name: string) => form.elements.namedItem(name) as HTMLInputElement | HTMLSelectElement;
  const kindChanged = () => {
    const kind = field("backend").value;
    $("place").hidden = kind === "ram";
    $("size").hidden = kind === "image" || kind in PLACES;
    $("place-name").textContent = PLACES[kind]?.[1] ?? "Path";
  };
  field("backend").onchange = kindChanged;
  kindChanged();
  form.onsubmit = async (event) => {
    event.preventDefault();
    const value = (name: string) => field(name).value.trim();
    const [name, backend, size, socket] = [value("name"), value("backend"), value("size"), value("socket")];
    const disk: Record<string, string> = { backend };
    if (backend !== "ram") disk[PLACES[backend]?.[0] ?? "path"] = value("place");
    if (size && (backend === "ram" || backend === "file")) disk.size = size;
    if (!confirm(`Add the disk ${name}${socket ? `, and serve it at ${socket}` : ""}?`)) return;
    if (!(await change("add", "PUT", pathOf(name), disk))) return;
    choose(name);
    const served = { kind: "vhost-blk", disk: name, socket };
    if (socket && !(await change("serve", "PUT", `/v1/exports/${encodeURIComponent(name)}`, served))) return;
    form.reset();
    kindChanged();
    $<HTMLDetailsElement>("adding").open = false;
  };
}
