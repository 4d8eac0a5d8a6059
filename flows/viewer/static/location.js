// The address holds the whole state of a page, so that any page can be linked, reloaded and gone back to.
import { here, href, target, whole } from "./served.js";
import { signal } from "./ui.js";

/**
 * @typedef {{path: string, params: Record<string, string>}} Place
 */

/** @returns {Place} */
function read() {
  const [path, ...query] = here().split("?");
  return { path, params: Object.fromEntries(new URLSearchParams(query.join("?"))) };
}

/** Where the reader is. */
export const route = signal(read());

/** The version of the buffer that the page shows; null if it shows no rows. */
export const version = signal(/** @type {string | null} */ (null));

/** A link that shows the same later: with the version of the buffer. */
export function lasting() {
  const { path, params } = read();
  return whole(address(path, { ...params, at: params.at ?? version.value }));
}

/** The address of a page. Empty values are left out; of a list, each value is given. @param {string} path @param {Record<string, string | number | boolean | null | undefined | string[]>} [params] */
export function address(path, params = {}) {
  const kept = Object.entries(params).filter(([, value]) => value !== undefined && value !== null && value !== "");
  const pairs = kept.flatMap(([name, value]) => (Array.isArray(value) ? value : [value]).map((item) => [name, String(item)]));
  const query = new URLSearchParams(pairs).toString();
  return query ? `${path}?${query}` : path;
}

/** @param {string} id @param {Record<string, string | number | null | undefined>} [params] */
export function rowAddress(id, params = {}) {
  return address(`/row/${encodeURIComponent(id)}`, params);
}

/** Opens an address of this viewer. @param {string} to @param {boolean} [replace] without a step in the history */
export function go(to, replace = false) {
  if (replace) history.replaceState(null, "", href(to));
  else history.pushState(null, "", href(to));
  follow();
}

/** Shows the page of the address. The focus does not get lost with the page before: Tab goes on at the top of the new one. */
function follow() {
  const to = read();
  const page = document.getElementById("page");
  if (to.path !== route.peek().path && page?.contains(document.activeElement)) page.focus({ preventScroll: true });
  route.value = to;
}

/** Changes some parameters of this page's address and keeps the others. @param {Record<string, string | number | boolean | null | undefined>} params */
export function change(params) {
  const now = read();
  const to = address(now.path, { ...now.params, ...params });
  if (to !== address(now.path, now.params)) go(to, true);
}

/** Back and forward, and clicks on links within the viewer, do not load the document again. */
export function followLinks() {
  addEventListener("popstate", follow);
  document.addEventListener("click", (event) => {
    const link = event.target instanceof Element ? event.target.closest("a") : null;
    const plain = event.button === 0 && !event.ctrlKey && !event.metaKey && !event.shiftKey && !event.altKey;
    if (!link || !plain || event.defaultPrevented || link.target) return;
    const to = target(link);
    if (to === null) return;
    event.preventDefault();
    go(to);
    scrollTo(0, 0);
  });
}
