// The list of problems: reason, next attempt, and the command that helps.

import { $, element } from "./dom";
import type { Moment, Problem } from "./types";

/** Kinds of problems whose `name` is that of a disk. */
const OF_DISKS = ["disk", "job", "bitmap"];

/** Returns the disk to show for a problem. */
export function diskOf(problem: Problem, { status }: Moment): string | null {
  const export_ = status.exports.find((one) => one.name === problem.name);
  const name = OF_DISKS.includes(problem.object) ? problem.name : export_?.luns[0]?.disk;
  return status.disks.some((disk) => disk.name === name) ? (name ?? null) : null;
}

function itemOf(problem: Problem, now: Moment, choose: (disk: string) => void): HTMLElement {
  const item = element("li", undefined, problem.severity);
  item.append(element("p", problem.problem));
  if (problem.next_try_seconds !== undefined) {
    item.append(element("p", `next attempt in ${problem.next_try_seconds} s`, "faint"));
  }
  if (problem.hint) {
    const hint = element("p", "", "hint");
    hint.append(element("span", "Hint: ", "faint"), problem.hint);
    item.append(hint);
  }
  const disk = diskOf(problem, now);
  if (disk !== null) {
    const button = element("button", `Show disk ${disk}`, "name");
    button.type = "button";
    button.onclick = () => choose(disk);
    item.append(button);
  }
  return item;
}

/** Problems as listed last, to replace the list only after a change. */
let listed = "";

export function showProblems(now: Moment, choose: (disk: string) => void): void {
  const problems = now.status.problems ?? [];
  $("wrong").hidden = !problems.length;
  const text = JSON.stringify(problems);
  if (text === listed) return;
  listed = text;
  $("problems").replaceChildren(...problems.map((one) => itemOf(one, now, choose)));
}
