// What people say of rows: one row after another, by keys. Each label is on the disk when the page says so.
import { Said } from "./annotations.js";
import { json, useAnswer } from "./api.js";
import { Conversation } from "./conversation.js";
import { decimal, plural } from "./format.js";
import { say, useKeys } from "./keys.js";
import { LENSES } from "./lenses.js";
import { change, route, rowAddress, version } from "./location.js";
import { Painter } from "./painter.js";
import { Problem } from "./problem.js";
import { annotate, valueOf } from "./saying.js";
import { pieces, visible } from "./text.js";
import { fetchTokens, shares } from "./tokens.js";
import { html, useEffect, useMemo, useState } from "./ui.js";

/** @typedef {import("./wire.js").LabelQueue} Queue */
/** @typedef {import("./wire.js").LabelChoice} Choice */
/** @typedef {import("./wire.js").GivenLabel} Given */
/** @typedef {import("./wire.js").RowAnswer} Row */
/** @typedef {{name: string, value?: string | null, comment?: string, correction?: string}} Saying */

const QUEUES = {
  unlabelled: "rows without this label of yours",
  uncertain: "the same, the most uncertain first",
  disagreements: "rows of which authors say differently",
  all: "all rows",
};

export function LabelsPage() {
  const { filter, at, queue = "unlabelled", name = "thumbs" } = route.value.params;
  const [author, setAuthor] = useState(localStorage.getItem("author") ?? "");
  const [begun, begin] = useState(0); // how often the queue was asked for
  const { value, problem } = useAnswer((stop) => /** @type {Promise<Queue>} */ (json("/api/labels", { queue, name, author, filter, at }, stop)), [queue, name, author, filter, at, begun]);
  const writing = useAnswer((stop) => /** @type {Promise<import("./wire.js").Writing>} */ (json("/api/writing", {}, stop)), []);
  useEffect(() => void (value && (version.value = String(value.version))), [value]);
  const renamed = (/** @type {Event} */ event) => {
    const typed = /** @type {HTMLInputElement} */ (event.target).value.trim();
    localStorage.setItem("author", typed);
    setAuthor(typed);
  };
  const pick = (/** @type {string} */ key) => (/** @type {Event} */ event) => change({ [key]: /** @type {HTMLSelectElement} */ (event.target).value });
  const names = [...new Set([...(value?.labels ?? []).map((label) => label.name), name])];
  return html`<h1>Labels</h1>
    <div class="fields">
      <label>queue <select onChange=${pick("queue")}>${Object.entries(QUEUES).map(([id, says]) => html`<option value=${id} selected=${id === queue}>${says}</option>`)}</select></label>
      <label>label <select onChange=${pick("name")}>${names.map((each) => html`<option value=${each} selected=${each === name}>${visible(each)}</option>`)}</select></label>
      <label>author <input value=${author} placeholder=${value?.author ?? ""} maxlength="80" spellcheck=${false} autocomplete="off" onChange=${renamed} /></label>
    </div>
    ${filter && html`<p class="soft">of the rows with <code>${visible(filter)}</code></p>`}
    ${writing.value && !writing.value.key && html`<p class="problem">This viewer only reads. To label rows, start it by <code>agentrl view --write</code>.</p>`}
    ${problem && html`<${Problem} problem=${problem} />`}
    ${!value && !problem && html`<p class="soft waiting">looking for rows …</p>`}
    ${value && html`<${Labelling} key=${`${queue} ${name} ${author} ${filter} ${at} ${begun}`} queue=${value} name=${name} author=${author || value.author} at=${at} allowed=${Boolean(writing.value?.key)} again=${() => begin(begun + 1)} />`}`;
}

