// The page: follows a daemon, or shows a report of one.

import { ApiError, hasToken, listen, report, setToken, takeToken } from "./api";
import { offerBackups, showBackups } from "./backups";
import { hideProblem, offerChanges, offerDisks, showProblem } from "./changes";
import { showDisk, showSlowest } from "./disk";
import { $ } from "./dom";
import { clock, date } from "./format";
import { History } from "./history";
import { showJobs } from "./jobs";
import { showBitmaps, showEvent, showSessions } from "./others";
import { offerRanges, showPast } from "./past";
import { showProblems } from "./problems";
import { byNeed, showDisks, showExports, showHead, showTotals, showWorkers } from "./overview";
import { followUpgrade, offerUpgrade } from "./upgrade";
import type { Happened, Moment, Report } from "./types";

/** Moments between two looks at what is requested now and then. */
const SELDOM = 5;
const RETRY = 1000;
/** Time in milliseconds in which events of jobs are collected. */
const COLLECTED = 300;

const history = new History();
/** May be of a disk that comes only with the next moment. */
let wanted: string | null = null;
let chosen: string | null = null;
let moments = 0;
let collecting: ReturnType<typeof setTimeout> | undefined;
/** Time of the last moment, in seconds since 1970. */
let lastAnswer = 0;

function choose(name: string): void {
  wanted = name;
  show();
  $("one").scrollIntoView({ block: "start" });
  showSlowest(name);
  showPast(name);
}

function show(): void {
  showOverview();
  showChosen();
  showOthers();
}

function showOverview(): void {
  const { now } = history;
  if (!now) return;
  const disks = now.status.disks;
  chosen = disks.some((disk) => disk.name === wanted) ? wanted : (byNeed(disks)[0]?.name ?? null);
  document.body.classList.toggle("looks", report !== null || !now.status.may_change);
  $("main").hidden = false;
  showHead(now);
  showProblems(now, choose);
  showTotals(now, history);
  showDisks(now, history, chosen, choose, show);
}

function showChosen(): void {
  const disk = history.now?.status.disks.find((one) => one.name === chosen);
  $("one").hidden = !disk;
  if (disk) showDisk(disk, history);
}

function showOthers(): void {
  const { now, then } = history;
  if (!now) return;
  showExports(now, history);
  showJobs(now);
  showWorkers(now, then);
}

function showSeldom(): void {
  if (chosen !== null) {
    showSlowest(chosen);
    showPast(chosen);
  }
  showSessions();
  if (report) return;
  showBitmaps();
  showBackups();
}

async function seen(moment: Moment): Promise<void> {
  $("login").hidden = true;
  hideProblem();
  document.body.classList.remove("gone");
  lastAnswer = Date.now() / 1000;
  history.add(moment);
  followUpgrade(moment.status);
  // A task of its own, so that the page reacts in between. More tasks would cause more layouts.
  await pause(0);
  show();
  if (moments % SELDOM === 0) showSeldom();
  moments += 1;
}

/** Shows backups and bitmaps once for all events of a short time. */
function showBackupsSoon(): void {
  collecting ??= setTimeout(() => {
    collecting = undefined;
    showBackups().then(showBitmaps);
  }, COLLECTED);
}

async function heard(event: string, data: string): Promise<void> {
  if (event === "moment") {
    // A defect of the page is not a daemon that does not respond.
    await seen(JSON.parse(data)).catch(reportError);
  } else if (event !== "missed") {
    showEvent(JSON.parse(data) as Happened);
    // Jobs create bitmaps and belong to backups.
    if (event.startsWith("job.")) showBackupsSoon();
  }
}

function needsToken(): void {
  $("login").hidden = false;
  $("main").hidden = true;
  $("state").textContent = hasToken() ? "wrong token" : "token required";
  $("state").className = "bad";
}

const pause = (ms: number) => new Promise((done) => setTimeout(done, ms));

/** Nobody sees a hidden page: it listens to nothing. */
async function untilVisible(): Promise<void> {
  while (document.hidden) {
    await new Promise((done) => document.addEventListener("visibilitychange", done, { once: true }));
  }
}

let isFollowing = false;

/** Follows the daemon until it requires a token. */
async function follow(): Promise<void> {
  if (isFollowing) return;
  isFollowing = true;
  await untilRefused();
  isFollowing = false;
  needsToken();
}

/** Shows what the daemon sends, over one connection after the other, until it refuses the token. */
async function untilRefused(): Promise<void> {
  for (;;) {
    await untilVisible();
    const stop = new AbortController();
    const hidden = () => document.hidden && stop.abort();
    document.addEventListener("visibilitychange", hidden);
    try {
      await listen("/v1/live?brief=true", stop, heard);
    } catch (error) {
      if (error instanceof ApiError && error.status === 401) return;
      if (!document.hidden) {
        $("state").textContent = "no response from the daemon";
        $("state").className = "bad";
        document.body.classList.add("gone");
        const since = lastAnswer ? `; the page shows its state of ${clock(lastAnswer, true)}` : "";
        // The message of a TypeError is that of the browser.
        const reason = error instanceof TypeError ? "The daemon cannot be reached" : (error as Error).message;
        showProblem(`${reason}${since}`);
      }
    } finally {
      document.removeEventListener("visibilitychange", hidden);
    }
    await pause(RETRY);
  }
}

/** What was seen, second by second, at once. */
function showReport({ seconds, samples }: Report): void {
  document.body.className = "report looks";
  for (const sample of samples) history.add(sample);
  show();
  showSeldom();
  const when = new Date(seconds * 1000).toISOString().slice(17, 19);
  $("about").textContent += `; report of ${date(seconds)}:${when} UTC, ${samples.length - 1} s`;
}

$("login").onsubmit = (event) => {
  event.preventDefault();
  // The first token has no answer yet.
  if (isFollowing) return;
  setToken($<HTMLInputElement>("token").value.trim());
  follow();
};
offerChanges(() => chosen);
offerDisks(choose);
offerBackups(() => history.now, () => chosen);
offerUpgrade(() => history.now);
$("filter").oninput = show;
offerRanges(() => chosen, show);
if (report) {
  showReport(report);
} else {
  takeToken();
  follow();
}
