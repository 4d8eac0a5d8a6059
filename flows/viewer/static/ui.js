// The template tag of every page, and what pages take from Preact and signals.
import htm from "./vendor/htm.js";
import { has, href } from "./served.js";
import { h } from "./vendor/preact.js";

export { render } from "./vendor/preact.js";
export { useEffect, useLayoutEffect, useMemo, useRef, useState } from "./vendor/preact-hooks.js";
export { effect, signal } from "./vendor/signals.js";

/** A link to a page that is not there is its text alone. @param {any} type @param {any} props @param {any[]} children */
function element(type, props, ...children) {
  if (type !== "a" || !props?.href?.startsWith("/")) return h(type, props, ...children);
  return has(props.href) ? h(type, { ...props, href: href(props.href) }, ...children) : h("span", { class: props.class }, ...children);
}

/** Text in `${}` becomes text nodes and attributes only: nothing from the store is ever parsed as HTML. */
export const html = htm.bind(element);

/** A table that scrolls sideways within the page. @param {{label: string, children?: any}} props */
export const Wide = ({ label, children }) => html`<div class="wide-table" tabindex="0" role="group" aria-label=${label}>${children}</div>`;

/** A table of such kind. `heads` name its columns, those of numbers after a #; its rows are the children. @param {{label: string, heads: any[], kind?: string, children?: any}} props */
export const Lines = ({ label, heads, kind = "", children }) => html`<${Wide} label=${label}><table class=${`lines ${kind}`}>
  <thead><tr>${heads.map((head) => (head === "" ? html`<td></td>` : String(head).startsWith("#") ? html`<th class="number">${head.slice(1)}</th>` : html`<th>${head}</th>`))}</tr></thead><tbody>${children}</tbody>
</table><//>`;
