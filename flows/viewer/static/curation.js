// What curation dropped: a funnel for each selection, and for each rule how many of the rows that it dropped had succeeded.
import { json, useAnswer } from "./api.js";
import { count, percent, plural, time } from "./format.js";
import { useKeys } from "./keys.js";
import { address, change, go, route, version } from "./location.js";
import { Empty, instead } from "./problem.js";
import { pieces } from "./text.js";
import { Lines, html, useEffect } from "./ui.js";

/** @typedef {import("./wire.js").Funnel} Funnel */
/** @typedef {import("./wire.js").FunnelLevel} Level */

export function CurationPage() {
  const { at, artifact, rule } = route.value.params;
  const { value, problem } = useAnswer((stop) => /** @type {Promise<import("./wire.js").Funnels>} */ (json("/api/curation", { at }, stop)), [at]);
  useEffect(() => void (value && (version.value = value.version === null ? null : String(value.version))), [value]);
  const rules = value ? value.funnels.flatMap((funnel) => funnel.levels.map((level) => ({ funnel, level }))) : [];
  const here = rules.findIndex((entry) => entry.funnel.artifact === artifact && entry.level.rule === rule);
  const step = (/** @type {number} */ by) => {
    const next = rules[Math.max(0, Math.min(rules.length - 1, here + by))];
    if (!next) return;
    change({ artifact: next.funnel.artifact, rule: next.level.rule });
    requestAnimationFrame(() => document.querySelector("tr.chosen")?.scrollIntoView({ block: "nearest" }));
  };
  const open = () => rules[here] && canOpen(rules[here].funnel, rules[here].level) && go(dropped(rules[here].funnel, rules[here].level, at));
  useKeys({
    j: { does: "next rule", run: () => step(1) },
    k: { does: "previous rule", run: () => step(-1) },
    Enter: { does: "the rows that the rule dropped", run: open },
  });
  if (problem || !value) return instead(problem, "reading the funnels", "Curation");
  if (!value.funnels.length) return html`<h1>Curation</h1><${Empty} says="No rows were curated yet. Rules in a file (docs/reference/buffer.md) narrow rows to a selection." command="agentrl buffer curate rules.yaml" />`;
  return html`<h1>Curation</h1>
    <p class="soft">Each rule keeps the blue rows of those that came to it, and drops the grey ones. Press a rule for the rows that it dropped.</p>
    ${value.funnels.map((funnel) => html`<${One} key=${funnel.artifact} funnel=${funnel} at=${at} chosen=${funnel.artifact === artifact ? rule : undefined} />`)}
    ${value.more > 0 && html`<p class="soft">and ${count(value.more)} older ones: <code>agentrl show STAGE/FINGERPRINT</code></p>`}`;
}

/** @param {Funnel} funnel @param {Level} level @param {string | undefined} at */
const dropped = (funnel, level, at) => address("/buffer", { among: funnel.artifact, rule: level.rule, at });

/** @param {Funnel} funnel @param {Level} level */
const canOpen = (funnel, level) => funnel.recorded && level.after < level.before;

/** @param {{funnel: Funnel, at: string | undefined, chosen: string | undefined}} props */
function One({ funnel, at, chosen }) {
  const { levels, artifact, recorded } = funnel;
  const [first, last] = [levels[0]?.before ?? funnel.kept, levels[levels.length - 1]?.after ?? funnel.kept];
  return html`<section aria-label=${artifact}>
    <h2>${artifact} <span class="soft">${funnel.uses}, ${time(funnel.when)}, ${plural(first, "row")} → <a href=${address("/buffer", { among: artifact, at })}>${plural(last, "row")}</a></span></h2>
    ${!recorded && html`<p class="soft">It did not record which rows it dropped. To have them, run the stage again: <code>${`agentrl run PIPELINE --force --only ${funnel.stage}`}</code></p>`}
    ${levels.length === 0 ? html`<p class="soft">It dropped no row.</p>` : html`<${Lines} kind="funnel" label=${`funnel of ${artifact}`} heads=${["rule", "of all rows", "#before", "#dropped", "#after", "#dropped that had succeeded", "#95 % interval"]}>
      ${levels.map((level) => html`<tr class=${chosen === level.rule ? "chosen" : ""}>
        <td class="wraps">${canOpen(funnel, level) ? html`<a href=${dropped(funnel, level, at)}>${pieces(level.rule)}</a>` : pieces(level.rule)}
          ${level.worry && html`<p class="bad">⚠ what it dropped had succeeded more often than what it kept</p>`}</td>
        <td class="scale"><${Bar} level=${level} whole=${first} /></td>
        <td class="number">${count(level.before)}</td><td class="number">${count(level.before - level.after)}</td><td class="number">${count(level.after)}</td>
        <td class="number">${level.n ? `${count(level.successes)} of ${count(level.n)}, ${percent(level.successes / level.n)}` : "–"}</td>
        <td class="number">${level.low === null || level.high === null ? "–" : `${percent(level.low)} to ${percent(level.high)}`}</td>
      </tr>`)}
    <//>`}
  </section>`;
}

/** What comes to a rule, centred, so that the bars of a funnel narrow. @param {{level: Level, whole: number}} props */
function Bar({ level, whole }) {
  const share = (/** @type {number} */ rows) => (100 * rows) / Math.max(1, whole);
  const [before, after] = [share(level.before), share(level.after)];
  return html`<svg class="level" width="100%" height="16" aria-hidden="true">
    <rect class="lost" x=${`${(50 - before / 2).toFixed(2)}%`} width=${`${before.toFixed(2)}%`} height="16" />
    <rect class="kept" x=${`${(50 - after / 2).toFixed(2)}%`} width=${`${after.toFixed(2)}%`} height="16" />
  </svg>`;
}
