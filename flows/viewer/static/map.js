// The prompts of the rows as points of a plane. A lasso around some of them is a filter of the buffer.
import { Refused, arrow, json, useAnswer } from "./api.js";
import { count, percent, plural } from "./format.js";
import { useKeys } from "./keys.js";
import { address, change, go, place, version } from "./location.js";
import { bounds, inView, paint, shift, zoomed } from "./plane.js";
import { Empty, Problem } from "./problem.js";
import { pieces } from "./text.js";
import { theme } from "./theme.js";
import { html, useEffect, useMemo, useRef, useState } from "./ui.js";

/** @typedef {import("./plane.js").View} View */
/** @typedef {import("./plane.js").Cloud} Cloud */

const CORNERS = 100;
const REST_MS = 150; // a wheel turns a hundred times a second, and browsers refuse to write so many addresses

/** @param {{filter?: string, among?: string, rule?: string, lasso?: string, at?: string}} asked @param {AbortSignal} stop @returns {Promise<Cloud>} */
async function fetchCloud(asked, stop) {
  const { table } = await arrow("/api/map", asked, stop);
  const meta = table.schema.metadata ?? new Map();
  const column = (/** @type {string} */ name) => table.getChild(name)?.toArray() ?? [];
  const number = (/** @type {string} */ name) => Number(meta.get(name) ?? 0);
  return {
    x: column("x"), y: column("y"), rows: column("rows"), scored: column("scored"), solved: column("solved"),
    frame: meta.get("frame") ?? "", version: meta.get("version") ?? "", behind: number("behind"), unplaced: number("unplaced"),
  };
}

export function MapPage() {
  const { filter, among, rule, lasso, at, draw = "auto" } = place.value.params;
  const frame = lasso?.split(":")[0];
  const cloud = useAnswer((stop) => fetchCloud({ filter, among, rule, lasso, at }, stop), [filter, among, rule, frame, at]);
  const prompts = useAnswer((stop) => /** @type {Promise<import("./wire.js").MapPrompts>} */ (json("/api/map/prompts", { filter, among, rule, lasso, at }, stop)), [filter, among, rule, lasso, at]);
  const { value } = cloud;
  useEffect(() => void (value && (version.value = value.version)), [value]);
  const problem = cloud.problem ?? prompts.problem;
  const buffer = address("/buffer", { filter, among, rule, lasso, at });
  if (problem instanceof Refused && problem.status === 409 && !lasso) return html`<h1>Map</h1><${Empty} says="The map shows the prompts of the search index, and this store has none." command=${problem.refusal.next ?? "agentrl buffer index"} />`;
  if (problem) return html`<h1>Map</h1><${Problem} problem=${problem} />${lasso && html`<button onClick=${() => change({ lasso: null })}>without the lasso</button>`}`;
  if (!value) return html`<h1>Map</h1><p class="soft waiting">reading the search index …</p>`;
  return html`<h1>Map</h1>
    <p class="soft">Prompts in the plane of their greatest variance (PCA of the search index): near ones are worded alike. Drag around some to choose them.
      ${value.behind > 0 && html` The index lacks ${plural(value.behind, "newer commit")}: <code>agentrl buffer index</code>.`}${value.unplaced > 0 && html` ${plural(value.unplaced, "row")} ${value.unplaced === 1 ? "has" : "have"} no place.`}</p>
    <p>${filter || among ? html`Of the rows ${filter && html`where <code>${pieces(filter)}</code>`} ${among && html`among ${pieces(rule ? `“${rule}” of ${among}` : among)}`}. <button class="quiet" onClick=${() => change({ filter: null, among: null, rule: null })}>of all rows</button>` : "Of all rows."}${" "}
      ${prompts.value && html`<b role="status">${prompts.busy ? "counting …" : `${plural(prompts.value.rows, "row")}${lasso ? " in the lasso" : ""}`}</b>`} <a href=${buffer}>show them in the buffer</a></p>
    <${Plane} key=${value.frame} cloud=${value} lasso=${lasso} draw=${draw} buffer=${buffer} />
    ${prompts.value && html`<${Prompts} found=${prompts.value} open=${Boolean(lasso)} at=${at} />`}`;
}

