// Starts the viewer: its tabs, and the page for each address.
import { later, start } from "./shell.js";
import { html } from "./ui.js";

const OverviewPage = later(() => import("./overview.js"), "OverviewPage");
const BufferPage = later(() => import("./buffer.js"), "BufferPage");
const EvaluationPage = later(() => import("./evaluation.js"), "EvaluationPage");
const TrainingPage = later(() => import("./training.js"), "TrainingPage");
const DoctorPage = later(() => import("./doctor.js"), "DoctorPage");
const RunPage = later(() => import("./run.js"), "RunPage");
const TaskPage = later(() => import("./task.js"), "TaskPage");
const PairPage = later(() => import("./pair.js"), "PairPage");
const TrajectoryPage = later(() => import("./trajectory.js"), "TrajectoryPage");

/** @param {string} path @param {string} room @param {string | undefined} id */
function page(path, room, id) {
  if (path === "/") return html`<${OverviewPage} />`;
  if (path === "/buffer") return html`<${BufferPage} />`;
  if (path === "/evaluation") return html`<${EvaluationPage} />`;
  if (path === "/task") return html`<${TaskPage} />`;
  if (path === "/pair") return html`<${PairPage} />`;
  if (path === "/training") return html`<${TrainingPage} />`;
  if (path === "/doctor") return html`<${DoctorPage} />`;
  if (room === "run" && id) return html`<${RunPage} key=${id} id=${id} />`;
  return room === "row" && id ? html`<${TrajectoryPage} id=${id} />` : null;
}

await start({
  tabs: { "/": "overview", "/buffer": "buffer", "/evaluation": "evaluations", "/pair": "pairs", "/training": "training", "/doctor": "doctor" },
  others: { task: "task", row: "trajectory", run: "run" },
  page,
});
