// The template tag of every page, and what pages take from Preact and signals.
import htm from "./vendor/htm.js";
import { href } from "./served.js";
import { h } from "./vendor/preact.js";

export { Fragment, render } from "./vendor/preact.js";
export { useEffect, useLayoutEffect, useMemo, useRef, useState } from "./vendor/preact-hooks.js";
export { batch, computed, effect, signal } from "./vendor/signals.js";

/** @param {any} type @param {any} props @param {any[]} children */
const element = (type, props, ...children) =>
  h(type, type === "a" && props?.href?.startsWith("/") ? { ...props, href: href(props.href) } : props, ...children);

/** Text in `${}` becomes text nodes and attributes only: nothing from the store is ever parsed as HTML. */
export const html = htm.bind(element);
