// Starts the viewer in an exported file: what the file holds, its rows, and pages about them.
import { contents } from "./answers.js";
import { count } from "./format.js";
import { later, start } from "./shell.js";
import { pieces } from "./text.js";
import { html } from "./ui.js";

const BufferPage = later(() => import("./buffer.js"), "BufferPage");
const TaskPage = later(() => import("./task.js"), "TaskPage");
const TrajectoryPage = later(() => import("./trajectory.js"), "TrajectoryPage");

function ContentsPage() {
  const { rows, selected, tokens, columns } = contents;
  const facts = [
    ["rows", `${count(rows)}${selected > rows ? ` of ${count(selected)}; the others were left out` : ""}`],
    ["chosen by", pieces(contents.selection)],
    ["tokens", count(tokens)],
    ["columns", `${columns.length}: ${columns.map((column) => column.name).join(", ")}`],
    ["version of the buffer", String(contents.version)],
    ["written by", `agentrl ${contents.agentrl}`],
  ];
  return html`<h1>Rows of an agentrl store</h1>
    <p>This file holds all that it shows, and loads nothing. <a href="/buffer">Look at the rows</a>.</p>
    <table class="lines facts"><tbody>${facts.map(([name, value]) => html`<tr><th scope="row">${name}</th><td>${value}</td></tr>`)}</tbody></table>`;
}

/** @param {string} path @param {string} room @param {string | undefined} id */
function page(path, room, id) {
  if (path === "/") return html`<${ContentsPage} />`;
  if (path === "/buffer") return html`<${BufferPage} />`;
  if (path === "/task") return html`<${TaskPage} />`;
  return room === "row" && id ? html`<${TrajectoryPage} id=${id} />` : null;
}

await start({ tabs: { "/": "contents", "/buffer": "rows" }, others: { task: "task", row: "trajectory" }, page });
