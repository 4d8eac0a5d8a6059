// Training: metrics by step with the doctor's bounds, live if a stage trains now, and the rows that a step learned from.
import { arrow, json, useAnswer } from "./api.js";
import { Chart, number, Smoothing } from "./chart.js";
import { Curves, LiveCurves } from "./curves.js";
import { count, plural, time } from "./format.js";
import { useKeys } from "./keys.js";
import { lost, useChanges, usePulse } from "./live.js";
import { address, change, route, version } from "./location.js";
import { Empty, instead, Problem } from "./problem.js";
import { farNow, Stopped } from "./progress.js";
import { Step } from "./step.js";
import { pieces } from "./text.js";
import { theme } from "./theme.js";
import { effect, html, Lines, useEffect, useMemo, useState } from "./ui.js";

/** @typedef {import("./wire.js").TrainingStage} Stage */

const LINES = 50;
const WHOLE = -1; // no log has this length: all of it is asked for

/** @param {Stage} stage */
const link = ({ artifact, run_id, stage }) => address("/training", artifact ? { artifact } : { run: run_id, stage });

export function TrainingPage() {
  const { artifact, run, stage } = route.value.params;
  const changes = useChanges((now) => [now.runs, now.stages, Object.keys(now.live)]);
  const { value, problem } = useAnswer((stop) => /** @type {Promise<import("./wire.js").TrainingStages>} */ (json("/api/training", {}, stop)), [changes]);
  useEffect(() => void (version.value = null), []);
  useKeys({
    j: { does: "next step", run: () => move(1) },
    k: { does: "previous step", run: () => move(-1) },
  });
  if (!value) return instead(problem, "reading the store", "Training");
  const { stages } = value;
  if (!stages.length) return html`<h1>Training</h1><${Empty} says="No stage has trained yet." command="agentrl run quickstart" />`;
  const fits = (/** @type {Stage} */ listed) =>
    artifact ? listed.artifact !== null && artifact.startsWith(listed.artifact) : run ? listed.run_id === run && listed.stage === stage : true;
  const shown = stages.find(fits);
  return html`<h1>Training</h1>
    <details open=${!shown || !(artifact || run)}><summary>${plural(stages.length, "stage")} that trained</summary><${List} stages=${stages} shown=${shown} /></details>
    ${shown ? html`<${Shown} key=${link(shown)} stage=${shown} />` : html`<p class="problem">${pieces(artifact ?? `${run}/${stage}`)} trained nothing, or is not in this store any more.</p>`}`;
}

/** @type {{curves: Curves | null}} what is shown, for the keys */
const now = { curves: null };

/** @param {number} by */
function move(by) {
  const steps = now.curves?.steps ?? [];
  const here = steps.indexOf(Number(route.value.params.step ?? NaN));
  const next = here < 0 ? (by > 0 ? 0 : steps.length - 1) : here + by;
  if (next >= 0 && next < steps.length) change({ step: steps[next] });
}

/** @param {{stages: Stage[], shown: Stage | undefined}} props */
function List({ stages, shown }) {
  return html`<${Lines} label="stages that trained" heads=${["stage", "uses", "run", "when (UTC)", "#steps"]}>
      ${stages.map((listed) => html`<tr class=${listed === shown ? "chosen" : ""}>
      <td><a href=${link(listed)} aria-current=${listed === shown ? "true" : undefined}>${pieces(listed.artifact ?? listed.stage)}</a></td>
      <td>${listed.uses && html`${pieces(listed.uses)} `}${listed.artifact ? "" : listed.ended ? html`<span class=${`status ${listed.ended}`}>✗ ${listed.ended}</span>` : html`<span class="status running">◌ trains now</span>`}</td>
      <td><a href=${`/run/${encodeURIComponent(listed.run_id)}`}>${pieces(listed.run_id)}</a></td>
      <td>${time(listed.when)}</td>
      <td class="number">${listed.artifact ? count(listed.steps) : ""}</td>
    </tr>`)}
    <//>`;
}

/** @param {{stage: Stage}} props */
function Shown({ stage }) {
  return stage.artifact ? html`<${AtRest} stage=${stage} />` : html`<${Live} stage=${stage} />`;
}

/** @param {{stage: Stage}} props */
function AtRest({ stage }) {
  const { value, problem } = useAnswer(async (stop) => Curves.of((await arrow("/api/training/metrics", { artifact: stage.artifact }, stop)).table), [stage.artifact]);
  if (problem || !value) return instead(problem, "reading the metrics");
  return html`<${Charts} stage=${stage} curves=${value} />`;
}

