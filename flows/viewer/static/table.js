// A table of any length: rows have one height, and only those in view are in the document.
import { decimal, time } from "./format.js";
import { go, rowAddress } from "./location.js";
import { marked, patternOf } from "./matches.js";
import { Problem } from "./problem.js";
import { visible } from "./text.js";
import { html, useEffect, useLayoutEffect, useMemo, useRef, useState } from "./ui.js";

/** @typedef {import("./rows.js").Rows} Source */

const HEIGHT = 24;
const TALLEST = 15_000_000; // browsers draw no taller element; beyond it, scrolling moves by more than a row a pixel

/** @type {Record<string, number>} */
const WIDTHS = { trajectory_id: 184, match: 480, prompt: 360, answer: 260, success: 64, reward: 72, policy: 120, stage: 110, task_id: 168, created_at: 148, tags: 120, termination: 92, env: 72, split: 88, run_id: 168 };

const NAMES = /** @type {Record<string, string>} */ ({ prompt: "question" });
const IDS = ["trajectory_id", "task_id", "run_id", "group_id", "episode_id", "parent_id"];

/** @param {string} column */
const width = (column) => (innerWidth < 600 && (column === "prompt" || column === "answer") ? 168 : WIDTHS[column]) ?? Math.min(200, 32 + 7 * column.length);

/**
 * @param {{
 *   rows: Source, columns: string[], sort: string, desc: boolean, sortBy: (column: string) => void,
 *   current: number, setCurrent: (index: number) => void, selected: Set<string>, at: string | undefined, words: string[],
 * }} props
 */
export function Table({ rows, columns, sort, desc, sortBy, current, setCurrent, selected, at, words }) {
  const pattern = useMemo(() => patternOf(words), [words.join("\n")]);
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

  rows.said.changed.value;
  useEffect(() => {
    rows.need(from, to - 1);
    if (!columns.includes("answer")) return;
    rows.said.need(Array.from({ length: to - from }, (_, i) => rows.row(from + i)?.("trajectory_id")).filter(Boolean));
  }, [rows, from, to, rows.changed.value, columns.includes("answer")]);
  const numbers = new Set(columns.filter((column) => column !== "created_at" && Array.from({ length: 9 }, (_, i) => rows.row(from + i)?.(column)).some((value) => typeof value === "number")));
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
      ${columns.map((column) => ["answer", "match"].includes(column) ? html`<div role="columnheader" class="soft">${column}</div>` : html`<div role="columnheader" class=${numbers.has(column) ? "number" : ""} aria-sort=${sort !== column ? "none" : desc ? "descending" : "ascending"}>
        <button title=${column} onClick=${() => sortBy(column)}>${NAMES[column] ?? column}${sort !== column ? "" : desc ? " ↓" : " ↑"}</button></div>`)}
    </div>
    <div class="tall" role="presentation" style=${{ height: `${Math.min(tall, TALLEST)}px` }}>
      <div role="presentation" style=${{ transform: `translateY(${start}px)` }}>
        ${Array.from({ length: to - from }, (_, i) => from + i).map((index) => {
          const row = rows.row(index);
          const id = row?.("trajectory_id");
          return html`<div key=${index} id=${`row-${index}`} role="row" aria-rowindex=${index + 2} aria-selected=${selected.has(id) ? "true" : "false"}
              class=${`line${index === current ? " current" : ""}`} onClick=${() => setCurrent(index)} onDblClick=${() => id && go(rowAddress(id, { at, ...(words.length ? { found: words.join("\n"), m: row?.("match_message") } : {}) }))}>
            <div role="gridcell">${selected.has(id) ? "●" : ""}</div>
            ${columns.map((column) => html`<${Cell} column=${column} value=${column === "answer" ? rows.said.known.get(id) : row?.(column)} at=${at} ready=${row !== null} pattern=${pattern} more=${words.length ? { found: words.join("\n"), m: row?.("match_message") } : {}} />`)}
          </div>`;
        })}
      </div>
    </div>
  </div>`;
}

/** A name that is too long for its column loses its middle: ends tell names apart. @param {{text: string}} props */
const Name = ({ text }) => html`<span>${text.slice(0, -12)}</span><span>${text.slice(-12)}</span>`;

/** @param {{column: string, value: any, at: string | undefined, ready: boolean, pattern: RegExp | null, more: object}} props `more` goes to the page of the row */
function Cell({ column, value, at, ready, pattern, more }) {
  if (!ready) return html`<div role="gridcell" class="soft">…</div>`;
  if (column === "trajectory_id") return html`<div role="gridcell" title=${visible(value)}><a class="name" tabindex="-1" href=${rowAddress(value, { at, ...more })}><${Name} text=${visible(value)} /></a></div>`;
  if (column === "answer" && !value) return html`<div role="gridcell" class="soft">${value === "" ? "–" : "…"}</div>`;
  if (value === null || value === undefined) return html`<div role="gridcell" class="soft">–</div>`;
  if (typeof value === "boolean") return html`<div role="gridcell" class=${value ? "good" : "bad"}>${value ? "✓ yes" : "✗ no"}</div>`;
  if (column === "created_at") return html`<div role="gridcell">${time(value)}</div>`;
  if (typeof value === "number") return html`<div role="gridcell" class="number">${decimal(value)}</div>`;
  if (IDS.includes(column)) return html`<div role="gridcell" title=${visible(value)}><span class="name"><${Name} text=${visible(value)} /></span></div>`;
  const text = Array.isArray(value) ? value.join(", ") : String(value);
  return html`<div role="gridcell" title=${visible(text)}>${marked(text, pattern)}</div>`;
}
