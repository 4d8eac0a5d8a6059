// Keys of the pages. A page says which keys it has; the help dialog lists them.
import { address, go, lasting, route } from "./location.js";
import { html, signal, useLayoutEffect, useRef } from "./ui.js";

/** @typedef {Record<string, {does: string, run: () => void}>} Keys */

/** @type {import("./vendor/signals.js").Signal<Keys>} */
const page = signal({});
/** @type {{current: HTMLDialogElement | null}} */
const help = { current: null };
/** What was just done, such as "link copied"; read aloud too. */
export const announcement = signal("");

/** Keys of every page that has no other use for them. @type {Keys} */
const EVERYWHERE = { "/": { does: "find words in the rows, or filter them", run: () => go(address("/buffer", { at: route.peek().params.at, focus: "filter" })) } };

/** @param {Keys} keys of the page that is shown */
export function useKeys(keys) {
  const latest = useRef(keys);
  latest.current = keys;
  useLayoutEffect(() => { // before the next key, not after the next frame
    const names = Object.keys(latest.current);
    page.value = Object.fromEntries(
      names.map((name) => [name, { does: latest.current[name].does, run: () => latest.current[name].run() }]),
    );
    return () => {
      page.value = {};
    };
  }, [Object.keys(keys).join(" ")]);
}

/** @param {string} text */
export function say(text) {
  announcement.value = text;
  setTimeout(() => announcement.peek() === text && (announcement.value = ""), 4000);
}

/** @param {string} text @param {string} what it is, for the reader */
export async function copy(text, what) {
  try {
    await navigator.clipboard.writeText(text);
    say(`${what} copied`);
  } catch {
    say(`the browser does not let this page copy; ${what}: ${text}`);
  }
}

/** Whether keys of one character do something: people who speak to their computer may press them unawares. */
const single = signal(localStorage.getItem("keys") !== "off");

function turnSingle() {
  single.value = !single.value;
  localStorage.setItem("keys", single.value ? "on" : "off");
}

export const showHelp = () => help.current?.showModal();

const COMMON = { "?": "this help", y: "copy a link to exactly this, with the version of the buffer", Escape: "leave a field, a menu or a dialog" };

/** Closes the menu that is open, and goes back to what opened it. */
function closeMenu() {
  const menu = /** @type {HTMLDetailsElement | null} */ (document.querySelector("details.columns[open]"));
  if (menu) menu.open = false;
  menu?.querySelector("summary")?.focus();
  return menu !== null;
}

export function listen() {
  document.addEventListener("keydown", (event) => {
    const target = /** @type {HTMLElement} */ (event.target);
    const typing = target.matches?.("input:not([type=radio], [type=checkbox]), textarea, select, [contenteditable]") ?? false;
    const moves = (target.matches?.("[type=radio], [type=checkbox]") ?? false) && (event.key === " " || event.key.startsWith("Arrow"));
    if (event.key === "Escape" && closeMenu()) return;
    if (event.key === "Escape" && typing) target.blur();
    if (typing || moves || event.defaultPrevented || event.ctrlKey || event.metaKey || event.altKey || document.querySelector("dialog[open]")) return;
    if (event.key.length === 1 && !single.value) return;
    const name = event.shiftKey && event.key.startsWith("Arrow") ? `Shift+${event.key}` : event.key;
    if (event.key === "?") {
      showHelp(); // at once: an Escape that follows must find it open
    } else if (event.key === "y") {
      copy(lasting(), "link");
    } else {
      const key = page.value[name] ?? EVERYWHERE[name];
      if (!key || (name === "Enter" && target.matches("a, button, summary"))) return;
      key.run();
    }
    event.preventDefault();
  });
}

export function Help() {
  const rows = Object.entries({ ...Object.fromEntries(Object.entries({ ...EVERYWHERE, ...page.value }).map(([key, { does }]) => [key, does])), ...COMMON });
  return html`<dialog ref=${help} aria-labelledby="help-title">
    <h2 id="help-title">Keys of this page</h2>
    <dl class="keys">
      ${rows.map(([key, does]) => html`<div><dt><kbd>${key}</kbd></dt><dd>${does}</dd></div>`)}
    </dl>
    <p><label><input type="checkbox" checked=${single.value} onChange=${turnSingle} /> keys of one character</label></p>
    <button onClick=${() => help.current?.close()}>close</button>
  </dialog>`;
}

export function Said() {
  return html`<div class=${announcement.value ? "said" : "said empty"} role="status" aria-live="polite">${announcement.value}</div>`;
}
