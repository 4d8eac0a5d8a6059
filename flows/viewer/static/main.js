// Starts the viewer: finds the page for the address, and draws what is around it.
import { Help, Said, listen } from "./keys.js";
import { followLinks, place } from "./location.js";
import { OverviewPage } from "./overview.js";
import { theme, turnTheme } from "./theme.js";
import { html, render, useEffect, useState } from "./ui.js";

/** A page whose modules are fetched when it is opened. @param {() => Promise<any>} load @param {string} name */
const later = (load, name) => /** @param {object} props */ (props) => {
  const [page, setPage] = useState(/** @type {any} */ (null));
  useEffect(() => void load().then((module) => setPage({ Page: module[name] })), []);
  return page && html`<${page.Page} ...${props} />`;
};

const BufferPage = later(() => import("./buffer.js"), "BufferPage");
const EvaluationPage = later(() => import("./evaluation.js"), "EvaluationPage");
const TaskPage = later(() => import("./task.js"), "TaskPage");
const PairPage = later(() => import("./pair.js"), "PairPage");
const TrajectoryPage = later(() => import("./trajectory.js"), "TrajectoryPage");

/** @param {string} text of an address */
function decoded(text) {
  try {
    return decodeURIComponent(text);
  } catch {
    return text; // such as a lone %: no id has it, and the server says so
  }
}

function App() {
  const { path } = place.value;
  const [, room, name] = path.split("/");
  const id = name && decoded(name);
  const shown = path === "/" ? html`<${OverviewPage} />`
    : path === "/buffer" ? html`<${BufferPage} />`
    : path === "/evaluation" ? html`<${EvaluationPage} />`
    : path === "/task" ? html`<${TaskPage} />`
    : path === "/pair" ? html`<${PairPage} />`
    : room === "row" && id ? html`<${TrajectoryPage} id=${id} />`
    : html`<h1>There is no page ${path}</h1><p><a href="/">overview</a></p>`;
  useEffect(() => {
    document.title = path === "/" ? "agentrl" : `${id ?? room} · agentrl`;
  }, [path]);
  const tab = (/** @type {string} */ to, /** @type {string} */ name) => html`<a href=${to} aria-current=${path === to ? "page" : undefined}>${name}</a>`;
  return html`<header class="top">
      <a class="skip" href="#page">skip to the page</a>
      <nav aria-label="pages">${tab("/", "overview")}${tab("/buffer", "buffer")}${tab("/evaluation", "evaluations")}${tab("/pair", "pairs")}${path === "/task" && html`<span aria-current="page">task</span>`}${room === "row" && html`<span aria-current="page">trajectory</span>`}</nav>
      <button class="quiet" onClick=${turnTheme}>theme: ${theme.value}</button>
      <span class="soft">keys: <kbd>?</kbd></span>
    </header>
    <div id="page" class=${`page ${room || "overview"}`} role="main" tabindex="-1">${shown}</div>
    <${Said} /><${Help} />`;
}

/**
 * A viewer that others can reach gives its token in the fragment of its address, which browsers send nowhere. It is
 * exchanged for a cookie, and leaves the address.
 */
async function enter() {
  const token = /^#token=(.+)$/.exec(location.hash)?.[1];
  if (!token) return;
  history.replaceState(null, "", location.pathname + location.search);
  await fetch("/api/session", { headers: { "X-Agentrl-Token": decoded(token) } });
}

await enter();
followLinks();
listen();
render(html`<${App} />`, /** @type {Element} */ (document.getElementById("app")));
