// Points on a canvas: where they are, and how they are drawn.
import { Palette } from "./palette.js";

/** A window onto the plane: its middle, and how wide it is. @typedef {{x: number, y: number, width: number}} View */
/**
 * @typedef {{
 *   x: Float32Array, y: Float32Array, rows: Int32Array, scored: Int32Array, solved: Int32Array,
 *   frame: string, version: string, behind: number, unplaced: number,
 * }} Cloud prompts: their places, rows in the filter, and how many of those with an outcome succeeded
 */

const RATIO = 0.4; // height of the canvas by its width, or less
const MANY = 3000; // points in view from which on their density is drawn
const DOTS = 20_000; // points in view from which on none has a shape: a frame has no time for so many
const [CELL, DOT] = [6, 2];

/** The view that holds all points. @param {Cloud} cloud @returns {View} */
export function bounds({ x, y }) {
  let [left, right, bottom, top] = [Infinity, -Infinity, Infinity, -Infinity];
  for (let i = 0; i < x.length; i++) {
    [left, right] = [Math.min(left, x[i]), Math.max(right, x[i])];
    [bottom, top] = [Math.min(bottom, y[i]), Math.max(top, y[i])];
  }
  if (!x.length) return { x: 0, y: 0, width: 1 };
  return { x: (left + right) / 2, y: (bottom + top) / 2, width: 1.1 * Math.max(right - left, (top - bottom) / RATIO, 1e-6) };
}

/** @param {View} view @param {number} x @param {number} y */
export const shift = (view, x, y) => ({ ...view, x: view.x + x, y: view.y + y });

/** Nearer or farther; the place `fixed` stays where it is. @param {View} view @param {number} by @param {[number, number]} [fixed] */
export function zoomed(view, by, [x, y] = [view.x, view.y]) {
  return { x: x + (view.x - x) * by, y: y + (view.y - y) * by, width: view.width * by };
}

/** The edges of what is in view. @param {HTMLCanvasElement} canvas @param {View} view */
export function inView(canvas, view) {
  const height = (view.width * canvas.clientHeight) / Math.max(1, canvas.clientWidth);
  return { left: view.x - view.width / 2, right: view.x + view.width / 2, top: view.y + height / 2, bottom: view.y - height / 2 };
}

/**
 * @param {HTMLCanvasElement} canvas
 * @param {Cloud} cloud
 * @param {View} view
 * @param {[number, number][]} lasso
 * @param {string} how auto, points or density
 * @returns {{points: number, density: boolean}} how many points are in view, and how they were drawn
 */
export function paint(canvas, cloud, view, lasso, how) {
  const [width, height] = [canvas.clientWidth, canvas.clientHeight];
  canvas.width = width * devicePixelRatio;
  canvas.height = height * devicePixelRatio;
  const brush = /** @type {CanvasRenderingContext2D} */ (canvas.getContext("2d"));
  brush.scale(devicePixelRatio, devicePixelRatio);
  const { left, top } = inView(canvas, view);
  const scale = width / view.width;
  const u = (/** @type {number} */ x) => (x - left) * scale;
  const v = (/** @type {number} */ y) => (top - y) * scale;
  const seen = [];
  for (let i = 0; i < cloud.x.length; i++) {
    const [a, b] = [u(cloud.x[i]), v(cloud.y[i])];
    if (a >= 0 && a <= width && b >= 0 && b <= height) seen.push(i);
  }
  const density = how === "density" || (how === "auto" && seen.length > MANY);
  const palette = new Palette();
  if (density) drawDensity(brush, palette, cloud, seen, u, v, width);
  else if (seen.length > DOTS) drawDots(brush, palette, cloud, seen, u, v, width);
  else for (const i of seen) mark(brush, palette, cloud, i, u(cloud.x[i]), v(cloud.y[i]));
  if (lasso.length > 1) {
    brush.strokeStyle = palette.colour("lasso");
    brush.lineWidth = 2;
    brush.beginPath();
    for (const [x, y] of lasso) brush.lineTo(u(x), v(y));
    brush.closePath();
    brush.stroke();
  }
  palette.close();
  return { points: seen.length, density };
}

