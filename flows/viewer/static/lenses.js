// Lenses: what colours a token. Every scale is fixed, so that two rows compare; values beyond it are dotted underneath.
import { decimal } from "./format.js";

/** @typedef {import("./tokens.js").Tokens} Tokens */
/**
 * @typedef {{
 *   id: string, name: string, needs: string[],
 *   mark: (tokens: Tokens, i: number) => string,
 *   legend: (tokens: Tokens) => {mark: string, says: string}[],
 *   says: (tokens: Tokens, i: number) => string,
 * }} Lens `mark` is the class of a token, or nothing; `needs` names columns
 */

/** Upper ends of the steps of surprise, in nats; the last step goes up to 7. */
const SURPRISE = [0.1, 0.5, 1, 2, 4, 7];
/** Steps to either side of zero. */
const SIGNED = [0.05, 0.25, 0.5, 1, 2];
const ENTROPY = [0.1, 0.5, 1, 2, 3, 5];

/** @param {number[]} ends @param {number} value @returns {[number, boolean]} the step, from 0, and whether it is clipped */
function step(ends, value) {
  const index = ends.findIndex((end) => value < end);
  return index < 0 ? [ends.length - 1, value > ends[ends.length - 1]] : [index, false];
}

/** @param {number[]} ends @param {number} value */
function heat(ends, value) {
  if (Number.isNaN(value)) return "";
  const [index, clipped] = step(ends, value);
  return index ? `heat-${index}${clipped ? " clipped" : ""}` : "";
}

/** Zero is transparent. @param {number} value */
function signed(value) {
  if (Number.isNaN(value) || Math.abs(value) < SIGNED[0]) return "";
  const [index, clipped] = step(SIGNED, Math.abs(value));
  return `${value < 0 ? "minus" : "plus"}-${index}${clipped ? " clipped" : ""}`;
}

/** @param {number} value */
const kind = (value) => (Number.isNaN(value) ? "" : `kind-${((value % 6) + 6) % 6}`);

/** @param {number[]} ends @param {string} minus before each number */
const heats = (ends, minus) =>
  ends.map((end, i) => ({ mark: i ? `heat-${i}` : "", says: i ? `${minus}${ends[i - 1]} to ${minus}${end}` : `0 to ${minus}${end}` }));

const BOTH_SIDES = [
  ...SIGNED.map((_, i) => SIGNED.length - 1 - i).filter(Boolean).map((i) => ({ mark: `minus-${i}`, says: `−${SIGNED[i - 1]} to −${SIGNED[i]}` })),
  { mark: "", says: `within ${SIGNED[0]} of 0` },
  ...SIGNED.map((_, i) => i).filter(Boolean).map((i) => ({ mark: `plus-${i}`, says: `${SIGNED[i - 1]} to ${SIGNED[i]}` })),
];

/** The values of a column that occur, at most twelve. @param {Tokens} tokens @param {string} column @param {string} word */
function kinds(tokens, column, word) {
  const kinds = [...new Set(Array.from(tokens.columns[column] ?? []).filter((value) => !Number.isNaN(value)))].sort((a, b) => a - b);
  const more = kinds.length > 12 ? [{ mark: "", says: `and ${kinds.length - 12} more` }] : [];
  return [...kinds.slice(0, 12).map((value) => ({ mark: kind(value), says: `${word} ${value}` })), ...more];
}

/** @param {string} name @param {(tokens: Tokens, i: number) => number} value */
const saying = (name, value) => (/** @type {Tokens} */ tokens, /** @type {number} */ i) => `${name} ${decimal(value(tokens, i), 3)}`;

const of = (/** @type {string} */ column) => (/** @type {Tokens} */ tokens, /** @type {number} */ i) => tokens.value(column, i);
const gap = (/** @type {Tokens} */ tokens, /** @type {number} */ i) => tokens.value("logprob", i) - tokens.value("ref_logprob", i);
const ratio = (/** @type {Tokens} */ tokens, /** @type {number} */ i) => tokens.value("train_logprob", i) - tokens.value("logprob", i);

