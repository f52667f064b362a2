// Changes, each after a question. Readers get no controls for changes.

import { send } from "./api";
import { type Field, ask, showRefusal } from "./dialog";
import { $ } from "./dom";
import { sizeOf } from "./format";

/** Shows a failure of the connection to the daemon. */
export function showProblem(words: string): void {
  $("problem").textContent = words;
  $("problem").hidden = false;
}

export function hideProblem(): void {
  $("problem").hidden = true;
}

const pathOf = (disk: string): string => `/v1/disks/${encodeURIComponent(disk)}`;

/** Kinds of storage with the key and the label of their location. */
const STORAGE: Record<string, { text: string; key: string; label: string }> = {
  file: { text: "file or block device", key: "path", label: "Path" },
  image: { text: "qcow2 image", key: "path", label: "Path" },
  rbd: { text: "Ceph RBD image", key: "image", label: "POOL/IMAGE" },
  iscsi: { text: "iSCSI logical unit", key: "unit", label: "iscsi://HOST/TARGET/LUN" },
  nbd: { text: "NBD export", key: "uri", label: "nbd://HOST/EXPORT" },
};

const choices = (): [string, string][] => Object.entries(STORAGE).map(([kind, { text }]) => [kind, text]);

const TARGET: Field[] = [
  { name: "kind", label: "Kind of the target", choices: choices() },
  { name: "location", label: "Path or address on the daemon's machine", isRequired: true },
];
export const SPEED: Field = { name: "speed", label: "Bytes per second, at most", placeholder: "no limit, or 100M" };

export type Value = (name: string) => string;

function targetOf(value: Value): Record<string, string> {
  const kind = value("kind");
  return { backend: kind, [STORAGE[kind]?.key ?? "path"]: value("location") };
}

/** Returns the speed limit of a job, if there is one. */
export function speedOf(value: Value): { speed?: number } {
  return value("speed") ? { speed: sizeOf(value("speed")) } : {};
}

/** Starts a job, with the fields that have a value. */
function start(disk: string, kind: string, value: Value, more: Record<string, unknown> = {}): Promise<void> {
  return send("POST", `${pathOf(disk)}/job`, { kind, ...speedOf(value), ...more });
}

function resize(disk: string): void {
  ask({
    title: `Resize ${disk}`,
    note: "A smaller size is refused, because data beyond the new end is lost; see lunette disk resize --force.",
    fields: [{ name: "size", label: "New size", placeholder: "300M", isRequired: true }],
    action: "Resize",
    run: (value) => send("PUT", `${pathOf(disk)}/size`, { size: sizeOf(value("size")) }),
  });
}

function limit(disk: string): void {
  ask({
    title: `Limit ${disk}`,
    note: "The limits apply to all clients of the disk together. Without values, the disk has no limit.",
    fields: [
      { name: "iops", label: "Requests per second", placeholder: "no limit, or 500" },
      { name: "bandwidth", label: "Bytes per second", placeholder: "no limit, or 100M" },
    ],
    action: "Set limits",
    run: (value) => {
      const given = ["iops", "bandwidth"].filter((name) => value(name));
      return send("PUT", `${pathOf(disk)}/limits`, Object.fromEntries(given.map((name) => [name, sizeOf(value(name))])));
    },
  });
}

function snapshot(disk: string): void {
  ask({
    title: `Snapshot of ${disk}`,
    note: "The disk continues in a new qcow2 image. Its present content becomes the backing image and is only read.",
    fields: [{ name: "path", label: "Path of the new image on the daemon's machine", placeholder: "/vm/d0-1.qcow2", isRequired: true }],
    action: "Take snapshot",
    run: (value) => send("POST", "/v1/snapshot", { disks: [{ disk, path: value("path") }] }),
  });
}

