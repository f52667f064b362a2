// The last minutes, disk by disk.

import { type Buckets, type DiskSecond, type ExportSecond, type Stage, type Sums } from "./counters";
import { diskSecond, exportSecond, latenciesOfExports, stagesOf, sumsOf } from "./counters";
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
  /** Sums of the last moment, and of the one before. */
  private sums = new Map<string, Sums>();
  private old = new Map<string, Sums>();
  private exports = new Map<string, ExportSecond>();
  private latencies = new Map<string, Buckets>();

  add(moment: Moment): void {
    const before = this.now;
    // A restarted daemon has no data yet.
    const isSame = before && before.statistics.at_ns < moment.statistics.at_ns;
    this.then = isSame ? before : null;
    this.now = moment;
    if (!isSame) this.disks.clear();
    const [sums, old] = [sumsOf(moment.statistics), this.sums];
    [this.sums, this.old] = [sums, isSame ? old : sums];
    const at = moment.statistics.at_ns / 1e9;
    const passed = isSame ? at - before.statistics.at_ns / 1e9 : 0;
    this.addExports(moment, passed);
    const names = new Set(moment.status.disks.map((disk) => disk.name));
    for (const name of this.disks.keys()) {
      if (!names.has(name)) this.disks.delete(name);
    }
    for (const { name } of moment.status.disks) {
      const seconds = this.disks.get(name) ?? [];
      if (isSame) seconds.push(diskSecond(at, passed, sums.get(name), old.get(name)));
      if (seconds.length > KEPT) seconds.shift();
      this.disks.set(name, seconds);
    }
  }

  private addExports(moment: Moment, passed: number): void {
    const [latencies, old] = [latenciesOfExports(moment.statistics), this.latencies];
    this.latencies = latencies;
    this.exports = new Map([...latencies].map(([name, now]) => [name, exportSecond(passed, now, old.get(name))]));
  }

  /** The last second of an export. */
  ofExport(name: string): ExportSecond | undefined {
    return this.exports.get(name);
  }

  /** Stages of a disk in the last second. */
  stages(disk: string): Stage[] {
    return stagesOf(this.sums.get(disk), this.old.get(disk));
  }

  /** Oldest first. */
  of(disk: string): DiskSecond[] {
    return this.disks.get(disk) ?? [];
  }
}
