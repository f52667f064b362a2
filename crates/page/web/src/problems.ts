// The list of problems: reason, next attempt, and the command that helps.

import { $, element, replaceContent } from "./dom";
import type { Moment, Problem } from "./types";

/** Kinds of problems whose `name` is that of a disk. */
const OF_DISKS = ["disk", "job", "bitmap"];

function itemOf(problem: Problem, now: Moment, choose: (disk: string) => void): HTMLElement {
  const item = element("li", undefined, problem.severity);
  item.append(element("p", problem.problem));
  const more = element("p");
  if (problem.hint) more.append(element("span", "Hint: ", "faint"), problem.hint, " ");
  if (problem.next_try_seconds !== undefined) {
    const separator = problem.hint ? "· " : "";
    more.append(element("span", `${separator}next attempt in ${problem.next_try_seconds} s `, "faint"));
  }
  const isDisk = OF_DISKS.includes(problem.object) && now.status.disks.some((disk) => disk.name === problem.name);
  if (isDisk) {
    const button = element("button", `Show ${problem.name}`, "name");
    button.type = "button";
    button.onclick = () => choose(problem.name);
    more.append(button);
  }
  if (more.childNodes.length) item.append(more);
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
  replaceContent($("problems"), problems.map((one) => itemOf(one, now, choose)));
}
