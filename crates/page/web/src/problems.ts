// The list of problems: reason, next attempt, and the command that helps.

import { $, element } from "./dom";
import { time } from "./format";
import type { History } from "./history";
import type { Moment, Problem } from "./types";

/** Kinds of problems whose `name` is that of a disk. */
const OF_DISKS = ["disk", "slow disk", "job", "bitmap"];

function itemOf(problem: Problem, now: Moment, choose: (disk: string) => void): HTMLElement {
  const item = element("li", undefined, problem.severity);
  item.append(element("p", problem.problem));
  const more = element("p");
  if (problem.hint) more.append(element("span", "Hint: ", "faint"), problem.hint, " ");
  if (problem.next_try_seconds !== undefined) {
    more.append(element("span", `Next attempt in ${problem.next_try_seconds} s. `, "faint"));
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

/** Latency from which a disk is slow, in nanoseconds, and the number of its last seconds with requests that are examined. */
const SLOW_NS = 5e8;
const EXAMINED = 5;

/** Rounds down to a power of two times the limit: a text that changes each second would replace the list and move the focus. */
const rounded = (ns: number) => SLOW_NS * 2 ** Math.floor(Math.log2(ns / SLOW_NS));

/** Returns a warning for each disk whose 99th percentile has been high for some seconds. The daemon does not judge latencies. */
export function slowDisks(now: Moment, history: History): Problem[] {
  return now.status.disks.flatMap(({ name }): Problem[] => {
    const last = history.of(name).slice(-2 * EXAMINED).filter(({ p99 }) => p99 !== null).slice(-EXAMINED);
    const least = Math.min(...last.map(({ p99 }) => p99 ?? 0));
    if (last.length < EXAMINED || least < SLOW_NS) return [];
    const [stage] = history.stages(name).sort((a, b) => b[1] - a[1]);
    const isStorage = stage?.[0] === "reaped" ? ", the time of the storage" : "";
    const where = stage ? `; most of the time passes in the stage ${stage[0]}${isStorage}` : "";
    const problem = `disk ${name} is slow: 1 % of its requests take longer than ${time(rounded(least))}${where}`;
    return [{ severity: "warning", object: "slow disk", name, problem, hint: `lunette latency ${name} --slowest` }];
  });
}

/** Problems as listed last, to replace the list only after a change. */
let listed = "";

export function showProblems(now: Moment, slow: Problem[], choose: (disk: string) => void): void {
  const problems = [...(now.status.problems ?? []), ...slow];
  $("wrong").hidden = !problems.length;
  const text = JSON.stringify(problems);
  if (text === listed) return;
  listed = text;
  $("problems").replaceChildren(...problems.map((one) => itemOf(one, now, choose)));
}
