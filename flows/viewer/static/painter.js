// Draws tokens. All text of a row but what is folded is in the document, so that find, selection and screen readers have it; elements for
// single tokens exist only in blocks that the browser shows.
import { classes } from "./lenses.js";
import { visible } from "./text.js";
import { SPECIAL } from "./tokens.js";

/** @typedef {import("./tokens.js").Tokens} Tokens */
/** @typedef {import("./lenses.js").Lens} Lens */
/** @typedef {{element: HTMLElement, from: number, to: number, lit: boolean}} Block */

const LINE = 20; // pixels
const CHARACTERS = 100; // about so many fit a line; the browser corrects a block's height when it has shown it

/** The place where the style sheet shows a line break. */
function lineEnd() {
  const mark = document.createElement("i");
  mark.className = "line-end";
  return mark;
}

/** Whether a character of an element is in a range. @param {Range} range @param {Element} element */
function overlaps(range, element) {
  const [first, last] = [element.firstChild, element.lastChild];
  if (!(first instanceof Text) || !(last instanceof Text)) return false;
  const own = document.createRange();
  own.setStart(first, 0);
  own.setEnd(last, last.length);
  return range.compareBoundaryPoints(Range.START_TO_END, own) > 0 && range.compareBoundaryPoints(Range.END_TO_START, own) < 0;
}

export class Painter {
  /** @param {Tokens} tokens @param {Lens} lens @param {boolean} [folding] whether the style sheet folds tokens of the template */
  constructor(tokens, lens, folding = false) {
    this.tokens = tokens;
    this.folding = folding;
    this.lens = lens;
    /** @type {Block[] | null} in the order of the tokens; null if that is not known any more */
    this.ordered = null;
    /** @type {Map<Element, Block>} */
    this.byElement = new Map();
    this.current = -1;
    /** @type {[number, number]} the tokens that are chosen: the first, and the one after the last */
    this.chosen = [0, 0];
    this.wanted = -1; // a token to reveal as soon as it is there
    // Beside the event: it also lights what is near the view, so a token that was revealed stays while heights are corrected.
    this.watch = new IntersectionObserver((seen) => seen.forEach((entry) => this.turn(entry.target, entry.isIntersecting)), { rootMargin: "50%" });
  }

  /** The blocks, in the order of the tokens. */
  get blocks() {
    return (this.ordered ??= [...this.byElement.values()].sort((left, other) => left.from - other.from));
  }

  /** Listens where blocks come into view and leave it. @param {HTMLElement} root */
  listen(root) {
    const changed = (/** @type {any} */ event) => this.turn(event.target, !event.skipped);
    root.addEventListener("contentvisibilityautostatechange", changed);
    return () => {
      root.removeEventListener("contentvisibilityautostatechange", changed);
      this.watch?.disconnect();
    };
  }

  /** Puts the tokens from `from` to `to` into an empty element. @param {HTMLElement} host @param {number} from @param {number} to */
  fill(host, from, to) {
    const added = this.tokens.blocks(from, to).map(([a, b]) => {
      const element = document.createElement("div");
      const text = this.text(a, b);
      const lines = text.split("\n").reduce((sum, line) => sum + 1 + Math.floor(line.length / CHARACTERS), 0);
      element.className = b < to && !this.tokens.endsLine(b - 1) ? "block goes-on" : "block";
      element.style.setProperty("--height", `${lines * LINE}px`);
      element.textContent = text;
      return { element, from: a, to: b, lit: false };
    });
    for (const block of added) this.byElement.set(block.element, block);
    this.ordered = null;
    host.replaceChildren(...added.map((block) => block.element));
    for (const block of added) this.watch?.observe(block.element);
    if (this.wanted >= from && this.wanted < to) this.reveal(this.wanted);
    return () => {
      for (const block of added) this.byElement.delete(block.element);
      this.ordered = null;
      host.replaceChildren();
    };
  }

  /** What a block has as long as its tokens have no elements: as high as with them, so that nothing moves. @param {number} from @param {number} to */
  text(from, to) {
    const text = visible(this.tokens.slice(from, to));
    return this.folding ? text.replace(SPECIAL, "⋯") : text;
  }

  /** @param {EventTarget | null} target @param {boolean} shown */
  turn(target, shown) {
    const block = this.byElement.get(/** @type {Element} */ (target));
    if (!block || block.lit === shown) return;
    if (shown) this.light(block);
    else {
      block.lit = false;
      block.element.textContent = this.text(block.from, block.to);
    }
  }

  /** One element per token. @param {Block} block */
  light(block) {
    block.lit = true;
    const fragment = document.createDocumentFragment();
    for (let i = block.from; i < block.to; i++) {
      const span = document.createElement("span");
      const text = this.tokens.piece(i);
      span.className = this.classes(i);
      if (text.endsWith("\n")) span.append(text.slice(0, -1), lineEnd(), "\n");
      else span.textContent = text;
      fragment.append(span);
    }
    block.element.replaceChildren(fragment);
  }

  /** @param {number} i */
  classes(i) {
    return classes(this.lens, this.tokens, i) + this.tokens.folds(i) + (i === this.current ? " now" : "") + (i >= this.chosen[0] && i < this.chosen[1] ? " picked" : "");
  }

  /** @param {Lens} lens */
  use(lens) {
    this.lens = lens;
    for (const block of this.byElement.values()) if (block.lit) this.restyle(block);
  }

  /** @param {Block} block */
  restyle(block) {
    const spans = block.element.children;
    for (let i = block.from; i < block.to; i++) spans[i - block.from].className = this.classes(i);
  }

  /** The number of the token that an element draws; -1 if it draws none. @param {EventTarget | null} target */
  at(target) {
    const span = target instanceof Element ? target.closest(".t") : null;
    const block = span?.parentElement && this.byElement.get(span.parentElement);
    return block ? block.from + Array.prototype.indexOf.call(block.element.children, span) : -1;
  }

  /** @param {number} i */
  block(i) {
    return this.blocks.find((block) => i >= block.from && i < block.to);
  }

  /** Marks a token. @param {number} i */
  mark(i) {
    const before = this.current;
    this.current = i;
    for (const index of [before, i]) {
      const block = this.block(index);
      if (block?.lit) this.restyle(block);
    }
  }

  /** Marks tokens as chosen. @param {[number, number]} span */
  choose(span) {
    this.chosen = span;
    for (const block of this.byElement.values()) if (block.lit) this.restyle(block);
  }

  /** The tokens of which the reader selected a character or more; null if there are none. @returns {[number, number] | null} */
  selected() {
    const selection = getSelection();
    if (!selection?.rangeCount || selection.isCollapsed) return null;
    const range = selection.getRangeAt(0);
    const touched = this.blocks.flatMap((block) => {
      if (!block.lit || !range.intersectsNode(block.element)) return [];
      return Array.from(block.element.children, (span, i) => (overlaps(range, span) ? block.from + i : -1)).filter((token) => token >= 0);
    });
    return touched.length ? [touched[0], touched[touched.length - 1] + 1] : null;
  }

  /** Brings a token into view. @param {number} i */
  reveal(i) {
    const block = this.block(i);
    this.wanted = block ? -1 : i;
    if (!block) return;
    if (!block.lit) this.light(block);
    block.element.children[i - block.from].scrollIntoView({ block: "center" });
  }
}