/** @type {Lens[]} */
export const LENSES = [
  {
    id: "mask", name: "mask", needs: ["mask"],
    mark: (tokens, i) => (tokens.covered(i) ? "trained" : ""),
    legend: (tokens) => [{ mark: "trained", says: tokens.trained ? "trained on" : "sampled by the policy" }, { mark: "plain", says: tokens.trained ? "not trained on" : "not sampled" }, { mark: "breach", says: "breaks the mask's proof" }],
    says: (tokens, i) => (tokens.covered(i) ? "" : "not ") + (tokens.trained ? "trained" : "sampled"),
  },
  {
    id: "logprob", name: "log-prob", needs: ["logprob"],
    mark: (tokens, i) => heat(SURPRISE, -tokens.value("logprob", i)),
    legend: () => heats(SURPRISE, "−"),
    says: saying("log-prob", of("logprob")),
  },
  {
    id: "version", name: "version", needs: ["version"],
    mark: (tokens, i) => kind(tokens.value("version", i)),
    legend: (tokens) => kinds(tokens, "version", "version"),
    says: saying("version", of("version")),
  },
  {
    id: "weight", name: "advantage", needs: ["weight"],
    mark: (tokens, i) => signed(tokens.value("weight", i)),
    legend: () => BOTH_SIDES,
    says: saying("weight", of("weight")),
  },
  {
    id: "gap", name: "reference gap", needs: ["logprob", "ref_logprob"],
    mark: (tokens, i) => signed(gap(tokens, i)),
    legend: () => BOTH_SIDES,
    says: saying("reference gap", gap),
  },
  {
    id: "ratio", name: "log-ratio", needs: ["logprob", "train_logprob"],
    mark: (tokens, i) => signed(ratio(tokens, i)),
    legend: () => BOTH_SIDES,
    says: saying("log-ratio", ratio),
  },
  {
    id: "entropy", name: "entropy", needs: ["entropy"],
    mark: (tokens, i) => heat(ENTROPY, tokens.value("entropy", i)),
    legend: () => heats(ENTROPY, ""),
    says: saying("entropy", of("entropy")),
  },
  {
    id: "step", name: "trained in step", needs: ["step"],
    mark: (tokens, i) => kind(tokens.value("step", i)),
    legend: (tokens) => kinds(tokens, "step", "step"),
    says: saying("trained in step", of("step")),
  },
];

/** Why a lens cannot be used on a row; null if it can. @param {Lens} lens @param {Tokens} tokens */
export function lacking(lens, tokens) {
  if (tokens.length === 0) return tokens.reason || "the row has no tokens: it was imported, or a scripted expert wrote it";
  for (const name of lens.needs) {
    if (name === "mask") continue;
    const values = tokens.columns[name];
    if (!values) return tokens.absent[name] ?? `nothing wrote ${name}`;
    if (values.every((value) => Number.isNaN(value))) return tokens.absent[name] ?? `the row has no ${name}`;
  }
  return null;
}

/** The classes of a token under a lens. @param {Lens} lens @param {Tokens} tokens @param {number} i */
export function classes(lens, tokens, i) {
  const mark = lens.mark(tokens, i);
  const ink = tokens.covered(i) ? "" : " faint";
  const part = tokens.joined[i] ? " joined" : "";
  return `t ${mark}${ink}${part}${tokens.breaches.has(i) ? " breach" : ""}`;
}

/** A token in words. @param {Tokens} tokens @param {number} i @param {string} word the token as it is drawn */
export function spoken(tokens, i, word) {
  const rest = LENSES.filter((lens) => lens.id !== "mask" && !lacking(lens, tokens) && !lens.says(tokens, i).endsWith("–")).map((lens) => lens.says(tokens, i));
  const broken = tokens.breaches.get(i);
  return [word.trim() || "white space", LENSES[0].says(tokens, i), ...rest, ...(broken ? [`breaks the mask's proof: ${broken}`] : [])].join(", ");
}