/** @param {{queue: Queue, name: string, author: string, at: string | undefined, allowed: boolean, again: () => void}} props */
function Labelling({ queue, name, author, at, allowed, again }) {
  const [i, setI] = useState(0);
  const [turn, setTurn] = useState(-1); // of the assistant messages; -1 is the whole row
  const [told, setTold] = useState(0); // how often something was said
  const [problem, setProblem] = useState(/** @type {Error | null} */ (null));
  const id = queue.ids[i];
  const row = useAnswer(async (stop) => (id ? /** @type {Row} */ (await json(`/api/rows/${encodeURIComponent(id)}`, { at }, stop)) : null), [id, at]);
  const given = useAnswer(async (stop) => (id ? /** @type {import("./wire.js").RowLabels} */ (await json("/api/labels/row", { row: id }, stop)) : null), [id, told]);
  const messages = row.value && row.value.messages;
  const turns = (messages ?? []).flatMap((message, number) => (message.role === "assistant" ? [number] : []));
  const chosen = useSpan(id, at, messages);
  const label = queue.labels.find((each) => each.name === name);
  const [start, end] = chosen.span ?? [null, null];
  const target = { turn: turn < 0 || chosen.span ? null : turn, token_start: start, token_end: end, pair_id: null };
  const about = chosen.span ? `tokens ${chosen.span[0]} to ${chosen.span[1] - 1}` : turn < 0 ? "the whole row" : `turn ${turn}`;

  const move = (/** @type {number} */ by) => {
    if (i + by >= queue.ids.length && queue.total > queue.ids.length) return again();
    setTurn(-1);
    setProblem(null);
    setI(Math.max(0, Math.min(i + by, queue.ids.length)));
  };
  const step = (/** @type {number} */ by) => {
    const next = Math.max(-1, Math.min(turn + by, turns.length - 1));
    setTurn(next);
    chosen.clear();
    document.getElementById(`m${turns[next]}`)?.scrollIntoView({ block: "nearest" });
  };
  const tell = (/** @type {Saying} */ saying, /** @type {string} */ words) => {
    if (!allowed) return Promise.resolve(say("this viewer only reads: agentrl view --write"));
    if (!id) return Promise.resolve();
    setProblem(null);
    return annotate({ trajectory_id: id, ...target, author, ...saying }).then(() => {
      say(`${words} of ${about}: saved`);
      setTold((number) => number + 1);
    }, setProblem);
  };
  const give = (/** @type {Choice | undefined} */ choice, /** @type {number} */ number) => {
    if (!choice || number >= choice.values.length) return;
    tell({ name: choice.name, value: choice.values[number] }, `${choice.name} ${choice.values[number]}`);
  };
  const firstToken = chosen.spans[turns[turn]]?.[0] ?? 0;
  const thumbs = queue.labels.find((each) => each.name === "thumbs");
  const digits = label && label.name !== "thumbs" ? label : queue.labels.find((each) => each.name === "stars");
  const focus = (/** @type {string} */ field) => document.getElementById(field)?.focus();
  const ofDigits = Object.fromEntries((digits?.values ?? []).map((value, number) => [String(number + 1), { does: `${digits?.name}: ${value}`, run: () => give(digits, number) }]));
  useKeys({
    n: { does: "next row", run: () => move(1) },
    p: { does: "previous row", run: () => move(-1) },
    j: { does: "next turn of the assistant", run: () => step(1) },
    k: { does: "previous turn, at last the whole row", run: () => step(-1) },
    u: { does: "thumbs up", run: () => give(thumbs, 0) },
    d: { does: "thumbs down", run: () => give(thumbs, 1) },
    ...ofDigits,
    x: { does: "take this label back", run: () => void tell({ name, value: null }, `${name} taken back`) },
    c: { does: "write a comment", run: () => focus("comment") },
    e: { does: "write the answer that should be there", run: () => focus("correction") },
    t: { does: "tokens of the row, or back to its text", run: chosen.turn },
    ArrowRight: { does: "choose the next token", run: () => chosen.step(1, false, firstToken) },
    ArrowLeft: { does: "choose the token before", run: () => chosen.step(-1, false, firstToken) },
    "Shift+ArrowRight": { does: "choose one token more", run: () => chosen.step(1, true, firstToken) },
    "Shift+ArrowLeft": { does: "choose one token less", run: () => chosen.step(-1, true, firstToken) },
  });

  if (!id) {
    const done = queue.ids.length > 0;
    return html`<p role="status">${done ? html`That was the last row of this queue. <button onClick=${again}>look for more</button>` : "No row is in this queue."}</p>`;
  }
  return html`<p class="soft fields"><button onClick=${() => move(-1)} disabled=${i === 0}>previous</button><button onClick=${() => move(1)}>next</button>
      <span>row ${i + 1} of ${queue.total}: <a href=${rowAddress(id, { at })}>${pieces(id)}</a>${row.value && html`, reward ${decimal(row.value.row.reward)}`}</span></p>
    <div class="labels" role="group" aria-label=${`labels of ${about}`}>
      ${queue.labels.map((choice) => html`<${Values} choice=${choice} given=${given.value?.annotations ?? []} target=${target} author=${author} disabled=${!allowed} press=${(/** @type {number} */ number) => give(choice, number)} />`)}
    </div>
    <p class="soft" role="status">about ${about}${chosen.text ? html` <code>${visible(chosen.text)}</code>` : turns.length > 0 && html` of ${plural(turns.length, "turn")}`}: j and k choose a turn, ${chosen.painter ? "the mouse or arrows and Shift tokens" : "t shows tokens"}${chosen.lacks && ", of which this row has none"}</p>
    ${problem && html`<${Problem} problem=${problem} />`}
    <${Words} key=${`comment ${id} ${about}`} id="comment" label="comment" disabled=${!allowed} send=${(/** @type {string} */ comment) => tell({ name: "comment", comment }, "comment")} />
    <${Words} key=${`correction ${id} ${about}`} id="correction" label="corrected answer" disabled=${!allowed} send=${(/** @type {string} */ correction) => tell({ name: "correction", correction }, "correction")} />
    ${given.value?.annotations.length ? html`<details><summary>${plural(given.value.annotations.length, "annotation")} of this row</summary><${Said} counting=${given.value.annotations} id=${id} at=${at} messages=${messages ?? []} /></details>` : html`<p class="soft">Nothing was said of this row yet.</p>`}
    ${row.problem && html`<${Problem} problem=${row.problem} />`}
    ${messages && html`<div onMouseUp=${chosen.take}><${Conversation} key=${id} id=${id} at=${at} messages=${messages} spans=${chosen.spans} painter=${chosen.painter} current=${turn < 0 ? -1 : turns[turn]} /></div>`}`;
}