function backup(disk: string): void {
  ask({
    title: `Back up ${disk}`,
    note: "With the name of a bitmap, the backup copies the changes since the last backup of this name. The first one copies everything.",
    fields: [
      ...TARGET,
      { name: "incremental", label: "Bitmap of an incremental backup", placeholder: "none, or daily" },
      { name: "at", label: "The copy has the content of the disk at", choices: [["start", "the start of the backup"], ["end", "the end of the backup"]] },
      SPEED,
    ],
    action: "Start backup",
    run: (value) => {
      const incremental = value("incremental") ? { incremental: value("incremental") } : {};
      return start(disk, "backup", value, { target: targetOf(value), at: value("at"), ...incremental });
    },
  });
}

function mirror(disk: string): void {
  ask({
    title: `Mirror ${disk}`,
    note: "All data is copied while clients use the disk. When the copy is complete, the disk can be switched to it.",
    fields: [
      ...TARGET,
      { name: "switch", label: "When the copy is complete", choices: [["", "wait for the switch"], ["yes", "switch at once"]] },
      SPEED,
    ],
    action: "Start mirror",
    run: (value) => start(disk, "mirror", value, { target: targetOf(value), switch: value("switch") === "yes" }),
  });
}

function stream(disk: string): void {
  ask({
    title: `Stream ${disk}`,
    note: "Copies the data of the backing images into the image, which then needs no backing image.",
    fields: [SPEED],
    action: "Start stream",
    run: (value) => start(disk, "stream", value),
  });
}

function commit(disk: string): void {
  ask({
    title: `Commit ${disk}`,
    note: "Copies the data of the image into its backing image, and switches the disk to the backing image.",
    fields: [SPEED],
    action: "Start commit",
    run: (value) => start(disk, "commit", value),
  });
}

function resume(disk: string): void {
  ask({
    title: `Resume ${disk}`,
    note: "Submits the I/Os that failed and wait. Correct their cause first.",
    action: "Resume",
    run: () => send("POST", `${pathOf(disk)}/resume`),
  });
}

function remove(disk: string): void {
  ask({
    title: `Remove ${disk}`,
    note: "The data stays where it is. The daemon refuses while exports use the disk.",
    action: "Remove",
    run: () => send("DELETE", pathOf(disk)),
  });
}

/** The buttons of the chosen disk. */
export function offerChanges(chosen: () => string | null): void {
  const offered = { resize, limit, snapshot, backup, mirror, stream, commit, resume, remove };
  for (const [id, run] of Object.entries(offered)) {
    $(id).onclick = () => {
      const disk = chosen();
      if (disk !== null) run(disk);
    };
  }
}

/** The form for a new disk, and an export of it. */
export function offerDisks(choose: (name: string) => void): void {
  const form = $<HTMLFormElement>("add");
  const field = (name: string) => form.elements.namedItem(name) as HTMLInputElement | HTMLSelectElement;
  const kinds = [...choices(), ["ram", "memory"] as [string, string]];
  (field("backend") as HTMLSelectElement).append(...kinds.map(([kind, text]) => new Option(text, kind)));
  const kindChanged = () => {
    const kind = field("backend").value;
    $("place").hidden = kind === "ram";
    $("size").hidden = !["file", "ram"].includes(kind);
    $("place-name").textContent = STORAGE[kind]?.label ?? "Path";
  };
  field("backend").onchange = kindChanged;
  kindChanged();
  form.onsubmit = async (event) => {
    event.preventDefault();
    showRefusal("add-problem", "");
    const value = (name: string) => field(name).value.trim();
    const [name, backend, size, socket] = [value("name"), value("backend"), value("size"), value("socket")];
    const disk: Record<string, unknown> = { backend };
    if (backend !== "ram") disk[STORAGE[backend]?.key ?? "path"] = value("place");
    try {
      if (size && !$("size").hidden) disk.size = sizeOf(size);
      await send("PUT", pathOf(name), disk);
      choose(name);
      const served = { kind: "vhost-blk", disk: name, socket };
      if (socket) await send("PUT", `/v1/exports/${encodeURIComponent(name)}`, served);
    } catch (error) {
      showRefusal("add-problem", (error as Error).message);
      return;
    }
    form.reset();
    kindChanged();
    $<HTMLDetailsElement>("adding").open = false;
  };
}
