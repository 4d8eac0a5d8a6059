// Numbers, times and names as the pages print them.

const DIGITS = new Intl.NumberFormat("en-US");

/** @param {number} value */
export const count = (value) => DIGITS.format(value);

/** At most `digits` behind the point, and a real minus sign. @param {number | null | undefined} value */
export function decimal(value, digits = 3) {
  if (value === null || value === undefined || Number.isNaN(value)) return "–";
  const text = Number.isInteger(value) ? String(value) : value.toFixed(digits);
  return text.replace("-", "−");
}

/** @param {number} value a share from 0 to 1 */
export const percent = (value) => `${(100 * value).toFixed(1)} %`;

/** A p value; never that it is 0. @param {number} p */
export const chance = (p) => (p < 1e-4 ? "p < 0.0001" : `p = ${Number(p.toPrecision(2))}`);

/** How rollouts of an evaluation were drawn. @param {{greedy: boolean, control: number | null}} result */
export const decoding = (result) => (result.control !== null ? `control, at its best temperature ${result.control}` : result.greedy ? "greedy" : "sampled");

/** @param {number | null | undefined} value */
export function seconds(value) {
  if (value === null || value === undefined) return "";
  if (value > 0 && value < 0.095) return value < 0.001 ? "under 1 ms" : `${Math.round(1000 * value)} ms`;
  if (value < 60) return `${value.toFixed(value < 10 ? 1 : 0)} s`;
  const minutes = Math.round(value / 60);
  return minutes < 60 ? `${minutes} min` : `${Math.floor(minutes / 60)} h ${minutes % 60} min`;
}

/** @param {string | number} when ISO 8601, or milliseconds since 1970; printed in UTC */
export function time(when) {
  const date = new Date(when);
  return Number.isNaN(date.getTime()) ? String(when) : date.toISOString().slice(0, 19).replace("T", " ");
}

/** @param {number} size in bytes or characters */
export function size(size, unit = "B") {
  if (size < 1000) return `${size} ${unit}`;
  return size < 1e6 ? `${(size / 1e3).toFixed(1)} k${unit}` : `${(size / 1e6).toFixed(1)} M${unit}`;
}

/** @param {string} fingerprint */
export const short = (fingerprint) => fingerprint.slice(0, 8);

/** @param {number} number @param {string} noun */
export const plural = (number, noun) => `${count(number)} ${noun}${number === 1 ? "" : "s"}`;

/** @param {string} text in quotes of a shell */
export const quoted = (text) => `'${text.replaceAll("'", "'\\''")}'`;

/** @param {string} text as a word of a shell */
export const word = (text) => (/^[\w@%+=:,./-]+$/.test(text) ? text : quoted(text));
