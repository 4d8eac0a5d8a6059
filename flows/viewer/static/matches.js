// The words of a search, marked where they stand: in rows of a table, and in the messages of a row.
import { visible } from "./text.js";
import { html, useEffect } from "./ui.js";

const LATER_MS = 150; // after the last change of the messages, such as tokens that come into view
const MOST = 3_000_000; // characters that are looked through at once

/** What finds any of the words, whole and in any case, as the server does; null without words. @param {string[]} words */
export function patternOf(words) {
  const each = words.map((word) => (word.match(/[\p{L}\p{M}\p{N}]+/gu) ?? []).map((part) => part.replace(/[.*+?^${}|[\]\\/]/g, "\\$&")).join("[^\\p{L}\\p{N}]+")).filter(Boolean);
  return each.length ? new RegExp(`(?<![\\p{L}\\p{N}])(?:${each.join("|")})(?![\\p{L}\\p{N}])`, "giu") : null;
}

/** A text with its matches marked. @param {string} text @param {RegExp | null} pattern */
export function marked(text, pattern) {
  if (!pattern) return visible(text);
  const parts = [];
  let end = 0;
  for (const match of text.matchAll(pattern)) {
    parts.push(visible(text.slice(end, match.index)), html`<mark>${visible(match[0])}</mark>`);
    end = match.index + match[0].length;
  }
  return [...parts, visible(text.slice(end))];
}

/** Where a pattern stands in an element, also across its text nodes, as where a word is several tokens. @param {Element} element @param {RegExp} pattern */
function rangesIn(element, pattern) {
  const nodes = /** @type {Text[]} */ ([]);
  const starts = /** @type {number[]} */ ([]);
  const walker = document.createTreeWalker(element, NodeFilter.SHOW_TEXT);
  let text = "";
  for (let node = walker.nextNode(); node && text.length < MOST; node = walker.nextNode()) {
    starts.push(text.length);
    nodes.push(/** @type {Text} */ (node));
    text += node.nodeValue;
  }
  /** @param {number} at @param {number} from the node to begin with */
  const nodeOf = (at, from) => {
    let i = from;
    while (i + 1 < nodes.length && starts[i + 1] <= at) i++;
    return i;
  };
  const ranges = [];
  let i = 0;
  for (const match of text.matchAll(pattern)) {
    i = nodeOf(match.index, i);
    const last = nodeOf(match.index + match[0].length - 1, i);
    const range = new Range();
    range.setStart(nodes[i], match.index - starts[i]);
    range.setEnd(nodes[last], match.index + match[0].length - starts[last]);
    ranges.push(range);
  }
  return ranges;
}

/** Marks words in what `selector` finds, and goes on with that as it changes. @param {string} selector @param {string[]} words */
export function useMarks(selector, words) {
  useEffect(() => {
    const pattern = patternOf(words);
    const root = document.querySelector(selector);
    if (!pattern || !root || !("highlights" in CSS)) return undefined;
    let timer = 0;
    const mark = () => CSS.highlights.set("found", new Highlight(...rangesIn(root, pattern)));
    const watch = new MutationObserver(() => {
      clearTimeout(timer);
      timer = setTimeout(mark, LATER_MS);
    });
    mark();
    watch.observe(root, { childList: true, subtree: true, characterData: true });
    return () => {
      clearTimeout(timer);
      watch.disconnect();
      CSS.highlights.delete("found");
    };
  }, [selector, words.join("\n")]);
}
