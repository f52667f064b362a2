// Upgrades: the checks of `lunette upgrade`, the command that starts it, and the daemon that follows. The daemon itself cannot start a
// program: its sandbox prevents it, and a token must not select the program that receives the memory of guests.

import { send } from "./api";
import { ask as question } from "./dialog";
import { $ } from "./dom";
import { clock } from "./format";
import type { Moment, Status } from "./types";

async function check(status: Status | undefined): Promise<void> {
  await send("GET", "/v1/upgrade/check");
  const where = status?.host ? `on ${status.host}, ` : "";
  $("upgrade-state").textContent =
    `All clients can stay. Run this command ${where}as root or the daemon's user, with the new program. This page then shows the new daemon.`;
  showCommand(status?.upgrade_command ?? "lunette upgrade");
}

/** Shows the command with a button that copies it. Without TLS, browsers permit copies only on localhost. */
function showCommand(command: string): void {
  $("upgrade-command").textContent = command;
  $("upgrade-start").hidden = false;
  const button = $("upgrade-copy");
  button.hidden = !navigator.clipboard;
  button.textContent = "Copy";
  button.onclick = () =>
    navigator.clipboard.writeText(command).then(
      () => void (button.textContent = "Copied"),
      // The browser or the user refuses: the selected command can be copied by keyboard.
      () => getSelection()?.selectAllChildren($("upgrade-command")),
    );
}

export function offerUpgrade(now: () => Moment | null): void {
  $("upgrade").onclick = () =>
    question({
      title: "Check an upgrade",
      note: "Makes the checks of lunette upgrade: RAM disks, jobs, the configuration file, and storage or clients that would delay it. Changes nothing. The daemon cannot start a program, so the page then shows the command that does.",
      action: "Check",
      run: () => check(now()?.status),
    });
}

let before: Status | null = null;

/** Shows that another process serves the page now. */
export function followUpgrade(status: Status): void {
  if (before && before.pid !== status.pid) {
    $("upgrade-start").hidden = true;
    const name = ({ version, pid }: Status) => `version ${version} (process ${pid})`;
    $("upgrade-state").textContent = `${name(before)} was replaced by ${name(status)} at ${clock(Date.now() / 1000, true)}.`;
  }
  before = status;
}
