// Text of models and tools, shown as it is: control characters become visible, and colours of terminals become classes.
// Nothing is parsed as HTML.
import { size } from "./format.js";
import { html, useMemo, useState } from "./ui.js";

const HIDDEN =
  "\\u0000-\\u0008\\u000b-\\u001f\\u007f-\\u009f\\u00ad\\u034f\\u061c\\u115f\\u1160\\u17b4\\u17b5\\u180b-\\u180e" +
  "\\u200b\\u200c\\u200e\\u200f\\u2028-\\u202e\\u2060-\\u206f\\u2800\\u3164\\ufe00-\\ufe0e\\ufeff\\uffa0\\ufff9-\\ufffb" +
  "\\u{1bca0}-\\u{1bca3}\\u{1d173}-\\u{1d17a}\\u{e0000}-\\u{e007f}\\u{e0100}-\\u{e01ef}";
const ONE = new RegExp(`[${HIDDEN}]`, "u");
const EVERY = new RegExp(`[${HIDDEN}]`, "gu");
const NAMES = new Map([
  [0x200b, "zero width space"], [0x200c, "zero width non-joiner"], [0x200e, "left-to-right mark"],
  [0x200f, "right-to-left mark"], [0x202a, "left-to-right embedding"], [0x202b, "right-to-left embedding"],
  [0x202c, "pop directional formatting"], [0x202d, "left-to-right override"], [0x202e, "right-to-left override"],
  [0x2066, "left-to-right isolate"], [0x2067, "right-to-left isolate"], [0x2068, "first strong isolate"],
  [0x2069, "pop directional isolate"], [0xfeff, "byte order mark"], [0x1b, "escape"], [0x0d, "carriage return"],
]);

/** A sign for a character that has no shape of its own, or that would turn the text around. @param {string} char */
export function sign(char) {
  const code = /** @type {number} */ (char.codePointAt(0));
  if (code < 0x20) return String.fromCodePoint(0x2400 + code);
  if (code === 0x7f) return "␡";
  return `⟦U+${code.toString(16).toUpperCase().padStart(4, "0")}⟧`;
}

/** The text with a sign for each control, invisible or bidirectional character. @param {string} text */
export function visible(text) {
  return ONE.test(text) ? text.replace(EVERY, sign) : text;
}

/** Plain pieces as strings; signs as elements that say what they stand for. @param {string} text @returns {import("./vendor/preact.js").Child[]} */
export function pieces(text) {
  if (!ONE.test(text)) return [text];
  const parts = [];
  let end = 0;
  for (const match of text.matchAll(EVERY)) {
    if (match.index > end) parts.push(text.slice(end, match.index));
    const code = /** @type {number} */ (match[0].codePointAt(0));
    const name = NAMES.get(code) ?? "control or invisible character";
    parts.push(html`<span class="sign" title=${`U+${code.toString(16).toUpperCase().padStart(4, "0")} ${name}`}>${sign(match[0])}</span>`);
    end = match.index + match[0].length;
  }
  parts.push(text.slice(end));
  return parts;
}

const SGR = /\u001b\[([0-9;]*)m/g;
const COLOURS = ["black", "red", "green", "yellow", "blue", "magenta", "cyan", "white"];

/** Pieces of a text with colours of terminals; every other escape stays visible. @param {string} text @returns {import("./vendor/preact.js").Child[]} */
export function terminal(text) {
  if (!text.includes("\u001b[")) return pieces(text);
  /** @type {import("./vendor/preact.js").Child[]} */
  const parts = [];
  const style = new Set();
  let end = 0;
  const add = (/** @type {string} */ part) => {
    if (part) parts.push(style.size ? html`<span class=${[...style].join(" ")}>${pieces(part)}</span>` : pieces(part));
  };
  for (const match of text.matchAll(SGR)) {
    add(text.slice(end, match.index));
    for (const code of match[1].split(";").map(Number)) restyle(style, code);
    end = match.index + match[0].length;
  }
  add(text.slice(end));
  return parts;
}

/** @param {Set<string>} style @param {number} code of SGR: 0 resets, 1 and 4 are bold and underlined, 30 to 37 colours */
function restyle(style, code) {
  const colour = (code >= 30 && code <= 37) || (code >= 90 && code <= 97) ? COLOURS[code % 10] : null;
  if (code === 0) style.clear();
  if (code === 1) style.add("ansi-bold");
  if (code === 22) style.delete("ansi-bold");
  if (code === 4) style.add("ansi-underline");
  if (code === 24) style.delete("ansi-underline");
  if (colour || code === 39) for (const name of COLOURS) style.delete(`ansi-${name}`);
  if (colour) style.add(`ansi-${colour}`);
}

const CHUNK = 16_384;
const SHOWN = 1_000_000;

/** Text in chunks that the browser lays out when they come into view, at most a megabyte before the reader asks for more. @param {{text: string}} props */
export function Text({ text }) {
  const [limit, setLimit] = useState(SHOWN);
  const parts = useMemo(() => chunks(text.slice(0, limit)), [text, limit]);
  const more = text.length - limit;
  return html`
    ${parts.map((part) => html`<div class=${parts.length > 1 ? "chunk" : ""}>${terminal(part)}</div>`)}
    ${more > 0 && html`<button onClick=${() => setLimit(limit + SHOWN)}>show more (${size(more, "")} characters are left)</button>`}
  `;
}

/** Cut at the last line break before each chunk's end; a longer line is cut anywhere. @param {string} text */
function chunks(text) {
  const parts = [];
  let start = 0;
  while (text.length - start > CHUNK) {
    const line = text.lastIndexOf("\n", start + CHUNK) + 1;
    const end = line > start ? line : start + CHUNK;
    parts.push(text.slice(start, end));
    start = end;
  }
  parts.push(text.slice(start));
  return parts;
}
