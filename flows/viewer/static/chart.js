// A metric by step, drawn by uPlot, with the doctor's bounds as bands. Only charts in view are drawn.
import { decimal } from "./format.js";
import { effect, html, signal, useEffect, useRef } from "./ui.js";
import uPlot from "./vendor/uplot.js";

/** @typedef {import("./curves.js").Curves} Curves */
/** @typedef {import("./wire.js").SickBand} Band */

const SIZE = { width: 320, height: 128 };
const LETTER = 7; // pixels, no less than a digit or a minus sign of 11 px is wide
const BUDGET_MS = 8;
const WHOLE = [1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 1e4, 2e4, 5e4, 1e5, 2e5, 5e5, 1e6];
const DRAGGED = 4; // pixels from which on a press is a drag, which zooms

/** How much each value counts of those before it, as in TensorBoard: 0 smoothes nothing. */
export const smoothing = signal(0);

/** A moving average without the bias of its beginning; unknown values stay unknown. @param {ArrayLike<number | null>} values @param {number} weight */
export function smoothed(values, weight) {
  let [sum, norm] = [0, 0];
  return Array.from(values, (value) => {
    if (value === null) return null;
    sum = weight * sum + (1 - weight) * value;
    norm = weight * norm + 1 - weight;
    return sum / norm;
  });
}

export function Smoothing() {
  return html`<label class="smoothing">smoothing <input type="range" min="0" max="0.95" step="0.05" value=${smoothing.value} aria-valuetext=${String(smoothing.value)}
    onInput=${(/** @type {Event} */ event) => (smoothing.value = Number(/** @type {HTMLInputElement} */ (event.target).value))} /></label>`;
}

/** What charts have to do, a few milliseconds of it in each frame, so that the page answers meanwhile. */
const jobs = /** @type {Set<() => void>} */ (new Set());
let frame = 0;

function work() {
  frame = 0;
  const end = performance.now() + BUDGET_MS;
  for (const job of jobs) {
    jobs.delete(job);
    job();
    if (performance.now() > end) break;
  }
  if (jobs.size) frame = requestAnimationFrame(work);
}

/** @param {() => void} job */
function soon(job) {
  jobs.add(job);
  frame ||= requestAnimationFrame(work);
}

/** @param {number | null | undefined} value with three digits that count */
export function number(value) {
  if (value === null || value === undefined) return "–";
  const small = value !== 0 && (Math.abs(value) < 1e-3 || Math.abs(value) >= 1e6);
  return small ? value.toExponential(2).replace(/-/g, "−") : decimal(Number(value.toPrecision(4)), 4).replace(/(\.\d*?)0+$/, "$1").replace(/\.$/, "");
}

/** The colours that the style sheet gives, as a canvas needs them. @param {HTMLElement} beside */
function colours(beside) {
  const probe = beside.appendChild(document.createElement("span"));
  const colours = Object.fromEntries(["accent", "bad", "soft", "hair", "ink", "line-0", "line-1", "line-2", "line-3"].map((name) => {
    probe.style.color = `var(--${name})`;
    return [name, getComputedStyle(probe).color];
  }));
  probe.remove();
  return colours;
}

/** Where the y axis begins and ends: around the values, and the bounds that are not far away. @param {Band[]} bands @param {number | null} low @param {number | null} high */
export function range(bands, low, high) {
  if (low === null || high === null) return [0, 1];
  const reach = high - low || Math.abs(high) || 1;
  const near = bands.map((band) => band.bound).filter((bound) => bound > low - reach && bound < high + reach);
  return [Math.min(low, ...near) - reach * 0.06, Math.max(high, ...near) + reach * 0.06];
}

/** Pixels for the labels of the y axis, so that none is cut. @param {unknown} _ @param {string[] | null} labels */
export const room = (_, labels) => Math.max(52, ...(labels ?? []).map((label) => 16 + LETTER * label.length));

class Drawing {
  /** @param {HTMLElement} box @param {HTMLElement} caption @param {string} name @param {Curves} curves @param {Band[]} bands @param {(step: number) => void} choose @param {Curves[]} [others] of other stages, on the same axes */
  constructor(box, caption, name, curves, bands, choose, others = []) {
    this.box = box;
    this.caption = caption;
    this.name = name;
    this.curves = curves;
    this.bands = bands;
    this.choose = choose;
    this.others = others;
    this.visible = false;
    this.dirty = true;
    this.shown = 0; // steps that are drawn
    this.step = /** @type {number | null} */ (null);
    this.plot = /** @type {uPlot | null} */ (null);
    this.colours = /** @type {Record<string, string>} */ ({});
    this.update = () => this.draw();
    this.watch = new IntersectionObserver(([entry]) => {
      this.visible = entry.isIntersecting;
      if (this.visible && this.dirty) soon(this.update);
    }, { rootMargin: "200px" });
    this.watch.observe(box);
    this.stop = effect(() => {
      curves.changed.value;
      smoothing.value;
      this.renew();
    });
  }

  renew() {
    this.dirty = true;
    if (this.visible) soon(this.update);
  }

  /** @param {number | null} step */
  mark(step) {
    this.step = step;
    if (this.plot) soon(() => this.plot?.redraw(false));
    this.tell(null);
  }

  recolour() {
    this.plot?.destroy();
    this.plot = null;
    this.renew();
  }

  draw() {
    if (!this.visible) return;
    this.dirty = false;
    const weight = smoothing.peek();
    const raw = this.values();
    const own = /** @type {ArrayLike<number | null>[]} */ ([this.curves.steps, weight ? smoothed(raw, weight) : raw, weight ? raw : []]);
    own[2] = weight ? raw : raw.map(() => null); // the raw curve is drawn faintly under the smoothed one
    const tables = this.others.map(({ steps, columns }) => [steps, smoothed(columns.get(this.name) ?? steps.map(() => null), weight)]);
    const data = tables.length ? uPlot.join([own, ...tables]) : own;
    if (this.plot) this.plot.setData(data, !this.zoomed());
    else this.make(data);
    this.shown = this.curves.steps.length;
    this.tell(null);
  }

