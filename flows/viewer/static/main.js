// Starts the viewer: its tabs, and the page for each address.
import { later, start } from "./shell.js";
import { html } from "./ui.js";

const RunPage = later(() => import("./run.js"), "RunPage");
/** Path, name of its tab, page; what has no tab is reached from other pages. @type {[string, string, Function][]} */
const PAGES = [
  ["/", "overview", later(() => import("./overview.js"), "OverviewPage")],
  ["/buffer", "buffer", later(() => import("./buffer.js"), "BufferPage")],
  ["/calls", "calls", later(() => import("./calls.js"), "CallsPage")],
  ["/evaluation", "evaluations", later(() => import("./evaluation.js"), "EvaluationPage")],
  ["/task", "", later(() => import("./task.js"), "TaskPage")],
  ["/pair", "pairs", later(() => import("./pair.js"), "PairPage")],
  ["/training", "training", later(() => import("./training.js"), "TrainingPage")],
  ["/doctor", "doctor", later(() => import("./doctor.js"), "DoctorPage")],
  ["/curation", "curation", later(() => import("./curation.js"), "CurationPage")],
  ["/labels", "labels", later(() => import("./labels.js"), "LabelsPage")],
  ["/runs", "runs", later(() => import("./runs.js"), "RunsPage")],
];
const TrajectoryPage = later(() => import("./trajectory.js"), "TrajectoryPage");

/** @param {string} path @param {string} room @param {string | undefined} id */
function page(path, room, id) {
  const page = PAGES.find(([to]) => to === path);
  if (page) return html`<${page[2]} />`;
  if (room === "run" && id) return html`<${RunPage} key=${id} id=${id} />`;
  return room === "row" && id ? html`<${TrajectoryPage} id=${id} />` : null;
}

await start({
  tabs: Object.fromEntries(PAGES.flatMap(([to, name]) => (name ? [[to, name]] : []))),
  others: { task: "task", row: "trajectory", run: "run" },
  page,
});
