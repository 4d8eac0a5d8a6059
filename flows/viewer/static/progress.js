// How far stages are, and what stopped: said at the top of every page, and wherever a stage is named.
import { count, plural, seconds } from "./format.js";
import { pulse, usePulse } from "./live.js";
import { OfStore } from "./problem.js";
import { pieces } from "./text.js";
import { Lines, html } from "./ui.js";

/** @typedef {import("./wire.js").StageProgress} Progress */

/** Statuses of a stage, or of a run, that was not done when it ended. */
export const STOPPED = ["failed", "killed", "cancelled"];
const SHOWN = 2;
const MARK = /** @type {Record<string, string>} */ ({ waiting: "▸", running: "◌", slow: "◌", "set aside": "✗" });
/** The colour of a shard's state, by the status of a stage that has it. */
const SHARD = /** @type {Record<string, string>} */ ({ waiting: "run", running: "running", slow: "running", "set aside": "failed" });

/** @param {Progress | null | undefined} progress @param {boolean} [over] of a stage that goes no further */
export function far(progress, over = false) {
  if (!progress) return "";
  const of = progress.total === null ? count(progress.done) : `${count(progress.done)} of ${count(progress.total)}`;
  return progress.left_s === null || over ? of : `${of}, ${seconds(progress.left_s)} left`;
}

/** How far a stage at work is, as the server said it last. @param {string} run @param {string} stage */
export const farNow = (run, stage) => far(pulse.value?.progress[`${run}/${stage}`]);

/** Runs at work and runs that stopped, for every page: each leads to its run. */
export function Status() {
  usePulse(() => {});
  const now = pulse.value;
  if (!now) return null;
  const working = Object.entries(now.stages).filter(([, status]) => status === "running").map(([name]) => name);
  const stopped = now.stopped.slice(0, SHOWN);
  return html`<div class="now" role="status">
    ${working.slice(0, SHOWN).map((name) => {
      const [run, stage] = [name.slice(0, name.indexOf("/")), name.slice(name.indexOf("/") + 1)];
      return html`<a class="status running" href=${`/run/${encodeURIComponent(run)}`}>◌ ${pieces(stage)} ${farNow(run, stage) || "running"}</a>`;
    })}
    ${working.length > SHOWN && html`<span class="soft">and ${count(working.length - SHOWN)} more at work</span>`}
    ${stopped.map((stage) => html`<a class="status failed" href=${`/run/${encodeURIComponent(stage.run_id)}`}>✗ ${pieces(stage.stage ?? stage.run_id)} of ${pieces(stage.pipeline)} ${stage.state}</a>`)}
    ${now.stopped.length > SHOWN && html`<a class="status failed" href="/">and ${count(now.stopped.length - SHOWN)} more stopped</a>`}
  </div>`;
}

/** What the shards of a stage do that are not done: who is at them, for how long, and why they were set aside. @param {{stage: import("./wire.js").RunStage}} props */
export function Shards({ stage: { stage, status, shards } }) {
  if (!shards) return null;
  return html`<section class="shards" aria-label=${`shards of ${stage}`}><h2>Shards of ${pieces(stage)}${status === "running" ? "" : ", as it was last heard of"}</h2>
    <p>${pieces(shards.text)}</p>
    ${shards.shards.length > 0 && html`<${Lines} label=${`shards of ${stage} that are not done`} heads=${["shard", "state", "worker", "#at it for", "why"]}>
      ${shards.shards.map(({ shard, state, worker, seconds: took, problem }, row) => html`<tr key=${row}>
        <td>${pieces(shard)}</td><td class=${`status ${SHARD[state] ?? ""}`}>${MARK[state] ?? ""} ${state}</td><td>${pieces(worker)}</td>
        <td class="number">${took === null ? "" : seconds(took)}</td><td class="wraps">${pieces(problem)}</td></tr>`)}
    <//>`}
    ${shards.more > 0 && html`<p class="soft">and ${count(shards.more)} more that are not done</p>`}</section>`;
}

/** Why a stage stopped and how far it came, the command that goes on, and the end of its log. @param {{stage: import("./wire.js").RunStage, run: import("./wire.js").RunAnswer}} props */
export function Stopped({ stage, run }) {
  const { status, cause, progress, log, log_tail: tail } = stage;
  const why = cause || (status === "killed" ? run.gone : "");
  return html`<div class="stopped">
    <p class="status failed">✗ ${pieces(stage.stage)} ${status}${progress ? ` at ${far(progress, true)}` : ""}${why && html`: ${pieces(why)}`}</p>
    ${run.go_on && html`<p>go on: <${OfStore} command=${run.go_on} /></p>`}
    ${tail
      ? html`<details open><summary>last ${plural(tail.split("\n").length, "line")} of its log <code>${pieces(log)}</code></summary><pre class="log" tabindex="0" role="region" aria-label=${`log of ${stage.stage}`}>${pieces(tail)}</pre></details>`
      : html`<p class="soft">${log ? html`It printed nothing: <code>${pieces(log)}</code> is empty.` : `Its log is not on this machine; it ran on ${run.host}.`}</p>`}
  </div>`;
}
