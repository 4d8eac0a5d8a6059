// The stages of a pipeline as a graph. The server lays it out: x is the column and y the row of a stage.
import { literal } from "./filter.js";
import { seconds } from "./format.js";
import { address } from "./location.js";
import { Lines, html, useLayoutEffect, useRef, useState } from "./ui.js";

/** @typedef {import("./wire.js").StageBox} StageBox */

const BOX = { width: 152, height: 40, gapX: 44, gapY: 16, gapDown: 28, margin: 8 };
const WIDEST = 232;
/** @type {Record<string, string>} */
const MARKS = { cached: "✓", run: "▸", blocked: "✗", skipped: "–", running: "◌", planning: "…", failed: "✗", killed: "✗", cancelled: "✗" };
/** @type {Record<string, string>} */
const WORDS = { cached: "up to date", run: "will run", blocked: "blocked", skipped: "skipped", running: "running", planning: "being planned", failed: "failed", killed: "killed", cancelled: "cancelled" };
/** What wants to be seen, in this order. */
const URGENT = ["failed", "killed", "cancelled", "blocked", "running", "run"];
/** A graph is drawn smaller to fit the page, but no smaller than this. */
const SMALLEST = 0.55;

/** @typedef {{left: number, top: number, width: number}} Place */

/** Where each stage is drawn: columns from left to right, or on a narrow page from top to bottom, where boxes may be wide. @param {StageBox[]} stages @param {boolean} down */
function places(stages, down) {
  const longest = Math.max(...stages.map((stage) => stage.stage.length));
  const width = down ? Math.min(WIDEST, Math.max(BOX.width, 38 + 8 * longest)) : BOX.width;
  const [stepX, stepY] = down ? [width + BOX.gapY, BOX.height + BOX.gapDown] : [width + BOX.gapX, BOX.height + BOX.gapY];
  /** @type {Map<string, Place>} */
  const boxes = new Map(stages.map((stage) => [stage.id, { left: BOX.margin + (down ? stage.y : stage.x) * stepX, top: BOX.margin + (down ? stage.x : stage.y) * stepY, width }]));
  const all = [...boxes.values()];
  return { boxes, width: Math.max(...all.map((box) => box.left)) + width + BOX.margin, height: Math.max(...all.map((box) => box.top)) + BOX.height + BOX.margin };
}

/** @param {{stages: StageBox[], chosen: string | undefined, choose: (id: string | null) => void, far: (stage: string) => string}} props `far` says how far a stage at work is */
export function Graph({ stages, chosen, choose, far }) {
  const box = useRef(/** @type {HTMLElement | null} */ (null));
  const [room, setRoom] = useState(0);
  useLayoutEffect(() => {
    const element = /** @type {HTMLElement} */ (box.current);
    const watch = new ResizeObserver(() => setRoom(element.clientWidth));
    setRoom(element.clientWidth);
    watch.observe(element);
    return () => watch.disconnect();
  }, []);
  const byId = new Map(stages.map((stage) => [stage.id, stage]));
  const [across, along] = [places(stages, false), places(stages, true)];
  const down = room > 0 && across.width > room && along.width < across.width && room / across.width < 0.8;
  const { boxes, width, height } = down ? along : across;
  const scale = room ? Math.max(SMALLEST, Math.min(1, room / width)) : 1;
  const boxOf = (/** @type {StageBox} */ stage) => /** @type {Place} */ (boxes.get(stage.id));
  return html`<${Urgent} stages=${stages} choose=${choose} far=${far} />
  <div class="graph" tabindex="0" role="region" aria-label="graph of the stages" ref=${box}>
    <svg width=${Math.floor(width * scale)} height=${Math.ceil(height * scale)} viewBox=${`0 0 ${width} ${height}`} role="group" aria-label="stages, and what each one reads">
      ${stages.flatMap((stage) =>
        stage.inputs.map((input) => {
          const from = byId.get(input.stage);
          return from && html`<${Edge} from=${from} to=${stage} start=${boxOf(from)} end=${boxOf(stage)} down=${down} reason=${input.reason} lit=${chosen === stage.id || chosen === from.id} />`;
        }),
      )}
      ${stages.map((stage) => html`<${Box} stage=${stage} at=${boxOf(stage)} chosen=${chosen === stage.id} choose=${choose} far=${stage.status === "running" ? far(stage.id) : ""} />`)}
    </svg>
  </div>`;
}

