// Sessions and dirty bitmaps, polled at a lower rate, and the events of the daemon.

import { ask } from "./api";
import { $, element, number, table, text } from "./dom";
import { bytes, date } from "./format";
import type { Bitmap, Happened, Session } from "./types";

const EVENTS_KEPT = 12;

export async function showSessions(): Promise<void> {
  const found = (await ask<Session[]>("/v1/sessions").catch(() => null)) ?? [];
  const heads = [text("export"), text("kind"), text("initiator"), number("connections"), number("requests")];
  heads.push(number("errors"));
  const count = (value: number | undefined) => (value === undefined ? "-" : String(value));
  const rows = found.map((one) => [
    one.export,
    one.kind,
    one.initiator ?? "-",
    count(one.connections),
    count(one.requests),
    count(one.errors),
  ]);
  table("sessions", heads, rows, "no session");
}

export async function showBitmaps(): Promise<void> {
  const found = (await ask<Bitmap[]>("/v1/bitmaps").catch(() => null)) ?? [];
  $("recorded").hidden = !found.length;
  const heads = [text("disk"), text("bitmap"), number("changed since"), text("last backup"), text("to"), text("")];
  const rows = found.map((one) => [
    one.disk,
    one.name,
    bytes(one.dirty),
    date(one.at),
    one.target,
    element("span", one.reason ? `the next backup copies everything: ${one.reason}` : "", "bad"),
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
