// The curves of a stage, those of other stages over them, and what never changes in a line.
import { arrow, json, useAnswer } from "./api.js";
import { Chart, Smoothing, number } from "./chart.js";
import { Curves } from "./curves.js";
import { change, route } from "./location.js";
import { Problem } from "./problem.js";
import { pieces } from "./text.js";
import { theme } from "./theme.js";
import { html, useMemo } from "./ui.js";

/** @typedef {import("./wire.js").TrainingStage} Stage */

const MOST = 4; // stages over the one that is shown

/** Artifacts whose curves are drawn over those of the stage. @returns {string[]} */
const over = () => (route.value.params.over ?? "").split(",").filter(Boolean);

/** @param {{stage: Stage, curves: Curves, step: number | null, choose: (step: number) => void}} props */
export function ChartGrid({ stage, curves, step, choose }) {
  const names = over();
  const listed = useAnswer((stop) => /** @type {Promise<import("./wire.js").TrainingStages>} */ (json("/api/training", { beside: true }, stop)), []);
  const stages = (listed.value?.stages ?? []).filter((other) => other.artifact && other.artifact !== stage.artifact && !names.includes(other.artifact));
  const { value, problem } = useAnswer((stop) => Promise.all(names.map(async (artifact) => Curves.of((await arrow("/api/training/metrics", { artifact }, stop)).table))), [names.join()]);
  const others = useMemo(() => value ?? [], [value]);
  curves.changed.value;
  const metrics = [...curves.columns.keys()];
  const constant = others.length ? [] : metrics.filter((name) => curves.constant(name) !== null && !stage.bands.some((band) => band.metric === name));
  return html`<div class="what-if"><${Smoothing} /> <span class="soft">drag over a chart to look closer, double click to see all</span>
      ${stages.length > 0 && html`<label>compare with <select onChange=${(/** @type {Event} */ event) => change({ over: [...names, /** @type {HTMLSelectElement} */ (event.target).value].slice(-MOST).join(",") })}>
        <option value="" selected>a stage</option>${stages.map((other) => html`<option value=${other.artifact}>${other.artifact}</option>`)}</select></label>`}
      ${names.map((name, i) => html`<span class="tag"><span class=${`key line-${i % MOST}`}>━</span> ${pieces(name)} <button class="quiet" aria-label=${`without ${name}`} onClick=${() => change({ over: names.filter((other) => other !== name).join(",") })}>✗</button></span>`)}
    </div>
    ${problem && html`<${Problem} problem=${problem} />`}
    <div class="charts">${metrics.filter((name) => !constant.includes(name)).map((name) => html`<${Chart} key=${name} name=${name} curves=${curves} others=${others}
      bands=${stage.bands.filter((band) => band.metric === name)} step=${step} choose=${choose} theme=${theme.value} />`)}</div>
    ${constant.length > 0 && html`<p class="soft">the same at every step: ${constant.map((name, i) => html`${i ? ", " : ""}${name} <b>${number(curves.constant(name))}</b>`)}</p>`}`;
}