/** What failed, runs, and would run, above the graph, so that it is in view wherever the graph has it. @param {{stages: StageBox[], choose: (id: string) => void, far: (stage: string) => string}} props */
function Urgent({ stages, choose, far }) {
  const kinds = URGENT.map((status) => ({ status, members: stages.filter((stage) => stage.status === status) })).filter((kind) => kind.members.length);
  return kinds.length > 0 && html`<p class="urgent">${kinds.map(({ status, members }) => html`<span class=${`status ${status}`}>${MARKS[status]} ${WORDS[status]}: ${members.map((stage, i) => html`${i ? ", " : ""}<button class="quiet" onClick=${() => choose(stage.id)}>${stage.stage}</button>${status === "running" && far(stage.id) ? ` (${far(stage.id)})` : ""}`)}</span>`)}</p>`;
}

/** @param {{from: StageBox, to: StageBox, start: Place, end: Place, down: boolean, reason: string | null, lit: boolean}} props */
function Edge({ from, to, start, end, down, reason, lit }) {
  const [x1, y1] = down ? [start.left + start.width / 2, start.top + BOX.height] : [start.left + start.width, start.top + BOX.height / 2];
  const [x2, y2] = down ? [end.left + end.width / 2, end.top] : [end.left, end.top + BOX.height / 2];
  const bend = Math.max(24, (down ? y2 - y1 : x2 - x1) / 2);
  const bends = down ? `${x1},${y1 + bend} ${x2},${y2 - bend}` : `${x1 + bend},${y1} ${x2 - bend},${y2}`;
  return html`<path class=${`edge${reason ? " causes" : ""}${lit ? " lit" : ""}`} d=${`M${x1},${y1} C${bends} ${x2},${y2}`}>
    <title>${`${from.stage} → ${to.stage}${reason ? `: ${reason}` : ""}`}</title>
  </path>`;
}

/** @param {{stage: StageBox, at: Place, chosen: boolean, choose: (id: string | null) => void, far: string}} props */
function Box({ stage, at, chosen, choose, far }) {
  const press = () => choose(chosen ? null : stage.id);
  const label = `${stage.stage} ${stage.uses}: ${WORDS[stage.status]}${far && ` ${far}`}${stage.reason ? `, ${stage.reason}` : ""}`;
  return html`<g class=${`box ${stage.status}${chosen ? " chosen" : ""}`} transform=${`translate(${at.left} ${at.top})`}
      role="button" tabindex="0" aria-label=${label} aria-pressed=${chosen ? "true" : "false"} onClick=${press}
      onKeyDown=${(/** @type {KeyboardEvent} */ event) => {
        if (event.key !== "Enter" && event.key !== " ") return;
        event.preventDefault();
        event.stopPropagation();
        press();
      }}>
    <title>${label}</title>
    <rect width=${at.width} height=${BOX.height} />
    <rect class="rule" width="3" height=${BOX.height} />
    <svg x="12" width=${at.width - 30} height=${BOX.height}><text class="name" y="17">${stage.stage}</text></svg>
    <text class="mark" x=${at.width - 16} y="17" aria-hidden="true">${MARKS[stage.status]}</text>
    <svg x="12" width=${at.width - 16} height=${BOX.height}><text class="kind" y="32">${far || stage.uses}</text></svg>
  </g>`;
}

/** The same as a table, with the reasons in full. @param {{stages: StageBox[], chosen: string | undefined, pipeline: string | null}} props */
export function StageTable({ stages, chosen, pipeline }) {
  return html`<${Lines} label="stages" heads=${["stage", "uses", "status", "#took", "reads", "why", "rows"]}>
      ${stages.map(
        (stage) => html`<tr class=${chosen === stage.id ? "chosen" : ""}>
          <td>${stage.stage}</td>
          <td>${stage.uses}</td>
          <td class=${`status ${stage.status}`}>${MARKS[stage.status]} ${WORDS[stage.status]}</td>
          <td class="number">${seconds(stage.seconds)}</td>
          <td class="wraps">${stage.inputs.map((input) => input.stage).join(", ")}</td>
          <td class="wraps">${[stage.reason, ...stage.inputs.filter((input) => input.reason).map((input) => `${input.stage}: ${input.reason}`)].filter(Boolean).join("; ")}</td>
          <td><a href=${address("/buffer", { filter: rowsOf(stage, pipeline) })} aria-label=${`rows of ${stage.stage}`}>rows</a></td>
        </tr>`,
      )}
    <//>`;
}

/** @param {StageBox} stage @param {string | null} pipeline */
const rowsOf = ({ stage }, pipeline) => `stage = ${literal(stage)}${pipeline ? ` and pipeline = ${literal(pipeline)}` : ""}`;
