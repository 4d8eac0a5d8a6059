// The stages of a pipeline as a graph. The server lays it out: x is the column and y the row of a stage.
import { seconds } from "./format.js";
import { address } from "./location.js";
import { html } from "./ui.js";

/** @typedef {import("./wire.js").StageBox} StageBox */

const BOX = { width: 152, height: 40, gapX: 44, gapY: 16, margin: 8 };
/** @type {Record<string, string>} */
const MARKS = { cached: "✓", run: "▸", blocked: "✗", skipped: "–", running: "◌", planning: "…" };
/** @type {Record<string, string>} */
const WORDS = { cached: "up to date", run: "will run", blocked: "blocked", skipped: "skipped", running: "running", planning: "being planned" };

/** @param {StageBox} stage */
const left = (stage) => BOX.margin + stage.x * (BOX.width + BOX.gapX);
/** @param {StageBox} stage */
const top = (stage) => BOX.margin + stage.y * (BOX.height + BOX.gapY);

/**
 * @param {{stages: StageBox[], chosen: string | undefined, choose: (id: string | null) => void}} props
 */
export function Graph({ stages, chosen, choose }) {
  const byId = new Map(stages.map((stage) => [stage.id, stage]));
  const width = Math.max(...stages.map(left)) + BOX.width + BOX.margin;
  const height = Math.max(...stages.map(top)) + BOX.height + BOX.margin;
  return html`<div class="graph" tabindex="0" role="region" aria-label="graph of the stages">
    <svg width=${width} height=${height} viewBox=${`0 0 ${width} ${height}`} role="group" aria-label="stages, and what each one reads">
      ${stages.flatMap((stage) =>
        stage.inputs.map((input) => {
          const from = byId.get(input.stage);
          return from && html`<${Edge} from=${from} to=${stage} reason=${input.reason} lit=${chosen === stage.id || chosen === from.id} />`;
        }),
      )}
      ${stages.map((stage) => html`<${Box} stage=${stage} chosen=${chosen === stage.id} choose=${choose} />`)}
    </svg>
  </div>`;
}

/** @param {{from: StageBox, to: StageBox, reason: string | null, lit: boolean}} props */
function Edge({ from, to, reason, lit }) {
  const [x1, y1] = [left(from) + BOX.width, top(from) + BOX.height / 2];
  const [x2, y2] = [left(to), top(to) + BOX.height / 2];
  const bend = Math.max(24, (x2 - x1) / 2);
  return html`<path class=${`edge${reason ? " causes" : ""}${lit ? " lit" : ""}`} d=${`M${x1},${y1} C${x1 + bend},${y1} ${x2 - bend},${y2} ${x2},${y2}`}>
    <title>${`${from.stage} → ${to.stage}${reason ? `: ${reason}` : ""}`}</title>
  </path>`;
}

/** @param {{stage: StageBox, chosen: boolean, choose: (id: string | null) => void}} props */
function Box({ stage, chosen, choose }) {
  const press = () => choose(chosen ? null : stage.id);
  const label = `${stage.stage} ${stage.uses}: ${WORDS[stage.status]}${stage.reason ? `, ${stage.reason}` : ""}`;
  return html`<g class=${`box ${stage.status}${chosen ? " chosen" : ""}`} transform=${`translate(${left(stage)} ${top(stage)})`}
      role="button" tabindex="0" aria-label=${label} aria-pressed=${chosen ? "true" : "false"} onClick=${press}
      onKeyDown=${(/** @type {KeyboardEvent} */ event) => {
        if (event.key !== "Enter" && event.key !== " ") return;
        event.preventDefault();
        event.stopPropagation();
        press();
      }}>
    <title>${label}</title>
    <rect width=${BOX.width} height=${BOX.height} />
    <rect class="rule" width="3" height=${BOX.height} />
    <svg x="12" width=${BOX.width - 30} height=${BOX.height}><text class="name" y="17">${stage.stage}</text></svg>
    <text class="mark" x=${BOX.width - 16} y="17" aria-hidden="true">${MARKS[stage.status]}</text>
    <svg x="12" width=${BOX.width - 16} height=${BOX.height}><text class="kind" y="32">${stage.uses}</text></svg>
  </g>`;
}

/** The same as a table, with the reasons in full. @param {{stages: StageBox[], chosen: string | undefined, pipeline: string | null}} props */
export function StageTable({ stages, chosen, pipeline }) {
  return html`<table class="lines">
    <thead><tr><th>stage</th><th>uses</th><th>status</th><th class="number">took</th><th>reads</th><th>why</th><th>rows</th></tr></thead>
    <tbody>
      ${stages.map(
        (stage) => html`<tr class=${chosen === stage.id ? "chosen" : ""}>
          <td>${stage.stage}</td>
          <td>${stage.uses}</td>
          <td class=${`status ${stage.status}`}>${MARKS[stage.status]} ${WORDS[stage.status]}</td>
          <td class="number">${seconds(stage.seconds)}</td>
          <td>${stage.inputs.map((input) => input.stage).join(", ")}</td>
          <td>${[stage.reason, ...stage.inputs.filter((input) => input.reason).map((input) => `${input.stage}: ${input.reason}`)].filter(Boolean).join("; ")}</td>
          <td><a href=${address("/buffer", { filter: rowsOf(stage, pipeline) })} aria-label=${`rows of ${stage.stage}`}>rows</a></td>
        </tr>`,
      )}
    </tbody>
  </table>`;
}

/** @param {StageBox} stage @param {string | null} pipeline */
function rowsOf(stage, pipeline) {
  const quoted = (/** @type {string} */ text) => `'${text.replaceAll("'", "''")}'`;
  return `stage = ${quoted(stage.stage)}${pipeline ? ` and pipeline = ${quoted(pipeline)}` : ""}`;
}
