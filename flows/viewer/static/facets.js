// Histograms of the columns: grey bars are all rows, blue ones the filtered. A click chooses a value, a drag a range.
import { count } from "./format.js";
import { has, toggled } from "./filter.js";
import { visible } from "./text.js";
import { html, useRef, useState } from "./ui.js";

/** @typedef {import("./wire.js").Facet} Facet */
/** @typedef {{facet: Facet, filter: string, set: (filter: string) => void}} Props */

/** @param {{facets: Facet[], filter: string, set: (filter: string) => void}} props */
export function FacetList({ facets, filter, set }) {
  const drawn = facets.filter((facet) => facet.bins.length + facet.more > 1 || facet.bins.some((bin) => has(filter, bin.where)));
  const same = facets.filter((facet) => facet.bins.length === 1 && !drawn.includes(facet) && facet.bins[0].label !== "unknown");
  return html`<div class="facets"><h2 class="unseen">Histograms</h2>
    ${same.length > 0 && html`<p class="soft">in all rows: ${same.map((facet) => `${facet.column} ${visible(facet.bins[0].label)}`).join(", ")}</p>`}
    ${drawn.map((facet) => html`<${facet.kind === "number" ? Numbers : Values} key=${facet.column} facet=${facet} filter=${filter} set=${set} />`)}
  </div>`;
}

/** The largest bar, so that all bars of a facet are on one scale. @param {Facet} facet */
const highest = (facet) => Math.max(1, ...facet.bins.map((bin) => bin.all));

/** @param {Facet["bins"][number]} bin @param {string} column */
const told = (bin, column) => `${column} ${visible(bin.label)}: ${count(bin.filtered)} of ${count(bin.all)} rows`;

/** The part of the expression that chooses from one bar to another. @param {Facet} facet @param {number} a @param {number} b */
export function range(facet, a, b) {
  const [first, last] = [facet.bins[Math.min(a, b)], facet.bins[Math.max(a, b)]];
  if (first === last || first.low === null || last.high === null) return first.where;
  return `${facet.column} >= ${first.low} and ${facet.column} ${last.where.includes("<=") ? "<=" : "<"} ${last.high}`;
}

/** @param {Props} props */
function Numbers({ facet, filter, set }) {
  const [from, setFrom] = useState(/** @type {number | null} */ (null));
  const [to, setTo] = useState(0);
  const top = highest(facet);
  const inDrag = (/** @type {number} */ i) => from !== null && i >= Math.min(from, to) && i <= Math.max(from, to);
  const choose = (/** @type {number} */ a, /** @type {number} */ b) => {
    setFrom(null);
    set(toggled(filter, facet.column, range(facet, a, b)));
  };
  const move = useArrows(facet.bins.length);
  const numbers = facet.bins.filter((bin) => bin.low !== null);
  const ends = numbers.length ? [numbers[0].label.split(" to ")[0], numbers[numbers.length - 1].label.split(" to ").at(-1)] : ["no values", ""];
  return html`<section class="facet" aria-label=${facet.column}>
    <h3>${facet.column}</h3>
    <div class="bars" role="group" aria-label=${`${facet.column}: drag or shift-click for a range`} onPointerLeave=${() => setFrom(null)}>
      ${facet.bins.map(
        (bin, i) => html`<button class=${`bar${has(filter, bin.where) ? " on" : ""}${inDrag(i) ? " dragged" : ""}`} ...${move(i)}
            title=${told(bin, facet.column)} aria-label=${told(bin, facet.column)} aria-pressed=${has(filter, bin.where) ? "true" : "false"}
            onPointerDown=${(/** @type {PointerEvent} */ event) => {
              /** @type {Element} */ (event.target).releasePointerCapture?.(event.pointerId);
              setFrom(event.shiftKey && from !== null ? from : i);
              setTo(i);
            }}
            onClick=${(/** @type {MouseEvent} */ event) => event.detail === 0 && choose(from ?? i, i) /* a screen reader's, without a pointer */}
            onPointerEnter=${() => from !== null && setTo(i)}
            onPointerUp=${() => from !== null && choose(from, i)}
            onKeyDown=${(/** @type {KeyboardEvent} */ event) => {
              if (event.key === " ") {
                event.preventDefault();
                setFrom(i);
                setTo(i);
              }
              if (event.key === "Enter") {
                event.preventDefault();
                choose(from ?? i, i);
              }
            }}
            onFocus=${() => from !== null && setTo(i)}>
          <span class="all" style=${{ height: `${(100 * bin.all) / top}%` }}></span>
          <span class="some" style=${{ height: `${(100 * bin.filtered) / top}%` }}></span>
        </button>`,
      )}
    </div>
    <div class="ends"><span>${ends[0]}</span><span>${ends[1]}</span></div>
    ${facet.more > 0 && html`<p class="soft">${count(facet.more)} rows without a bar</p>`}
  </section>`;
}

/** @param {Props} props */
function Values({ facet, filter, set }) {
  const [whole, setWhole] = useState(false);
  const top = highest(facet);
  const shown = whole ? facet.bins : facet.bins.slice(0, 8);
  const move = useArrows(shown.length);
  return html`<section class="facet" aria-label=${facet.column}>
    <h3>${facet.column}</h3>
    <div role="group" aria-label=${facet.column}>
      ${shown.map(
        (bin, i) => html`<button class=${`value${has(filter, bin.where) ? " on" : ""}`} ...${move(i)} title=${told(bin, facet.column)}
            aria-pressed=${has(filter, bin.where) ? "true" : "false"} onClick=${() => set(toggled(filter, facet.column, bin.where))}>
          <span class="all" style=${{ width: `${(100 * bin.all) / top}%` }}></span>
          <span class="some" style=${{ width: `${(100 * bin.filtered) / top}%` }}></span>
          <span class="label">${visible(bin.label)}</span> <span class="number">${count(bin.filtered)}<span class="unseen"> of ${count(bin.all)} rows</span></span>
        </button>`,
      )}
    </div>
    ${facet.bins.length > shown.length && html`<button class="quiet" onClick=${() => setWhole(true)}>${facet.bins.length - shown.length} more</button>`}
    ${facet.more > 0 && html`<p class="soft">${count(facet.more)} more values: write them into the filter</p>`}
  </section>`;
}

/** One stop of the tabulator for all bars of a facet; arrows move between them. @param {number} length */
function useArrows(length) {
  const [current, setCurrent] = useState(0);
  const bars = useRef(/** @type {(HTMLElement | null)[]} */ ([]));
  return (/** @type {number} */ i) => ({
    tabindex: i === Math.min(current, length - 1) ? 0 : -1,
    ref: (/** @type {HTMLElement | null} */ bar) => (bars.current[i] = bar),
    onKeyDownCapture: (/** @type {KeyboardEvent} */ event) => {
      const step = { ArrowRight: 1, ArrowDown: 1, ArrowLeft: -1, ArrowUp: -1 }[event.key];
      if (!step) return;
      event.preventDefault();
      const next = Math.min(length - 1, Math.max(0, i + step));
      setCurrent(next);
      bars.current[next]?.focus();
    },
  });
}
