// A tree as a picture: boxes in columns, each joined to the one before. The server lays it out: x is the column of a box and y its row.
import { Wide, html, useEffect, useRef, useState } from "./ui.js";

/**
 * @typedef {{
 *   parent: number | null, x: number, y: number, mark: string, line: string, under: string, told: string,
 * }} Box `mark` is a class that colours its rule, `line` and `under` its two lines, `told` all of it
 */

const BOX = { width: 220, height: 36, gapX: 28, gapY: 6, margin: 8 };
const LETTERS = 28; // of a line that fit into a box

/** @param {{x: number, y: number}} box */
const left = (box) => BOX.margin + box.x * (BOX.width + BOX.gapX);
/** @param {{x: number, y: number}} box */
const top = (box) => BOX.margin + box.y * (BOX.height + BOX.gapY);

/**
 * One stop of the tabulator for all boxes: arrows go to the parent, the first child, and the boxes above and below; Enter opens one.
 * @param {{boxes: Box[], chosen: number, choose: (number: number) => void, open: (number: number) => void, label: string}} props
 */
export function Drawing({ boxes, chosen, choose, open, label }) {
  const root = useRef(/** @type {HTMLElement | null} */ (null));
  const width = Math.max(...boxes.map(left)) + BOX.width + BOX.margin;
  const height = Math.max(...boxes.map(top)) + BOX.height + BOX.margin;
  useEffect(() => {
    root.current?.querySelector(".leaf.chosen")?.scrollIntoView({ block: "nearest", inline: "nearest" });
  }, [boxes, chosen]);
  const move = (/** @type {KeyboardEvent} */ event) => {
    const pressed = event.key === "Enter" || event.key === " ";
    const next = pressed ? Math.max(0, chosen) : neighbour(boxes, Math.max(0, chosen), event.key);
    if (next === null) return;
    event.preventDefault();
    event.stopPropagation();
    if (pressed) return void open(next);
    choose(next);
    requestAnimationFrame(() => /** @type {SVGElement | null} */ (root.current?.querySelector(".leaf.chosen"))?.focus());
  };
  return html`<div class="drawing" ref=${root} tabindex="0" role="region" aria-label=${label}>
    <svg width=${width} height=${height} viewBox=${`0 0 ${width} ${height}`} role="group" aria-label=${label} onKeyDown=${move}>
      ${boxes.map((box, i) => box.parent !== null && html`<${Branch} key=${i} from=${boxes[box.parent]} to=${box} />`)}
      ${boxes.map((box, i) => html`<g key=${i} class=${`leaf ${box.mark}${i === chosen ? " chosen" : ""}`} transform=${`translate(${left(box)} ${top(box)})`}
          role="button" tabindex=${i === Math.max(0, chosen) ? "0" : "-1"} aria-label=${`${cut(box.line)} ${box.under}`} aria-pressed=${i === chosen ? "true" : "false"} onClick=${() => choose(i)}>
        <title>${box.told}</title>
        <rect width=${BOX.width} height=${BOX.height} />
        <rect class="rule" width="6" height=${BOX.height} />
        <text class="name mono" x="12" y="15">${cut(box.line)}${" "}</text>
        <text class="kind" x="12" y="30">${box.under}</text>
      </g>`)}
    </svg>
  </div>`;
}

/** The same as a table, which is made when it is opened. @param {{rows: () => unknown}} props */
export function AsTable({ rows }) {
  const [open, setOpen] = useState(false);
  return html`<details onToggle=${(/** @type {Event} */ event) => setOpen(/** @type {HTMLDetailsElement} */ (event.currentTarget).open)}><summary>as a table</summary>${open && html`<${Wide} label="the tree as a table">${rows()}<//>`}</details>`;
}

/** @param {string} text */
const cut = (text) => (text.length > LETTERS ? `${text.slice(0, LETTERS - 1)}…` : text);

/** @param {{from: Box, to: Box}} props */
function Branch({ from, to }) {
  const [x1, y1] = [left(from) + BOX.width, top(from) + BOX.height / 2];
  const [x2, y2] = [left(to), top(to) + BOX.height / 2];
  const middle = (x1 + x2) / 2;
  return html`<path class="edge" d=${`M${x1},${y1} C${middle},${y1} ${middle},${y2} ${x2},${y2}`} />`;
}

/** @param {Box[]} boxes @param {number} at @param {string} key */
function neighbour(boxes, at, key) {
  const here = boxes[at];
  if (key === "ArrowLeft") return here.parent;
  if (key === "ArrowRight") {
    const first = boxes.findIndex((box) => box.parent === at);
    return first < 0 ? null : first;
  }
  const by = { ArrowUp: -1, ArrowDown: 1 }[key];
  if (!by) return null;
  const column = boxes.map((box, i) => ({ i, y: box.y, x: box.x })).filter((box) => box.x === here.x && (box.y - here.y) * by > 0);
  column.sort((a, b) => (a.y - b.y) * by);
  return column.length ? column[0].i : null;
}

/** A step of the ramp for a share from 0 to 1; nothing if it is not known, or not between. @param {number | null} share */
export function ramp(share) {
  if (share === null || share < 0 || share > 1) return "";
  return `ramp-${Math.min(5, Math.floor(share * 5) + 1)}`;
}

/** What the colours of the boxes mean. @param {{says: string}} props */
export function RampLegend({ says }) {
  return html`<ul class="legend" aria-label=${`legend: ${says}`}>
    <li>${says}:</li>${[1, 2, 3, 4, 5].map((i) => html`<li><span class=${`swatch heat-${i}`}></span>${(i - 1) / 5} to ${i / 5}</li>`)}<li><span class="swatch blank"></span>not known, or beyond</li>
  </ul>`;
}