/** The values of a label as buttons. @param {{choice: Choice, given: Given[], target: import("./saying.js").Target, author: string, disabled: boolean, press: (number: number) => void}} props */
function Values({ choice, given, target, author, disabled, press }) {
  const own = valueOf(given, choice.name, author, target);
  return html`<p><span class="label" title=${choice.description}>${pieces(choice.name)}</span> ${choice.values.map((value, number) => html`<button class=${value === own ? "mark on" : "mark"} aria-pressed=${value === own ? "true" : "false"} aria-label=${`${choice.name}: ${value}`} disabled=${disabled} onClick=${() => press(number)}>${pieces(value)}</button> `)}</p>`;
}

/** A text that is sent as a whole. @param {{id: string, label: string, disabled: boolean, send: (text: string) => Promise<void>}} props */
function Words({ id, label, disabled, send }) {
  const [text, setText] = useState("");
  const sent = (/** @type {Event} */ event) => {
    event.preventDefault();
    if (text.trim()) send(text).then(() => setText(""));
  };
  const typed = (/** @type {KeyboardEvent} */ event) => {
    if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) sent(event);
  };
  return html`<form class="fields" onSubmit=${sent}>
    <label class="wide" for=${id}>${label}</label>
    <textarea id=${id} rows="2" value=${text} disabled=${disabled} onInput=${(/** @type {Event} */ event) => setText(/** @type {HTMLTextAreaElement} */ (event.target).value)} onKeyDown=${typed}></textarea>
    <button disabled=${disabled || !text.trim()}>save the ${label}</button> <span class="soft">Ctrl+Enter</span>
  </form>`;
}

/** @typedef {import("./wire.js").ShownMessage} Message */
/** @typedef {[number, number]} Span the first token, and the one after the last */

/** The tokens of a row, once they are asked for, and which of them are chosen. @param {string | undefined} id @param {string | undefined} at @param {Message[] | null} messages */
function useSpan(id, at, messages) {
  const [shown, setShown] = useState(false);
  const [ends, setEnds] = useState(/** @type {[number, number] | null} */ (null)); // where it began, and the cursor; both are in it
  const { value } = useAnswer(async (stop) => (shown && id ? { id, tokens: await fetchTokens(id, at, stop) } : null), [shown, id, at]);
  const tokens = shown && value && value.id === id ? value.tokens : null; // not those of the row before
  const painter = useMemo(() => (tokens?.length ? new Painter(tokens, LENSES[0]) : null), [tokens]);
  const spans = useMemo(() => (messages ?? []).map(() => /** @type {Span} */ ([0, 0])), [messages]);
  const tokenSpans = useMemo(() => (tokens && messages ? shares(messages, tokens.length) : spans), [tokens, messages]);
  const span = /** @type {Span | null} */ (painter && ends ? [Math.min(...ends), Math.max(...ends) + 1] : null);
  useEffect(() => setEnds(null), [id, shown]);
  useEffect(() => painter?.choose(span ?? [0, 0]), [painter, span?.[0], span?.[1]]);
  const to = (/** @type {number} */ token, /** @type {boolean} */ extend) => {
    if (!painter || !tokens) return;
    const cursor = Math.max(0, Math.min(token, tokens.length - 1));
    setEnds([extend && ends ? ends[0] : cursor, cursor]);
    painter.reveal(cursor);
  };
  return {
    painter,
    spans: painter ? tokenSpans : spans,
    span,
    text: span && tokens ? tokens.slice(...span) : "",
    lacks: tokens !== null && !tokens.length,
    turn: () => setShown(!shown),
    clear: () => setEnds(null),
    /** One token further, or back; the first of a message if none is chosen. @param {number} by @param {boolean} extend @param {number} from */
    step: (by, extend, from) => (painter ? to(ends ? ends[1] + by : from, extend) : say("t shows the tokens of the row first")),
    /** Takes what the mouse selected. */
    take: () => {
      const range = painter?.selected();
      if (!range) return;
      setEnds([range[0], range[1] - 1]);
      getSelection()?.removeAllRanges();
    },
  };
}
