// What is around every page: its tabs, the theme, the keys, and what was just said.
import { json, useAnswer } from "./api.js";
import { Help, listen, Said, showHelp } from "./keys.js";
import { followLinks, route } from "./location.js";
import { Status } from "./progress.js";
import { beside, enter, store } from "./served.js";
import { theme, turnTheme } from "./theme.js";
import { html, render, signal, useEffect, useLayoutEffect, useState } from "./ui.js";

/**
 * @typedef {{
 *   tabs: Record<string, string>, others: Record<string, string>,
 *   page: (path: string, room: string, id: string | undefined) => any,
 * }} Pages `tabs` are names by path; `others` are names, by the first part of a path, of pages without a tab
 */

/** How to load each page that may be opened. @type {(() => Promise<any>)[]} */
const LOADS = [];
/** Milliseconds after which the modules of all other pages are fetched. */
const LATER_MS = 1000;
const LOOK_MS = 15_000; // as long as a page has nothing to show

/** A page whose modules are fetched when it is opened, or a while after the first one was. @param {() => Promise<any>} load @param {string} name */
export function later(load, name) {
  LOADS.push(load);
  return (/** @type {object} */ props) => {
    const [page, setPage] = useState(/** @type {any} */ (null));
    useLayoutEffect(() => void load().then((module) => setPage({ Page: module[name] })), []);
    return page && html`<${page.Page} ...${props} />`;
  };
}

/** So that no page waits for its modules, and a page that is open can be left after the server ended. */
async function loadOthers() {
  for (const load of LOADS) await load().catch(() => null); // whoever opens the page is told
}

/** @param {string} text of an address */
function decoded(text) {
  try {
    return decodeURIComponent(text);
  } catch {
    return text; // such as a lone %: no id has it, and the server says so
  }
}

/** Paths of the pages that have something to show; null until it is known: then all have a tab. */
const filled = signal(/** @type {string[] | null} */ (null));

/** @param {Pages} props */
function Shell({ tabs, others, page }) {
  const { path } = route.value;
  const [, room, name] = path.split("/");
  const id = name && decoded(name);
  useEffect(() => {
    document.title = path === "/" ? "agentrl" : `${id ?? room} · agentrl`;
  }, [path]);
  return html`<header class="top">
      <a class="skip" href="#page">skip to the page</a>
      <nav aria-label="pages">${Object.entries(tabs).filter(([to]) => !filled.value || filled.value.includes(to) || to === path).map(([to, label]) => html`<a href=${to} aria-current=${path === to ? "page" : undefined}>${label}</a>`)}${room in others && html`<span aria-current="page">${others[room]}</span>`}</nav>
      <div class="tools"><${Stores} /><button class="quiet" onClick=${turnTheme}>theme: ${theme.value}</button><button class="quiet" onClick=${showHelp}>keys: <kbd>?</kbd></button></div>
      <${Status} />
    </header>
    <div id="page" class=${`page ${room || "overview"}`} role="main" tabindex="-1">${page(path, room, id) ?? html`<h1>There is no page ${path}</h1><p><a href="/">${tabs["/"]}</a></p>`}</div>
    <${Said} /><${Help} />`;
}

/** @param {Pages} pages */
export async function start(pages) {
  await enter();
  followLinks();
  listen();
  render(html`<${Shell} ...${pages} />`, /** @type {Element} */ (document.getElementById("app")));
  setTimeout(loadOthers, LATER_MS);
  if (!store) return; // a file
  const look = () => json("/api/tabs").then((answer) => (filled.value = answer.paths), () => null);
  await look();
  setInterval(() => filled.value && filled.value.length < Object.keys(pages.tabs).length && !document.hidden && look(), LOOK_MS);
}

function Stores() {
  const { value } = useAnswer(async (stop) => (beside ? /** @type {import("./wire.js").StoresShown} */ (await json("/api/stores", {}, stop)) : null), []);
  if (!value || value.stores.length < 2) return null;
  return html`<label class="stores"><span class="unseen">store</span><select onChange=${(/** @type {Event} */ event) => beside?.(/** @type {HTMLSelectElement} */ (event.target).value)}>
    ${value.stores.map((name) => html`<option value=${name} selected=${name === value.name}>${name}</option>`)}</select></label>`;
}
