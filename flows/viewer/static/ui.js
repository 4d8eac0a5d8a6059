// The template tag of every page, and what pages take from Preact and signals.
import htm from "./vendor/htm.js";
import { has, href } from "./served.js";
import { h } from "./vendor/preact.js";

export { Fragment, render } from "./vendor/preact.js";
export { useEffect, useLayoutEffect, useMemo, useRef, useState } from "./vendor/preact-hooks.js";
export { batch, computed, effect, signal } from "./vendor/signals.js";

/** A link to a page that is not there is its text alone. @param {any} type @param {any} props @param {any[]} children */
function element(type, props, ...children) {
  if (type !== "a" || !props?.href?.startsWith("/")) return h(type, props, ...children);
  return has(props.href) ? h(type, { ...props, href: href(props.href) }, ...children) : h("span", { class: props.class }, ...children);
}

/** Text in `${}` becomes text nodes and attributes only: nothing from the store is ever parsed as HTML. */
export const html = htm.bind(element);

/** A table that scrolls sideways within the page. @param {{label: string, children?: any}} props */
export const Wide = ({ label, children }) => html`<div class="wide-table" tabindex="0" role="group" aria-label=${label}>${children}</div>`;
