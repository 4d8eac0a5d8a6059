// A table of any length: rows have one height, and only those in view are in the document.
import { decimal, time } from "./format.js";
import { rowAddress } from "./location.js";
import { Problem } from "./problem.js";
import { visible } from "./text.js";
import { html, useEffect, useLayoutEffect, useRef, useState } from "./ui.js";

/** @typedef {import("./rows.js").Rows | import("./rows.js").Found} Source */

const HEIGHT = 24;
const TALLEST = 15_000_000; // browsers draw no taller element; beyond it, scrolling moves by more than a row a pixel

/** @type {Record<string, number>} */
const WIDTHS = { trajectory_id: 184, prompt: 420, policy: 120, stage: 110, task_id: 168, created_at: 148, tags: 120, success: 72, termination: 92, env: 72, split: 88, run_id: 168 };

/** @param {string} column */
const width = (column) => WIDTHS[column] ?? Math.min(200, 32 + 7 * column.length);

/**
 * @param {{
 *   rows: Source, columns: string[], sort: string, desc: boolean, sortBy: (column: string) => void,
 *   current: number, setCurrent: (index: number) => void, selected: Set<string>, at: string | undefined,
 * }} props
 */
export function Table({ rows, columns, sort, desc, sortBy, current, setCurrent, selected, at }) {
  const box = useRef(/** @type {HTMLElement | null} */ (null));
  const [scroll, setScroll] = useState(0);
  const [room, setRoom] = useState(600);
  rows.changed.value; // rows that come later are drawn when they are here
  const tall = rows.total * HEIGHT;
  const scale = Math.max(1, tall / TALLEST);
  const visibleRows = Math.ceil(room / HEIGHT) + 1;
  const first = Math.max(0, Math.min(Math.floor((scroll * scale) / HEIGHT), rows.total - visibleRows + 2));
  const from = Math.max(0, first - 6);
  const to = Math.min(rows.total, first + visibleRows + 6);

  useEffect(() => rows.need(from, to - 1), [rows, from, to]);
  useLayoutEffect(() => {
    const element = /** @type {HTMLElement} */ (box.current);
    const watch = new ResizeObserver(() => setRoom(element.clientHeight - HEIGHT));
    watch.observe(element);
    return () => watch.disconnect();
  }, []);
  useLayoutEffect(() => {
    const element = /** @type {HTMLElement} */ (box.current);
    const [above, below] = [current * HEIGHT, (current + 2) * HEIGHT - element.clientHeight];
    if (element.scrollTop * scale > above) element.scrollTop = above / scale;
    else if (element.scrollTop * scale < below) element.scrollTop = below / scale;
  }, [current, rows]);

  const template = ["24px", ...columns.map((column) => `${width(column)}px`)].join(" ");
  const shift = scroll - ((scroll * scale) % HEIGHT) - (first - from) * HEIGHT; // the first drawn row, in the scaled height
  const start = scale === 1 ? from * HEIGHT : shift;
  return html`${rows.problem && html`<${Problem} problem=${rows.problem} />`}<div class="grid" role="grid" tabindex="0" ref=${box} aria-label="rows of the buffer" aria-rowcount=${rows.total + 1}
      aria-colcount=${columns.length + 1} aria-activedescendant=${rows.row(current) ? `row-${current}` : undefined}
      style=${{ "--columns": template }} onScroll=${() => setScroll(/** @type {HTMLElement} */ (box.current).scrollTop)}>
    <div class="head line" role="row" aria-rowindex="1">
      <div role="columnheader" aria-label="selected">x</div>
      ${columns.map((column) => html`<div role="columnheader" aria-sort=${sort !== column ? "none" : desc ? "descending" : "ascending"}>
        <button onClick=${() => sortBy(column)}>${column}${sort !== column ? "" : desc ? " ↓" : " ↑"}</button></div>`)}
    </div>
    <div class="tall" role="presentation" style=${{ height: `${Math.min(tall, TALLEST)}px` }}>
      <div role="presentation" style=${{ transform: `translateY(${start}px)` }}>
        ${Array.from({ length: to - from }, (_, i) => from + i).map((index) => {
          const row = rows.row(index);
          const id = row?.("trajectory_id");
          return html`<div key=${index} id=${`row-${index}`} role="row" aria-rowindex=${index + 2} aria-selected=${selected.has(id) ? "true" : "false"}
              class=${`line${index === current ? " current" : ""}`} onClick=${() => setCurrent(index)}>
            <div role="gridcell">${selected.has(id) ? "●" : ""}</div>
            ${columns.map((column) => html`<${Cell} column=${column} value=${row?.(column)} at=${at} ready=${row !== null} />`)}
          </div>`;
        })}
      </div>
    </div>
  </div>`;
}

/** @param {{column: string, value: any, at: string | undefined, ready: boolean}} props */
function Cell({ column, value, at, ready }) {
  if (!ready) return html`<div role="gridcell" class="soft">…</div>`;
  if (column === "trajectory_id") return html`<div role="gridcell"><a tabindex="-1" href=${rowAddress(value, { at })}>${visible(value)}</a></div>`;
  if (value === null || value === undefined) return html`<div role="gridcell" class="soft">–</div>`;
  if (typeof value === "boolean") return html`<div role="gridcell" class=${value ? "good" : "bad"}>${value ? "✓ yes" : "✗ no"}</div>`;
  if (column === "created_at") return html`<div role="gridcell">${time(value)}</div>`;
  if (typeof value === "number") return html`<div role="gridcell" class="number">${decimal(value)}</div>`;
  const text = visible(Array.isArray(value) ? value.join(", ") : String(value));
  return html`<div role="gridcell" title=${text}>${text}</div>`;
}