/**
 * The squares of `size` pixels that have points: their left and upper edges, and a value that is made up of one point after the other.
 * @template T
 * @param {Cloud} cloud
 * @param {number[]} seen
 * @param {(x: number) => number} u
 * @param {(y: number) => number} v
 * @param {number} width
 * @param {number} size
 * @param {(before: T | undefined, i: number) => T} value
 * @returns {[number, number, T][]}
 */
function squares(cloud, seen, u, v, width, size, value) {
  const across = Math.ceil(width / size) + 1;
  /** @type {Map<number, T>} */
  const found = new Map();
  for (const i of seen) {
    const square = Math.floor(v(cloud.y[i]) / size) * across + Math.floor(u(cloud.x[i]) / size);
    found.set(square, value(found.get(square), i));
  }
  return Array.from(found, ([square, made]) => [(square % across) * size, Math.floor(square / across) * size, made]);
}

/** Cells, the darker the more rows are in them. @param {CanvasRenderingContext2D} brush @param {Palette} palette @param {Cloud} cloud @param {number[]} seen @param {(x: number) => number} u @param {(y: number) => number} v @param {number} width */
function drawDensity(brush, palette, cloud, seen, u, v, width) {
  const cells = squares(cloud, seen, u, v, width, CELL, (/** @type {number | undefined} */ before, i) => (before ?? 0) + cloud.rows[i]);
  let most = 1;
  for (const [, , rows] of cells) most = Math.max(most, rows);
  for (const [x, y, rows] of cells) {
    const step = rows ? 1 + Math.min(3, Math.floor((4 * Math.log1p(rows - 1)) / Math.max(1e-9, Math.log1p(most)))) : 0;
    brush.fillStyle = palette.colour(step ? `minus-${step}` : "blank");
    brush.fillRect(x, y, CELL, CELL);
  }
}

/** By the share that succeeded. @param {Cloud} cloud @param {number} i */
function kindOf(cloud, i) {
  if (!cloud.rows[i]) return "inked";
  if (!cloud.scored[i]) return "point-unscored";
  const share = cloud.solved[i] / cloud.scored[i];
  return share >= 2 / 3 ? "point-solved" : share > 1 / 3 ? "point-between" : "point-failed";
}

/** Points by colour alone, of those in one place the first. @param {CanvasRenderingContext2D} brush @param {Palette} palette @param {Cloud} cloud @param {number[]} seen @param {(x: number) => number} u @param {(y: number) => number} v @param {number} width */
function drawDots(brush, palette, cloud, seen, u, v, width) {
  for (const [x, y, kind] of squares(cloud, seen, u, v, width, DOT, (/** @type {string | undefined} */ before, i) => before ?? kindOf(cloud, i))) {
    brush.fillStyle = palette.colour(kind);
    brush.fillRect(x, y, DOT, DOT);
  }
}

/** A disc, square or cross by the share that succeeded; a dot if no row is in the filter. @param {CanvasRenderingContext2D} brush @param {Palette} palette @param {Cloud} cloud @param {number} i @param {number} x @param {number} y */
function mark(brush, palette, cloud, i, x, y) {
  const size = Math.min(14, 5 + Math.log2(1 + cloud.rows[i]));
  const kind = kindOf(cloud, i);
  brush.fillStyle = brush.strokeStyle = palette.colour(kind);
  if (kind === "inked") {
    brush.fillRect(x - 1, y - 1, 2, 2);
    return;
  }
  brush.lineWidth = 1.5;
  brush.beginPath();
  if (kind === "point-between") brush.rect(x - size / 2, y - size / 2, size, size);
  else if (kind === "point-failed") {
    brush.moveTo(x - size / 2, y - size / 2);
    brush.lineTo(x + size / 2, y + size / 2);
    brush.moveTo(x - size / 2, y + size / 2);
    brush.lineTo(x + size / 2, y - size / 2);
  } else brush.arc(x, y, size / 2, 0, 7);
  if (kind === "point-failed" || kind === "point-unscored") brush.stroke();
  else brush.fill();
}