/** @param {string | undefined} text FRAME:x,y;x,y;... @returns {[number, number][]} */
const corners = (text) => (text?.split(":")[1]?.split(";").map((one) => /** @type {[number, number]} */ (one.split(",").map(Number))) ?? []);

/** @param {string} frame @param {[number, number][]} points */
function lassoOf(frame, points) {
  const every = Math.ceil(points.length / CORNERS);
  const short = (/** @type {number} */ value) => String(Number(value.toPrecision(5)));
  return `${frame}:${points.filter((_, i) => i % every === 0).map(([x, y]) => `${short(x)},${short(y)}`).join(";")}`;
}

/** @param {{cloud: Cloud, lasso: string | undefined, draw: string, buffer: string}} props */
function Plane({ cloud, lasso, draw, buffer }) {
  const canvas = useRef(/** @type {HTMLCanvasElement | null} */ (null));
  const whole = useMemo(() => bounds(cloud), [cloud]);
  const [view, look] = useView(whole);
  const [drawn, setDrawn] = useState(/** @type {[number, number][]} */ ([]));
  const [shown, setShown] = useState({ points: 0, density: false });
  const box = () => /** @type {HTMLCanvasElement} */ (canvas.current);
  useEffect(() => {
    const redraw = () => canvas.current && setShown(paint(canvas.current, cloud, view(), drawn.length ? drawn : corners(lasso), draw));
    const frame = requestAnimationFrame(redraw);
    addEventListener("resize", redraw);
    return () => {
      cancelAnimationFrame(frame);
      removeEventListener("resize", redraw);
    };
  }, [cloud, view(), drawn, lasso, draw, theme.value]);
  const choose = (/** @type {[number, number][]} */ points) => change({ lasso: points.length < 3 ? null : lassoOf(cloud.frame, points) });
  const all = () => {
    const { left, right, top, bottom } = inView(box(), view());
    choose([[left, top], [right, top], [right, bottom], [left, bottom]]);
  };
  const pan = (/** @type {number} */ x, /** @type {number} */ y) => look(shift(view(), x * view().width, y * view().width));
  useKeys({
    "+": { does: "nearer", run: () => look(zoomed(view(), 0.5)) },
    "-": { does: "farther", run: () => look(zoomed(view(), 2)) },
    0: { does: "the whole map", run: () => look(whole) },
    ArrowLeft: { does: "to the left", run: () => pan(-0.25, 0) },
    ArrowRight: { does: "to the right", run: () => pan(0.25, 0) },
    ArrowUp: { does: "up", run: () => pan(0, 0.15) },
    ArrowDown: { does: "down", run: () => pan(0, -0.15) },
    v: { does: "a lasso around what is in view", run: all },
    c: { does: "without the lasso", run: () => choose([]) },
    Enter: { does: "the rows in the buffer", run: () => go(buffer) },
  });
  const at = (/** @type {PointerEvent | WheelEvent} */ event) => {
    const { left, right, top, bottom } = inView(box(), view());
    const area = box().getBoundingClientRect();
    const [u, v] = [(event.clientX - area.left) / area.width, (event.clientY - area.top) / area.height];
    return /** @type {[number, number]} */ ([left + u * (right - left), top + v * (bottom - top)]);
  };
  const down = (/** @type {PointerEvent} */ event) => {
    if (event.button !== 0) return;
    box().setPointerCapture(event.pointerId);
    setDrawn([at(event)]);
  };
  const move = (/** @type {PointerEvent} */ event) => drawn.length && setDrawn([...drawn, at(event)]);
  const up = () => {
    if (drawn.length >= 3) choose(drawn);
    setDrawn([]);
  };
  const wheel = (/** @type {WheelEvent} */ event) => {
    event.preventDefault();
    look(zoomed(view(), event.deltaY > 0 ? 1.25 : 0.8, at(event)), REST_MS);
  };
  return html`<div class="map-tools">
      <button onClick=${() => look(zoomed(view(), 0.5))} aria-label="nearer">+</button><button onClick=${() => look(zoomed(view(), 2))} aria-label="farther">−</button><button onClick=${() => look(whole)}>the whole map</button>
      <button onClick=${all}>lasso what is in view (v)</button><button disabled=${!lasso} onClick=${() => choose([])}>without the lasso</button>
      <label>draw <select onChange=${(/** @type {Event} */ event) => change({ draw: /** @type {HTMLSelectElement} */ (event.target).value.replace("auto", "") })}>
        ${[["auto", "points, or their density if there are many"], ["points", "points"], ["density", "density"]].map(([value, says]) => html`<option value=${value} selected=${value === draw}>${says}</option>`)}</select></label>
      <${Legend} density=${shown.density} />
    </div>
    <canvas class="plane" ref=${canvas} tabindex="0" role="img" aria-label=${`map of ${plural(cloud.x.length, "prompt")}, ${shown.points} in view${shown.density ? ", drawn as density" : ""}${lasso ? ", with a lasso" : ""}; the table below says the same`}
      onPointerDown=${down} onPointerMove=${move} onPointerUp=${up} onPointerCancel=${up} onWheel=${wheel}></canvas>`;
}

