// "Replay with ...": a step computed again by the server, with other settings, beside what was recorded.
import { json, post, useAnswer } from "./api.js";
import { number } from "./chart.js";
import { copy } from "./keys.js";
import { useUnfinished } from "./live.js";
import { Problem } from "./problem.js";
import { pieces } from "./text.js";
import { Wide, html, useState } from "./ui.js";

/** @typedef {import("./wire.js").ReplayAnswer} Answer */

/** @param {string} text one setting in each line */
const settingsOf = (text) => text.split("\n").map((line) => line.trim()).filter(Boolean);

/** @param {{artifact: string, step: number}} props */
export function Replay({ artifact, step }) {
  const [text, setText] = useState("");
  const [asked, ask] = useState(0);
  const [refused, setRefused] = useState(/** @type {Error | null} */ (null));
  const writing = useAnswer((stop) => /** @type {Promise<import("./wire.js").Writing>} */ (json("/api/writing", {}, stop)), []);
  const { value, problem } = useAnswer((stop) => /** @type {Promise<import("./wire.js").Replayings>} */ (json("/api/replay", { artifact, step }, stop)), [artifact, step, asked]);
  const replays = value?.replays ?? [];
  const working = replays.some((replay) => replay.working);
  useUnfinished(value, working, () => ask((number) => number + 1));
  const settings = settingsOf(text);
  const send = (/** @type {string} */ path, /** @type {object} */ body) =>
    post(path, body).then(() => setRefused(null), setRefused).then(() => ask((number) => number + 1));
  const command = `agentrl replay ${artifact} --step ${step}${settings.map((setting) => ` --set '${setting.replaceAll("'", "'\\''")}'`).join("")}`;
  const allowed = Boolean(writing.value?.key);
  return html`<h3>Replay</h3>
    <p class="soft">The step is computed again from what was recorded, with other settings if there are some: one in each line, such as algorithm.clip_high=0.3, algorithm.type=rloo or rewards.exact_match=0.5.</p>
    <div class="replay">
      <textarea rows="2" aria-label="replay with these settings" spellcheck=${false} value=${text} onInput=${(/** @type {Event} */ event) => setText(/** @type {HTMLTextAreaElement} */ (event.target).value)}></textarea>
      <button disabled=${!allowed || working} onClick=${() => send("/api/replay", { artifact, step, set: settings })}>replay${settings.length ? " with them" : ""}</button>
      ${working && html`<button onClick=${() => send("/api/replay/stop", {})}>stop</button>`}
      <button class="quiet" onClick=${() => copy(command, "command")}>copy the command</button>
    </div>
    ${writing.value && !allowed && html`<p class="soft">This viewer only reads. To replay from here, start it by <code>agentrl view --write</code>; or run <code>${command}</code>.</p>`}
    ${(refused ?? problem) && html`<${Problem} problem=${refused ?? problem} />`}
    ${replays.length > 0 && html`<${Beside} replays=${replays} />`}`;
}

/** @param {Answer} replay */
const label = (replay) => (replay.settings.length ? replay.settings.join(", ") : "as recorded");

/** What was recorded, and each replay beside it. @param {{replays: Answer[]}} props */
function Beside({ replays }) {
  const done = replays.filter((replay) => !replay.working && replay.problem === null);
  const metrics = [...new Set(done.flatMap((replay) => Object.keys(replay.replayed)))];
  return html`<div role="status">${replays.map((replay) =>
      replay.working ? html`<p class="soft">computing ${pieces(label(replay))} … ${Math.round(replay.seconds)} s</p>`
        : replay.problem !== null ? html`<p class="problem">${pieces(label(replay))}: ${pieces(replay.problem)}</p>`
        : !replay.settings.length && html`<p class=${replay.equal ? "good" : "bad"}>${replay.equal ? "✓ equal to what was recorded" : "✗ not equal: other hardware, threads or library versions?"}</p>`)}</div>
    ${done.length > 0 && html`<${Wide} label="recorded and replayed"><table class="lines">
      <thead><tr><th>metric</th><th class="number">recorded</th>${done.map((replay) => html`<th class="number">${pieces(label(replay))}</th>`)}</tr></thead>
      <tbody>${metrics.map((name) => html`<tr><th scope="row">${name}</th><td class="number">${number(done.find((replay) => name in replay.recorded)?.recorded[name])}</td>
        ${done.map((replay) => html`<td class="number">${exact(replay, name)}</td>`)}</tr>`)}</tbody>
    </table><//>`}`;
}

/** The number, with a sign if it is the recorded one to the last digit. @param {Answer} replay @param {string} name */
function exact(replay, name) {
  const [before, after] = [replay.recorded[name], replay.replayed[name]];
  return html`${number(after)}${after !== undefined && after !== null && before === after ? html` <span class="good" title="equal to the last digit">=</span>` : ""}`;
}
