// Messages laid out to be read: a small part of Markdown as elements, and JSON with line breaks. Nothing of it becomes
// HTML or an address that a browser opens, and what is not understood stays as it is written.
import { Text, terminal } from "./text.js";
import { Wide, html, useMemo } from "./ui.js";

/** @typedef {import("./vendor/preact.js").Child} Child */

const LONGEST = 100_000; // characters; a longer text is shown as it is written
const FENCE = /^\s{0,3}(```+|~~~+)\s*([\w+#.-]*)\s*$/;
const ITEM = /^(\s*)([-*+]|\d{1,4}[.)])\s+(.*)$/;
const INLINE = /(`+)([^`\n]{1,500}?)\1(?!`)|\*\*([^*\n]{1,500})\*\*|(?<![\w*])\*([^*\s][^*\n]{0,500})\*(?![\w*])|\[([^\]\n]{1,300})\]\(([^)\s]{1,1000})\)/g;

/** @param {string} text of one line or paragraph @returns {Child[]} */
function inline(text) {
  const parts = [];
  let end = 0;
  for (const match of text.matchAll(INLINE)) {
    const [whole, , code, bold, slanted, label, target] = match;
    parts.push(terminal(text.slice(end, match.index)));
    if (code !== undefined) parts.push(html`<code>${terminal(code)}</code>`);
    else if (bold !== undefined) parts.push(html`<strong>${terminal(bold)}</strong>`);
    else if (slanted !== undefined) parts.push(html`<em>${terminal(slanted)}</em>`);
    else parts.push(terminal(label), html` <span class="soft">(${terminal(target)})</span>`);
    end = match.index + whole.length;
  }
  parts.push(terminal(text.slice(end)));
  return /** @type {Child[]} */ (parts);
}

/** @param {string} line of a table */
const cells = (line) => line.trim().replace(/^\||\|$/g, "").split("|").map((cell) => cell.trim());

/** @param {string} text @returns {Child[]} */
export function markdown(text) {
  const lines = text.split("\n");
  const blocks = [];
  let i = 0;
  /** Lines from here on that fit. @param {(line: string) => boolean} fits */
  const take = (fits) => {
    const from = i;
    while (i < lines.length && fits(lines[i])) i++;
    return lines.slice(from, i);
  };
  const plain = (/** @type {string} */ line) => line.trim() !== "" && !FENCE.test(line) && !ITEM.test(line) && !/^(#{1,6}\s|>|\|)/.test(line);
  while (i < lines.length) {
    const line = lines[i];
    const fence = FENCE.exec(line);
    if (fence) {
      i++;
      const code = take((next) => !next.trim().startsWith(fence[1]));
      i++; // the fence that closes it
      blocks.push(html`<pre class="code" title=${fence[2] || undefined}><${Text} text=${code.join("\n")} /></pre>`);
    } else if (line.startsWith("|") && /^\|?[\s:|-]+\|[\s:|-]*$/.test(lines[i + 1] ?? "") && lines[i + 1].includes("-")) {
      const [head, , ...rows] = take((next) => next.startsWith("|"));
      blocks.push(html`<${Wide} label=${`table of ${cells(head).join(", ")}`}><table class="lines"><thead><tr>${cells(head).map((cell) => html`<th>${inline(cell)}</th>`)}</tr></thead>
        <tbody>${rows.map((row) => html`<tr>${cells(row).map((cell) => html`<td>${inline(cell)}</td>`)}</tr>`)}</tbody></table><//>`);
    } else if (ITEM.test(line)) {
      const items = take((next) => ITEM.test(next) || (/^\s{2,}\S/.test(next) && !FENCE.test(next)));
      blocks.push(html`<ul class="items">${items.map((item) => {
        const [, space, mark, rest] = ITEM.exec(item) ?? [];
        if (mark === undefined) return html`<li class="in-1"><span></span><span>${inline(item.trim())}</span></li>`;
        return html`<li class=${`in-${Math.min(4, space.length >> 1)}`}><span>${/\d/.test(mark) ? mark : "•"}</span><span>${inline(rest)}</span></li>`;
      })}</ul>`);
    } else if (/^#{1,6}\s/.test(line)) {
      i++;
      blocks.push(html`<p class="heading">${inline(line.replace(/^#+\s+/, ""))}</p>`);
    } else if (line.startsWith(">")) {
      blocks.push(html`<blockquote>${inline(take((next) => next.startsWith(">")).map((next) => next.replace(/^>\s?/, "")).join("\n"))}</blockquote>`);
    } else if (line.trim() === "") {
      i++;
    } else {
      const paragraph = take(plain);
      blocks.push(html`<p>${inline(paragraph.length ? paragraph.join("\n") : lines[i++])}</p>`);
    }
  }
  return blocks;
}

/** JSON with a line for each value, or null if it is none. Numbers and texts stay as they are written. @param {string} text */
export function indented(text) {
  if (!/^\s*[[{]/.test(text)) return null;
  try {
    JSON.parse(text);
  } catch {
    return null;
  }
  let depth = 0;
  const line = () => `\n${"  ".repeat(depth)}`;
  return text.trim().replace(/"(?:[^"\\]|\\.)*"|[[{]\s*[\]}]|[[{]|[\]}]|,|:|\s+/g, (piece) => {
    if (piece[0] === '"') return piece;
    if (/\s/.test(piece[0])) return "";
    if (piece === ",") return `,${line()}`;
    if (piece === ":") return ": ";
    if (/^[[{]$/.test(piece)) {
      depth++;
      return piece + line();
    }
    if (piece.length > 1) return piece[0] + piece[piece.length - 1];
    depth--;
    return line() + piece;
  });
}

/** A text of a message; `marked` says that Markdown is laid out. @param {{text: string, marked: boolean}} props */
export function Laid({ text, marked }) {
  const laid = useMemo(() => {
    if (text.length > LONGEST || text.includes("\u001b[")) return null;
    const json = indented(text);
    if (json !== null) return html`<pre class="code"><${Text} text=${json} /></pre>`;
    return marked ? markdown(text) : null;
  }, [text, marked]);
  return laid ? html`<div class="laid">${laid}</div>` : html`<div class="written"><${Text} text=${text} /></div>`;
}