/**
 * What is in view, as it is now, and what changes that: at once on the canvas, and in the address after `rest`
 * milliseconds without another change.
 * @param {View} whole
 * @returns {[() => View, (next: View, rest?: number) => void]}
 */
function useView(whole) {
  const { view: written } = place.value.params;
  const [, again] = useState(0);
  const kept = useRef({ view: whole, written: /** @type {string | undefined} */ ("none yet"), whole, timer: 0 });
  const { current } = kept;
  if (current.written !== written || current.whole !== whole) {
    clearTimeout(current.timer);
    Object.assign(current, { view: read(written) ?? whole, written, whole });
  }
  useEffect(() => () => clearTimeout(current.timer), []);
  return [
    () => current.view,
    (next, rest = 0) => {
      current.view = next;
      again((number) => number + 1);
      clearTimeout(current.timer);
      const write = () => {
        current.written = next === whole ? undefined : [next.x, next.y, next.width].map((one) => Number(one.toPrecision(5))).join(",");
        change({ view: current.written });
      };
      if (rest) current.timer = setTimeout(write, rest);
      else write();
    },
  ];
}

/** @param {string | undefined} text x,y,width @returns {View | null} */
function read(text) {
  const [x, y, width] = (text ?? "").split(",").map(Number);
  return Number.isFinite(x) && Number.isFinite(y) && width > 0 ? { x, y, width } : null;
}

/** @param {{density: boolean}} props */
function Legend({ density }) {
  if (density) return html`<ul class="legend" aria-label="legend"><li>rows in a cell, fewer to more: ${[1, 2, 3, 4].map((i) => html`<span class=${`swatch minus-${i}`}></span>`)}</li></ul>`;
  return html`<ul class="legend" aria-label="legend"><li class="good">● two thirds succeeded, or more</li><li class="waits">■ between</li><li class="bad">✗ a third, or less</li><li class="soft">○ unscored</li><li class="soft">· not in the filter</li></ul>`;
}

/** @param {{found: import("./wire.js").MapPrompts, open: boolean, at: string | undefined}} props */
function Prompts({ found, open, at }) {
  const quoted = (/** @type {string} */ text) => `'${text.replaceAll("'", "''")}'`;
  return html`<details open=${open}><summary>prompts with the most rows, as a table</summary>
    <table class="lines"><thead><tr><th>prompt</th><th class="number">rows</th><th class="number">succeeded</th><th class="number">95 % interval</th></tr></thead><tbody>
      ${found.prompts.map((one) => html`<tr><td><a href=${address("/buffer", { filter: `starts_with(prompt, ${quoted(one.prompt)})`, at })}>${pieces(one.prompt)}</a></td><td class="number">${count(one.rows)}</td>
        <td class="number">${one.n ? `${count(one.solved)} of ${count(one.n)}` : "–"}</td><td class="number">${one.low === null || one.high === null ? "–" : `${percent(one.low)} to ${percent(one.high)}`}</td></tr>`)}
    </tbody></table>${found.total > found.prompts.length && html`<p class="soft">and ${count(found.total - found.prompts.length)} more</p>`}</details>`;
}
