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
}

export const text = (name: string): Head => ({ name, isText: true });
export const number = (name: string): Head => ({ name, isText: false });

/** Fills a table anew. */
export function table(id: string, heads: Head[], rows: Cell[][], none: string): void {
  const head = element("tr");
  for (const { name, isText } of heads) {
    const cell = element("th", name, isText ? "text" : "");
    cell.scope = "col";
    head.append(cell);
  }
  const body = rows.map((cells) => {
    const row = element("tr");
    cells.forEach((content, at) => {
      const cell = element("td", undefined, heads[at]?.isText ? "text" : "");
      cell.append(content);
      row.append(cell);
    });
    return row;
  });
  if (!rows.length) {
    const row = element("tr");
    const cell = element("td", none, "faint");
    cell.colSpan = heads.length;
    row.append(cell);
    body.push(row);
  }
  const filled = $(id);
  const focused = filled.contains(document.activeElement) ? document.activeElement?.textContent : null;
  filled.replaceChildren(head, ...body);
  if (focused) keepFocus(filled, focused);
}

/** Whoever goes through the page with the keyboard stays where they are, though the row is another element now. */
function keepFocus(filled: HTMLElement, label: string): void {
  const same = [...filled.querySelectorAll("button")].find((button) => button.textContent === label);
  same?.focus({ preventScroll: true });
}

export function style(name: string): string {
  return getComputedStyle(document.documentElement).getPropertyValue(name).trim();
}
