// One run: its stages, and those at work as they go on.
import { json, useAnswer } from "./api.js";
import { number } from "./chart.js";
import { LiveCurves } from "./curves.js";
import { literal } from "./filter.js";
import { count, seconds, time } from "./format.js";
import { lost, useChanges, usePulse } from "./live.js";
import { address, version } from "./location.js";
import { instead } from "./problem.js";
import { STOPPED, Shards, Stopped, far, farNow } from "./progress.js";
import { pieces } from "./text.js";
import { Lines, html, useEffect, useState } from "./ui.js";

/** @typedef {import("./wire.js").RunAnswer} Run */
/** @typedef {import("./wire.js").RunStage} Stage */

const MARKS = /** @type {Record<string, string>} */ ({ ran: "✓", reused: "✓", cached: "✓", cancelled: "✗", running: "◌", waiting: "◌", failed: "✗", killed: "✗", blocked: "✗" });
/** The colour of a status, as on the first page; what is not here has none yet. @type {Record<string, string>} */
const COLOURS = { ran: "cached", reused: "cached", cached: "cached", running: "running", waiting: "running", run: "run", failed: "failed", killed: "killed", cancelled: "cancelled", blocked: "blocked" };
const METRICS = 6;
const AGAIN_MS = 3000;

/** @param {{id: string}} props */
export function RunPage({ id }) {
  const [looked, look] = useState(0);
  const changes = useChanges((now) => [now.runs[id], Object.entries(now.stages).filter(([name]) => name.startsWith(`${id}/`))]);
  const { value, problem } = useAnswer((stop) => /** @type {Promise<Run>} */ (json("/api/run", { run: id }, stop)), [id, changes, looked]);
  useEffect(() => void (version.value = null), []);
  const running = value?.state === "running";
  useEffect(() => {
    if (!running) return undefined;
    const timer = setInterval(() => document.hidden || look((number) => number + 1), AGAIN_MS); // logs grow without a word of the server
    return () => clearInterval(timer);
  }, [running]);
  if (!value) return instead(problem, "reading the run", pieces(id));
  const stopped = value.stages.filter((stage) => STOPPED.includes(stage.status));
  return html`<h1>${pieces(value.run_id)}</h1>
    <p role="status"><span class=${`status ${COLOURS[value.state] ?? "cached"}`}>${running ? "◌ " : value.state === "completed" ? "✓ " : "✗ "}${value.state}</span> <span class="soft">${pieces(value.pipeline)}, started ${time(value.when)} UTC on ${pieces(value.host)}${value.seconds === null ? "" : `, took ${seconds(value.seconds)}`}${value.gone && html`; ${pieces(value.gone)}`}</span></p>
    <p><code>${pieces(value.command)}</code></p>
    <p><a href=${address("/buffer", { filter: `run_id = ${literal(value.run_id)}` })}>its rows</a> · <a href=${address("/doctor", { run: value.run_id })}>what the doctor says</a></p>
    ${stopped.map((stage) => html`<${Stopped} key=${stage.stage} stage=${stage} run=${value} />`)}
    ${lost.value && html`<p class="soft" role="status">the server does not answer; it is asked again each second …</p>`}
    <section aria-labelledby="stages"><h2 id="stages">Stages</h2>
    <${Lines} label="stages of the run" heads=${["stage", "uses", "status", "#took", "why, or how far"]}>
      ${value.stages.map((stage) => html`<${Line} key=${stage.stage} run=${value.run_id} stage=${stage} over=${!running} />`)}
    <//></section>
    ${value.stages.map((stage) => html`<${Shards} key=${stage.stage} stage=${stage} />`)}`;
}

/** @param {{run: string, stage: Stage, over: boolean}} props `over`: the run goes no further */
function Line({ run, stage, over }) {
  const { status, artifact, reasons, cause, warnings, live, curves, progress, log_tail: log } = stage;
  const colour = COLOURS[status] ?? "skipped";
  const since = status === "running" && stage.started ? (Date.now() - new Date(stage.started.replace(" ", "T")).getTime()) / 1000 : null;
  return html`<tr>
      <td>${artifact && stage.uses.startsWith("train.") ? html`<a href=${address("/training", { artifact })}>${pieces(stage.stage)}</a>` : curves ? html`<a href=${address("/training", { run, stage: stage.stage })}>${pieces(stage.stage)}</a>` : pieces(stage.stage)}</td>
      <td>${stage.uses}</td>
      <td class=${`status ${status === "run" && over ? "skipped" : colour}`}>${status === "run" ? (over ? "– not reached" : "▸ to run") : `${MARKS[status] ?? ""} ${status}`}</td>
      <td class="number">${stage.seconds === null ? (since !== null && since >= 0 ? `${seconds(since)} so far` : "") : seconds(stage.seconds)}</td>
      <td class="wraps">${status === "running" ? html`${farNow(run, stage.stage) || far(progress)} ` : STOPPED.includes(status) && progress ? html`stopped at ${far(progress, true)}${curves && html`, <a href=${address("/training", { run, stage: stage.stage })}>its curves</a>`}${cause || reasons.length ? "; " : ""}` : ""}${live ? html`<${Progress} run=${run} stage=${stage.stage} />` : pieces(cause || reasons.join("; "))}</td>
    </tr>
    ${warnings.map((warning) => html`<tr><td></td><td colspan="4" class="warning">warning: ${pieces(warning)}</td></tr>`)}
    ${log && status === "running" && html`<tr><td colspan="5"><details open><summary>last lines of the log of ${pieces(stage.stage)}</summary><pre class="log">${pieces(log)}</pre></details></td></tr>`}`;
}

/** The last step of a stage that trains now. @param {{run: string, stage: string}} props */
function Progress({ run, stage }) {
  const [curves] = useState(() => new LiveCurves(run, stage));
  usePulse(({ live }) => {
    const bytes = live[`${run}/${stage}`];
    if (bytes !== undefined) curves.need(bytes);
  });
  useEffect(() => () => curves.close(), []);
  curves.changed.value;
  const steps = curves.steps.length;
  const shown = [...curves.columns].slice(0, METRICS).map(([name, values]) => `${name} ${number(values[steps - 1])}`);
  return html`<a href=${address("/training", { run, stage })}>${count(steps)} ${steps === 1 ? "step" : "steps"}</a> <span class="soft">${shown.join(", ")}</span>`;
}
