// Where a row comes from and what learned from it: stage, model, the artifacts before it, the steps after it.
import { literal } from "./filter.js";
import { plural, short } from "./format.js";
import { address } from "./location.js";
import { pieces } from "./text.js";
import { html } from "./ui.js";

/** @param {{lineage: import("./wire.js").Made}} props */
export function Ribbon({ lineage }) {
  const { made_by: maker, policy, learned_by: learners } = lineage;
  const rows = `stage = ${literal(maker.stage)} and fingerprint = ${literal(maker.fingerprint)}`;
  return html`<nav class="ribbon" aria-label="lineage">
    ${maker.inputs.length > 0 && html`<span class="soft">${maker.inputs.map(shortened).join(", ")} →</span>`}
    <span class="soft">${policy.stage ? "model" : "by"}</span>
    <a href=${address("/buffer", { filter: `policy = ${literal(policy.name)}` })}>${pieces(policy.name || "unnamed")}</a>
    <span class="soft">version ${policy.version}${policy.learned_from.length > 0 && html` (learned from ${policy.learned_from.map((source, i) => html`${i ? ", " : ""}<a href=${source.kind === "rows" ? address("/buffer", { among: source.artifact }) : address("/pair", { artifact: source.artifact })}>${source.kind} of ${shortened(source.artifact)}</a>`)})`} →</span>
    <a href=${address("/buffer", { filter: rows })} title=${maker.uses}>${pieces(maker.stage || "outside")}${maker.fingerprint && `/${short(maker.fingerprint)}`}</a>
    <span class="soft">→</span> <b>this row</b> <span class="soft">→</span>
    ${learners.length
      ? learners.map((learner) => html`<span>${learner.stage}/${short(learner.fingerprint)} <span class="soft">${steps(learner)}${models(learner)}</span></span>`)
      : html`<span class="soft">no stage learned from it</span>`}
  </nav>`;
}

/** @param {string} artifact STAGE/FINGERPRINT */
function shortened(artifact) {
  const [stage, fingerprint = ""] = artifact.split("/");
  return `${stage}/${short(fingerprint)}`;
}

/** Models that were trained on it, if another stage than the learner holds them. @param {import("./wire.js").LearnedBy} learner */
function models({ stage, fingerprint, models: names }) {
  const others = names.filter((name) => name !== `${stage}/${short(fingerprint)}`);
  return others.length ? ` → ${others.map(shortened).join(", ")}` : "";
}

/** The steps that learned from the row, each a link. @param {import("./wire.js").LearnedBy} learner */
function steps({ stage, fingerprint, steps: numbers }) {
  if (!numbers.length) return "(steps not recorded)";
  const link = (/** @type {number} */ step) => html`<a href=${address("/training", { artifact: `${stage}/${short(fingerprint)}`, step })}>${step}</a>`;
  if (numbers.length > 6) return html`${plural(numbers.length, "step")}, ${link(numbers[0])} to ${link(numbers[numbers.length - 1])}`;
  return html`step ${numbers.map((step, i) => html`${i ? ", " : ""}${link(step)}`)}`;
}
