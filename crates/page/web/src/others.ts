// Sessions and dirty bitmaps, polled at a lower rate, and the events of the daemon.

import { ask, send } from "./api";
import { ask as question } from "./dialog";
import { $, type LazyCell, badFirst, element, longTable, medium, minor, number, table, text } from "./dom";
import { bytes, date } from "./format";
import type { Bitmap, Happened, Session } from "./types";

const EVENTS_KEPT = 12;

/** Returns the client: an initiator with its addresses, an address, or a virtual machine with its process. */
function clientOf(one: Session): string {
  if (one.front_end) {
    const { guest, pid, user } = one.front_end;
    const process = [pid === undefined ? "" : `pid ${pid}`, `user ${user}`].filter(Boolean).join(", ");
    return guest === undefined ? process : `${guest} (${process})`;
  }
  // Without their ports.
  const addresses = [...new Set((one.each_connection ?? []).map(({ client }) => client.replace(/:[0-9]+$/, "")))].join(", ");
  if (one.initiator && addresses) return `${one.initiator} at ${addresses}`;
  return one.initiator ?? one.client ?? "-";
}

export async function showSessions(): Promise<void> {
  const found = (await ask<Session[]>("/v1/sessions").catch(() => null)) ?? [];
  const heads = [text("export"), text("client"), minor(text("kind")), medium(number("connections"))];
  heads.push(medium(number("requests")), number("errors"));
  const count = (value: number | undefined) => (value === undefined ? "-" : String(value));
  const rows = badFirst(found, (one) => Boolean(one.errors)).map((one): LazyCell[] => [
    one.export,
    clientOf(one),
    one.kind,
    count(one.connections),
    count(one.requests),
    { value: count(one.errors), make: () => element("span", count(one.errors), one.errors ? "bad" : undefined) },
  ]);
  longTable("sessions", heads, rows, "no session");
}

function removal({ disk, name }: Bitmap): HTMLElement {
  const button = element("button", "remove");
  button.type = "button";
  const path = `/v1/disks/${encodeURIComponent(disk)}/bitmaps/${encodeURIComponent(name)}`;
  button.onclick = () =>
    question({
      title: `Remove the bitmap ${name} of ${disk}`,
      note: "The next backup of this name copies everything.",
      action: "Remove",
      run: () => send("DELETE", path).finally(showBitmaps),
    });
  return button;
}

export async function showBitmaps(): Promise<void> {
  const found = (await ask<Bitmap[]>("/v1/bitmaps").catch(() => null)) ?? [];
  $("recorded").hidden = !found.length;
  const heads = [text("disk"), text("bitmap"), number("changed since"), medium(text("last backup"))];
  heads.push(minor(text("to")), text("problem"), text("actions"));
  const rows = badFirst(found, (one) => one.reason !== undefined).map((one) => [
    one.disk,
    one.name || "(unknown)",
    bytes(one.dirty),
    date(one.at),
    one.target,
    element("span", one.reason ? `the next backup copies everything: ${one.reason}` : "", "bad"),
    one.name ? removal(one) : "",
  ]);
  table("bitmaps", heads, rows, "none");
}

/** The newest first. */
export function showEvent(event: Happened): void {
  $("happened").hidden = false;
  const more = [event.disk, event.size === undefined ? "" : bytes(event.size)].filter(Boolean).join(", ");
  const words = `${new Date().toTimeString().slice(0, 8)}  ${event.event} ${event.name}${more ? `: ${more}` : ""}`;
  const list = $("events");
  list.prepend(element("li", words));
  while (list.childElementCount > EVENTS_KEPT) list.lastElementChild?.remove();
}
