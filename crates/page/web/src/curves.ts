// Curves over time, by uPlot.

import uPlot from "uplot";
import { $, style } from "./dom";
import { clock, short, time } from "./format";

/** Values of one interval. */
export interface Point {
  /** In seconds. */
  at: number;
  reads: number;
  writes: number;
  p50: number | null;
  p99: number | null;
}

/** Time that the charts show. */
export interface Span {
  seconds: number;
  /** Marks are times of day instead of distances to the present. */
  isClock: boolean;
}

interface Curve {
  name: string;
  colour: string;
  of: (second: Point) => number | null;
}

/** Between marks of the time. */
const PARTS = 4;

/** Powers of ten around the values, in nanoseconds: at least from 10 µs to 1 ms. */
function decades(low: number | null, high: number | null): [number, number] {
  const from = Math.floor(Math.log10(Math.min(low || 1e4, 1e4)));
  const to = Math.ceil(Math.log10(Math.max(high || 1e6, 1e6)));
  return [10 ** from, 10 ** to];
}

function powers(low: number, high: number): number[] {
  const from = Math.round(Math.log10(low));
  const count = Math.round(Math.log10(high)) - from + 1;
  return Array.from({ length: count }, (_, at) => 10 ** (from + at));
}

/** Both charts show the same second under the pointer. */
const together = uPlot.sync("seconds");

class Chart {
  private readonly place: HTMLElement;
  private readonly plot: uPlot;
  private span: Span = { seconds: 60, isClock: false };

  constructor(
    id: string,
    private readonly curves: Curve[],
    private readonly shown: (value: number) => string,
    isLogarithmic: boolean,
  ) {
    this.place = $(id);
    const axis: uPlot.Axis = {
      stroke: () => style("--faint"),
      grid: { stroke: () => style("--line"), width: 1 },
      ticks: { show: false },
      size: 56,
    };
    const options: uPlot.Options = {
      ...this.size(),
      padding: [8, 20, 0, 0],
      cursor: { sync: { key: together.key }, drag: { setScale: false } },
      scales: {
        x: { time: false, range: (_, __, last) => [last - this.span.seconds, last] },
        y: isLogarithmic
          ? { distr: 3, range: (_, low, high) => decades(low, high) }
          : { range: (_, __, high) => [0, Math.max(high, 1) * 1.05] },
      },
      axes: [
        { ...axis, size: 28, splits: () => this.marks(), values: (_, marks) => marks.map((at) => this.ago(at)) },
        {
          ...axis,
          ...(isLogarithmic && { splits: (_, __, low, high) => powers(low, high), filter: (_, values) => values }),
          values: (_, values) => values.map((value) => shown(value).replace(/\.0+ /, " ")),
        },
      ],
      series: [
        { label: "at", value: (_, at) => (at === null ? "" : this.ago(at)) },
        ...curves.map(({ name, colour }) => ({
          label: name,
          stroke: () => style(colour),
          width: 1.5,
          points: { show: false },
          // No value at a time that a restarted daemon does not have.
          value: (_: uPlot, value: number | null | undefined) => (value === null || value === undefined ? "-" : shown(value)),
        })),
      ],
    };
    this.plot = new uPlot(options, [[], ...curves.map(() => [])] as uPlot.AlignedData, this.place);
    // Its place contains the description.
    this.plot.root.ariaHidden = "true";
    // Reading the width at each update would force a layout of the changed tables.
    new ResizeObserver(() => this.place.clientWidth && this.plot.setSize(this.size())).observe(this.place);
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => this.plot.redraw(false, true));
  }

  private size(): { width: number; height: number } {
    return { width: Math.max(this.place.clientWidth, 200), height: 140 };
  }

  private last(): number {
    const [times] = this.plot.data;
    return times[times.length - 1] ?? 0;
  }

  private marks(): number[] {
    return Array.from({ length: PARTS + 1 }, (_, at) => this.last() - (this.span.seconds * (PARTS - at)) / PARTS);
  }

  private ago(at: number): string {
    if (this.span.isClock) return clock(at, false);
    const seconds = Math.round(this.last() - at);
    if (seconds <= 0) return "now";
    return seconds % 60 === 0 ? `-${seconds / 60} min` : `-${seconds} s`;
  }

  show(seconds: Point[], span: Span): void {
    this.span = span;
    this.plot.setData([
      seconds.map((second) => second.at),
      ...this.curves.map((curve) => seconds.map(curve.of)),
    ] as uPlot.AlignedData);
    // Without a pointer, the legend shows the latest values.
    const isPointed = (this.plot.cursor.left ?? -1) >= 0;
    if (!isPointed && seconds.length) queueMicrotask(() => this.plot.setLegend({ idx: seconds.length - 1 }));
    const second = seconds.at(-1);
    const now = second && this.curves.map((curve) => `${curve.name} ${said(curve.of(second), this.shown)}`);
    this.place.setAttribute("aria-label", now ? `now: ${now.join(", ")}` : "no data yet");
  }
}

function said(value: number | null, shown: (value: number) => string): string {
  return value === null ? "none" : shown(value);
}

let charts: Chart[] | null = null;

/** The chosen disk's. Their place has to be visible. */
export function drawCurves(seconds: Point[], span: Span): void {
  charts ??= [
    new Chart(
      "rates",
      [
        { name: "reads", colour: "--accent", of: (second) => second.reads },
        { name: "writes", colour: "--second", of: (second) => second.writes },
      ],
      (value) => short(value).trim(),
      false,
    ),
    new Chart(
      "quantiles",
      [
        { name: "p50", colour: "--accent", of: (second) => second.p50 },
        { name: "p99", colour: "--second", of: (second) => second.p99 },
      ],
      time,
      true,
    ),
  ];
  for (const chart of charts) chart.show(seconds, span);
}
