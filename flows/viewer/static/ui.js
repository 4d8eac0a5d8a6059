// The template tag of every page, and what pages take from Preact and signals.
import htm from "./vendor/htm.js";
import { h } from "./vendor/preact.js";

export { Fragment, render } from "./vendor/preact.js";
export { useEffect, useLayoutEffect, useMemo, useRef, useState } from "./vendor/preact-hooks.js";
export { batch, computed, effect, signal } from "./vendor/signals.js";

/** Text in `${}` becomes text nodes and attributes only: nothing from the store is ever parsed as HTML. */
export const html = htm.bind(h);
