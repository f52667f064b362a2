// Elements of the page. Text is always inserted as text.

export function $<E extends HTMLElement = HTMLElement>(id: string): E {
  return document.getElementById(id) as E;
}

export function element<K extends keyof HTMLElementTagNameMap>(
  name: K,
  text?: string,
  className?: string,
): HTMLElementTagNameMap[K] {
  const made = document.createElement(name);
  if (text !== undefined) made.textContent = text;
  if (className) made.className = className;
  return made;
}

export type Cell = string | HTMLElement;

/** A column's head. Text stands at the left, numbers at the right. */
export interface Head {
  name: string;
  isText: boolean;
  /** Screens from this width on show it; all screens by default. */
  from?: "tablet" | "desktop";
  /** Sorts the table by this column. */
  sort?: () => void;
  isSorted?: boolean;
}

export const text = (name: string): Head => ({ name, isText: true });
export const number = (name: string): Head => ({ name, isText: false });
export const minor = (head: Head): Head => ({ ...head, from: "desktop" });
export const medium = (head: Head): Head => ({ ...head, from: "tablet" });

const classOf = (head: Head | undefined): string =>
  [head?.isText ? "text" : "", head?.from ?? ""].filter(Boolean).join(" ");

function headRow(heads: Head[]): HTMLTableRowElement {
  const row = element("tr");
  for (const head of heads) {
    const cell = element("th", undefined, classOf(head));
    cell.scope = "col";
    if (head.sort) {
      const button = element("button", head.name, "name");
      button.type = "button";
      button.onclick = head.sort;
      if (head.isSorted) cell.ariaSort = head.isText ? "ascending" : "descending";
      cell.append(button);
    } else {
      cell.textContent = head.name;
    }
    row.append(cell);
  }
  return row;
}

function bodyRow(heads: Head[], cells: Cell[]): HTMLTableRowElement {
  const row = element("tr");
  cells.forEach((content, at) => {
    const cell = element("td", undefined, classOf(heads[at]));
    cell.append(content);
    row.append(cell);
  });
  return row;
}

/** A cell of a long table: a text, or an element that is made when `value` has changed. */
export type LazyCell = string | { value: string; make: () => HTMLElement };

const valueOf = (cell: LazyCell): string => (typeof cell === "string" ? cell : cell.value);

/** Columns and values of the rows of long tables, to update only cells that have changed. */
const shownRows = new WeakMap<Element, { columns: string; values: string[] }>();

function lazyRow(before: HTMLTableRowElement | undefined, heads: Head[], columns: string, cells: LazyCell[]): HTMLTableRowElement {
  const values = cells.map(valueOf);
  const shown = before && shownRows.get(before);
  if (!before || shown?.columns !== columns) {
    const row = bodyRow(heads, cells.map((cell) => (typeof cell === "string" ? cell : cell.make())));
    shownRows.set(row, { columns, values });
    return row;
  }
  cells.forEach((cell, at) => {
    if (values[at] === shown.values[at]) return;
    const place = before.cells[at];
    if (typeof cell === "string") {
      const text = place?.firstChild;
      if (text instanceof Text) text.data = cell;
      else if (place) place.textContent = cell;
    } else {
      place?.replaceChildren(cell.make());
    }
  });
  shown.values = values;
  return before;
}

/** Rows of a long table that are shown at first, and that each press of its button adds. The layout of 500 rows takes 40 ms. */
const STEP = 100;
const limits = new Map<string, number>();

/** Renders a long table with its latest rows. Its button stays the same element while its text does. */
const redraw = new Map<string, () => void>();

/** Updates the cells of a table that have changed, in its first rows. */
export function longTable(id: string, heads: Head[], rows: LazyCell[][], none: string): void {
  const old = [...$(id).children] as HTMLTableRowElement[];
  const columns = heads.map((head) => `${head.name} ${head.isSorted ?? ""}`).join();
  const limit = limits.get(id) ?? STEP;
  const shown = rows.slice(0, limit);
  redraw.set(id, () => longTable(id, heads, rows, none));
  const more = () => {
    limits.set(id, (limits.get(id) ?? STEP) + STEP);
    redraw.get(id)?.();
  };
  const rest = rows.length > limit ? [moreRow(heads, rows.length - limit, more)] : [];
  fill(id, heads, () => [...shown.map((cells, at) => lazyRow(old[at + 1], heads, columns, cells)), ...rest], none);
}

/** The last row of a table that has more. */
function moreRow(heads: Head[], hidden: number, more: () => void): HTMLTableRowElement {
  const row = element("tr");
  const cell = element("td", `${hidden} more `, "text");
  cell.colSpan = heads.length;
  const button = element("button", `Show ${Math.min(hidden, STEP)}`);
  button.type = "button";
  button.onclick = more;
  cell.append(button);
  row.append(cell);
  return row;
}

/** Fills a table, and replaces only rows that have changed. */
export function table(id: string, heads: Head[], rows: Cell[][], none: string): void {
  fill(id, heads, () => rows.map((cells) => bodyRow(heads, cells)), none);
}

function fill(id: string, heads: Head[], rows: () => HTMLTableRowElement[], none: string): void {
  const filled = $(id);
  const focused = focusedIn(filled);
  const wanted = [headRow(heads), ...rows()];
  if (wanted.length === 1) {
    const row = element("tr");
    const cell = element("td", none, "faint text");
    cell.colSpan = heads.length;
    row.append(cell);
    wanted.push(row);
  }
  const old = [...filled.children] as HTMLElement[];
  wanted.forEach((row, at) => {
    const before = old[at];
    if (!before) filled.append(row);
    else if (before !== row && !before.isEqualNode(row)) before.replaceWith(row);
  });
  for (const rest of old.slice(wanted.length)) rest.remove();
  keepFocus(filled, focused);
}

/** Replaces the content of an element. */
export function replaceContent(filled: HTMLElement, content: HTMLElement[]): void {
  const focused = focusedIn(filled);
  filled.replaceChildren(...content);
  keepFocus(filled, focused);
}

/** Returns the text of the focused element, if it lies in this one. */
const focusedIn = (filled: HTMLElement): string | null =>
  filled.contains(document.activeElement) ? (document.activeElement?.textContent ?? null) : null;

/** Moves the focus to the button that has replaced the focused one. */
function keepFocus(filled: HTMLElement, label: string | null): void {
  if (!label || filled.contains(document.activeElement)) return;
  const same = [...filled.querySelectorAll("button")].find((button) => button.textContent === label);
  same?.focus({ preventScroll: true });
}

/** Objects with a problem, then the others, each in the daemon's order. */
export const badFirst = <T>(all: T[], isBad: (one: T) => boolean): T[] => [...all.filter(isBad), ...all.filter((one) => !isBad(one))];

export function style(name: string): string {
  return getComputedStyle(document.documentElement).getPropertyValue(name).trim();
}
