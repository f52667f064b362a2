// The last minutes, disk by disk.

import { type DiskSecond, diskSecond } from "./counters";
import type { Moment } from "./types";

/** Seconds that are kept. */
export const KEPT = 240;

/** Seconds that are drawn: a minute, or all that are kept. */
export function drawn(seconds: DiskSecond[]): number {
  return seconds.length <= KEPT / 4 ? KEPT / 4 : KEPT;
}

export class History {
  /** The last moment, and the one before. */
  now: Moment | null = null;
  then: Moment | null = null;
  private disks = new Map<string, DiskSecond[]>();

  add(moment: Moment): void {
    const before = this.now;
    // A restarted daemon has no data yet.
    const isSame = before && before.statistics.at_ns < moment.statistics.at_ns;
    this.then = isSame ? before : null;
    this.now = moment;
    if (!isSame) this.disks.clear();
    const names = new Set(moment.status.disks.map((disk) => disk.name));
    for (const name of this.disks.keys()) {
      if (!names.has(name)) this.disks.delete(name);
    }
    for (const { name } of moment.status.disks) {
      const seconds = this.disks.get(name) ?? [];
      if (isSame) seconds.push(diskSecond(moment, before, name));
      if (seconds.length > KEPT) seconds.shift();
      this.disks.set(name, seconds);
    }
  }

  /** Oldest first. */
  of(disk: string): DiskSecond[] {
    return this.disks.get(disk) ?? [];
  }
}
