// Where the viewer is: behind a server, and its addresses are paths. An exported file has `exported.js` in its place.

/** The path under which a proxy shows the viewer, as `/proxy/8322`; empty without one. The scripts come from below it. */
const under = new URL(import.meta.url).pathname.replace(/\/static\/.*$/, "");

const icon = /** @type {HTMLLinkElement | null} */ (document.querySelector("link[rel=icon]"));
if (icon) icon.href = `${under}/static/icon.svg`; // browsers ask for it again after each page, relative to that page

/** @param {string} path */
const within = (path) => (path.startsWith(`${under}/`) ? path.slice(under.length) : path === under ? "/" : path);

/** Path and query of the page that is open. */
export const here = () => within(location.pathname) + location.search;

/** What a link, or the bar of the browser, has for an address of the viewer. @param {string} to */
export const href = (to) => under + to;

/** Whether there is a page at an address. @param {string} to */
export const has = (to) => to.startsWith("/");

/** The whole address, for other people. @param {string} to */
export const whole = (to) => location.origin + under + to;

/** Goes to another store of the same viewer; null in an exported file. @type {((name: string) => void) | null} */
export const beside = (name) => location.assign(`${under.replace(/[^/]*$/, "")}${name}/`);

/** The address of the viewer to which a link leads; null if it leads elsewhere. @param {HTMLAnchorElement} link */
export function target(link) {
  if (link.origin !== location.origin || link.getAttribute("href")?.startsWith("#")) return null;
  if (under && !`${link.pathname}/`.startsWith(`${under}/`)) return null;
  return within(link.pathname) + link.search;
}

/** What reads the place of the store; null if there is none. @type {(() => Promise<string>) | null} */
export const store = async () => (await (await ask("/api/overview", {})).json()).store;

/** @param {string} address @param {RequestInit} how */
export const ask = (address, how) => fetch(under + address, how);

/** The server's word of what changes; null if nothing does, as in an exported file. @returns {EventSource | null} */
export const events = () => new EventSource(`${under}/api/events`);

/** A viewer that others can reach gives its token in the fragment of its address, which browsers send nowhere. It is exchanged for a cookie, and leaves the address. */
export async function enter() {
  const token = /^#token=(.+)$/.exec(location.hash)?.[1];
  if (!token) return;
  history.replaceState(null, "", href(here()));
  await ask("/api/session", { headers: { "X-Agentrl-Token": token.includes("%") ? decodeURIComponent(token) : token } });
}