/** @param {{stage: Stage}} props */
function Live({ stage }) {
  const [curves] = useState(() => new LiveCurves(stage.run_id, stage.stage));
  const [names, setNames] = useState("");
  usePulse(({ live }) => {
    const bytes = live[`${stage.run_id}/${stage.stage}`];
    if (bytes !== undefined) curves.need(bytes);
  });
  useEffect(() => void (stage.ended && curves.need(WHOLE)), [stage.ended]);
  useEffect(() => () => curves.close(), []);
  useEffect(() => effect(() => {
    curves.changed.value;
    setNames([...curves.columns.keys()].join());
  }), []);
  return html`${stage.ended && html`<${Ended} stage=${stage} />`}
    ${lost.value && html`<p class="soft" role="status">the server does not answer; it is asked again each second …</p>`}
    ${names ? html`<${Charts} stage=${stage} curves=${curves} />` : html`<p class="soft waiting">${stage.ended ? "no step was taken" : "waiting for the first step …"}</p>`}`;
}

/** Why a stage ended without an artifact, and how to go on. @param {{stage: Stage}} props */
function Ended({ stage }) {
  const { value } = useAnswer((stop) => /** @type {Promise<import("./wire.js").RunAnswer>} */ (json("/api/run", { run: stage.run_id }, stop)), [stage.run_id, stage.ended]);
  const own = value?.stages.find((other) => other.stage === stage.stage);
  return value && own ? html`<${Stopped} stage=${own} run=${value} />` : null;
}

/** @param {{stage: Stage, curves: Curves}} props */
function Charts({ stage, curves }) {
  const { step: wanted, at } = route.value.params;
  const step = wanted === undefined ? null : Number(wanted);
  useEffect(() => {
    now.curves = curves;
    return () => void (now.curves = null);
  }, [curves]);
  const choose = (/** @type {number} */ chosen) => change({ step: chosen });
  return html`<section aria-labelledby="charts">
      <h2 id="charts">${pieces(stage.artifact ?? stage.stage)} <span class="soft">${stage.artifact ? pieces(stage.uses) : (stage.ended ?? `trains now${farNow(stage.run_id, stage.stage) && `, ${farNow(stage.run_id, stage.stage)}`}`)}; press a step in a chart, or j and k</span></h2>
      <${ChartGrid} stage=${stage} curves=${curves} step=${step} choose=${choose} />
      <${Numbers} curves=${curves} step=${step} choose=${choose} />
    </section>
    ${step !== null && html`<${Step} key=${step} artifact=${stage.artifact} step=${step} at=${at} />`}`;
}

/** The same numbers as a table, some steps of them at a time. @param {{curves: Curves, step: number | null, choose: (step: number) => void}} props */
function Numbers({ curves, step, choose }) {
  const [open, setOpen] = useState(false);
  return html`<details class="numbers" onToggle=${(/** @type {Event} */ event) => setOpen(/** @type {HTMLDetailsElement} */ (event.target).open)}>
    <summary>as a table</summary>${open && html`<${Steps} curves=${curves} step=${step} choose=${choose} />`}
  </details>`;
}

/** @param {{curves: Curves, step: number | null, choose: (step: number) => void}} props */
function Steps({ curves, step, choose }) {
  curves.changed.value; // live ones grow
  const total = curves.steps.length;
  const [start, setStart] = useState(() => Math.max(0, Math.min(total - LINES, step === null ? total : curves.place(step) - LINES / 2)));
  const first = Math.floor(start);
  const rows = curves.steps.slice(first, first + LINES);
  return html`<p>steps ${rows[0] ?? "–"} to ${rows[rows.length - 1] ?? "–"} of ${count(total)}
      <button disabled=${first === 0} onClick=${() => setStart(Math.max(0, first - LINES))}>earlier</button> <button disabled=${first + LINES >= total} onClick=${() => setStart(first + LINES)}>later</button></p>
    <${Lines} label="metrics by step" heads=${["step", ...[...curves.columns.keys()].map((name) => `#${name}`)]}>
      ${rows.map((row, i) => html`<tr class=${row === step ? "chosen" : ""}>
      <td><button class="quiet" aria-pressed=${row === step ? "true" : "false"} onClick=${() => choose(row)}>${row}</button></td>
      ${[...curves.columns.values()].map((values) => html`<td class="number">${number(values[first + i])}</td>`)}
    </tr>`)}
    <//>`;
}

const MOST = 4; // stages over the one that is shown

/** Artifacts whose curves are drawn over those of the stage. @returns {string[]} */
const over = () => (route.value.params.over ?? "").split(",").filter(Boolean);

/** @param {{stage: Stage, curves: Curves, step: number | null, choose: (step: number) => void}} props */
function ChartGrid({ stage, curves, step, choose }) {
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