  /** Whether the reader dragged over a part of the steps. */
  zoomed() {
    const { min, max } = this.plot?.scales.x ?? { min: null, max: null };
    const { steps } = this.curves;
    return min !== null && max !== null && this.shown > 1 && (min > steps[0] || max < steps[this.shown - 1]);
  }

  values() {
    return this.curves.columns.get(this.name) ?? [];
  }

  /** @param {ArrayLike<number | null>[]} data */
  make(data) {
    this.colours = colours(this.box);
    const { accent, soft, hair } = this.colours;
    const line = (/** @type {string} */ stroke) => ({ stroke, width: 1.5, spanGaps: false, points: { show: data[0].length < 40, size: 4 } });
    const axis = { stroke: soft, font: "11px system-ui", grid: { stroke: hair, width: 1 }, ticks: { show: false } };
    this.plot = new uPlot({
      ...SIZE,
      legend: { show: false },
      cursor: { y: false, drag: { x: true, y: false, dist: DRAGGED }, sync: { key: "steps" } },
      scales: { x: { time: false }, y: { range: (/** @type {unknown} */ _, /** @type {number | null} */ low, /** @type {number | null} */ high) => range(this.bands, low, high) } },
      axes: [{ ...axis, size: 22, incrs: WHOLE, space: 40 }, { ...axis, size: room, values: (/** @type {unknown} */ _, /** @type {number[]} */ ends) => ends.map(number) }],
      series: [{}, line(accent), { ...line(accent), alpha: 0.25, points: { show: false } }, ...this.others.map((_, i) => ({ ...line(this.colours[`line-${i % 4}`]), spanGaps: true }))],
      hooks: {
        drawClear: [(/** @type {uPlot} */ plot) => this.shade(plot)],
        draw: [(/** @type {uPlot} */ plot) => this.line(plot)],
        setCursor: [(/** @type {uPlot} */ plot) => this.tell(plot.cursor.idx)],
      },
    }, data, this.box);
    let from = 0;
    this.plot.over.addEventListener("mousedown", (event) => (from = event.clientX));
    this.plot.over.addEventListener("click", (event) => {
      if (Math.abs(event.clientX - from) >= DRAGGED) return;
      const index = this.plot?.cursor.idx;
      if (index !== null && index !== undefined) this.choose(this.curves.steps[index]);
    });
  }

  /** The bands, under the curve. @param {uPlot} plot */
  shade(plot) {
    const { ctx, bbox } = plot;
    for (const { bound, above } of this.bands) {
      const y = Math.max(bbox.top, Math.min(bbox.top + bbox.height, plot.valToPos(bound, "y", true)));
      const [top, bottom] = above ? [bbox.top, y] : [y, bbox.top + bbox.height];
      ctx.save();
      ctx.fillStyle = this.colours.bad;
      ctx.globalAlpha = 0.14;
      ctx.fillRect(bbox.left, top, bbox.width, bottom - top);
      ctx.globalAlpha = 1;
      if (bottom > top) ctx.fillRect(bbox.left, y - 0.5, bbox.width, 1);
      ctx.restore();
    }
  }

  /** The chosen step. @param {uPlot} plot */
  line(plot) {
    if (this.step === null) return;
    const x = plot.valToPos(this.step, "x", true);
    plot.ctx.save();
    plot.ctx.fillStyle = this.colours.ink;
    plot.ctx.fillRect(x - 0.5, plot.bbox.top, 1, plot.bbox.height);
    plot.ctx.restore();
  }

  /** The value under the pointer, at the chosen step, or the last one. @param {number | null} index */
  tell(index) {
    const { steps } = this.curves;
    const at = index ?? (this.step === null ? -1 : this.curves.place(this.step));
    const shown = at >= 0 ? at : steps.length - 1;
    this.caption.textContent = shown < 0 ? "" : `${number(this.values()[shown])} at ${steps[shown]}`;
  }

  close() {
    this.stop();
    this.watch.disconnect();
    jobs.delete(this.update);
    this.plot?.destroy();
  }
}

/** @param {{name: string, curves: Curves, bands: Band[], step: number | null, choose: (step: number) => void, theme: string, others?: Curves[]}} props */
export function Chart({ name, curves, bands, step, choose, theme, others }) {
  const box = useRef(/** @type {HTMLElement | null} */ (null));
  const caption = useRef(/** @type {HTMLElement | null} */ (null));
  const drawing = useRef(/** @type {Drawing | null} */ (null));
  const latest = useRef(choose);
  latest.current = choose;
  useEffect(() => {
    const made = new Drawing(/** @type {HTMLElement} */ (box.current), /** @type {HTMLElement} */ (caption.current), name, curves, bands, (at) => latest.current(at), others);
    drawing.current = made;
    return () => made.close();
  }, [curves, name, JSON.stringify(bands), others]);
  useEffect(() => drawing.current?.mark(step), [step, curves]);
  useEffect(() => drawing.current?.recolour(), [theme]);
  return html`<figure class="chart">
    <figcaption><b>${name}</b> <span ref=${caption}></span>${bands.map((band) => html` <span class="bad" title=${`${band.counts} is compared with it`}>sick ${band.above ? "above" : "below"} ${number(band.bound)}</span>`)}</figcaption>
    <div class="plot" ref=${box} aria-hidden="true"></div>
  </figure>`;
}
