// Rows that are saved as a selection with a name.
import { json, post, useAnswer } from "./api.js";
import { oneOf } from "./filter.js";
import { plural, quoted } from "./format.js";
import { copy } from "./keys.js";
import { address } from "./location.js";
import { Problem } from "./problem.js";
import { share } from "./share.js";
import { selected } from "./selection.js";
import { store } from "./served.js";
import { pieces } from "./text.js";
import { html, useState } from "./ui.js";

/** @typedef {import("./wire.js").SavedSelection} Saved */
/** @typedef {{filter: string, at: string | undefined, among: string | undefined, rule: string | undefined}} Shown */

export function openSaving() {
  const menu = /** @type {HTMLDetailsElement | null} */ (document.querySelector("details.saving"));
  if (!menu) return;
  menu.open = true;
  const name = menu.querySelector("input");
  name?.focus();
  name?.select(); // what is typed takes the place of the name before
}

/** What saves the same on the command line; null if its options cannot name these rows. @param {Shown} shown @param {string} name */
function command({ filter, at, among, rule }, name) {
  if (rule) return null;
  const options = [among && `--selection ${quoted(among)}`, filter && `--where ${quoted(filter)}`, at && `--at ${at}`];
  return ["agentrl buffer select", /^[\w-]+$/.test(name) ? name : "NAME", "--split all", ...options.filter(Boolean)].join(" ");
}

/** @param {{shown: Shown, total: number}} props */
export function Saving({ shown, total }) {
  const [name, setName] = useState("");
  const [saved, setSaved] = useState(/** @type {Saved | null} */ (null));
  const [problem, setProblem] = useState(/** @type {Error | null} */ (null));
  const [busy, setBusy] = useState(false);
  const writing = useAnswer(async (stop) => (store ? /** @type {import("./wire.js").Writing} */ (await json("/api/writing", {}, stop)) : null), []);
  if (!store) return null; // a file that was exported
  const allowed = Boolean(writing.value?.key);
  const done = (/** @type {Promise<any>} */ asked) => {
    setBusy(true);
    setProblem(null);
    asked.catch(setProblem).then(() => setBusy(false));
  };
  const save = (/** @type {object} */ rows) => {
    setSaved(null);
    done(post("/api/selection", { name, ...rows }).then(setSaved));
  };
  const all = Object.fromEntries(Object.entries(shown).filter(([, value]) => value));
  const ids = [...selected.value];
  const line = command(shown, name);
  const ready = allowed && !busy && name !== "";
  const entered = (/** @type {Event} */ event) => { // by the Enter key in the name
    event.preventDefault();
    if (!ready) return;
    if (total) save(all);
    else if (ids.length > 0) save({ at: shown.at, ids });
  };
  return html`<details class="columns saving"><summary>save</summary><div class="menu">
    <form onSubmit=${entered}>
      <label for="selection-name">name</label>
      <input id="selection-name" class="mono" value=${name} maxlength="80" spellcheck=${false} autocomplete="off" placeholder="hard-ones" onInput=${(/** @type {Event} */ event) => setName(/** @type {HTMLInputElement} */ (event.target).value.trim())} />
      <button type="button" disabled=${!ready || !total} onClick=${() => save(all)}>save ${plural(total, "row")}</button>
      ${ids.length > 0 && html`<button type="button" disabled=${!ready} onClick=${() => save({ at: shown.at, ids })}>save the ${ids.length} selected</button>`}
      <button type="button" disabled=${busy || !total} onClick=${() => done(share(all, "rows.html"))}>one file for others</button>
      ${ids.length > 0 && html`<button type="button" disabled=${busy} onClick=${() => done(share({ filter: oneOf(ids), at: shown.at }, "rows.html"))}>a file of the ${ids.length} selected</button>`}
    <p class="soft">A file needs no server, and nothing in it is redacted: first put placeholders for secrets by the stage <code>trajectories.redact</code>.</p>
    </form>
    ${writing.value && !allowed && html`<p class="soft">This viewer only reads. To save from here, start it by <code>agentrl view --write</code>${line && html`; or run <code>${line}</code> <button type="button" class="quiet" onClick=${() => copy(line, "command")}>copy the command</button>`}.</p>`}
    <div role="status">${busy && html`<p class="soft">working …</p>`}${saved && html`<${Done} saved=${saved} />`}</div>
    ${problem && html`<${Problem} problem=${problem} />`}
  </div></details>`;
}

/** @param {{saved: Saved}} props */
function Done({ saved }) {
  const { artifact, rows, version, again, before } = saved;
  return html`<p>${plural(rows, "row")} of version ${version} ${again ? "saved already as" : "saved as"} <a href=${address("/buffer", { among: artifact })}>${pieces(artifact)}</a>.
      <button type="button" class="quiet" onClick=${() => copy(saved.wiring, "edge for a pipeline file")}>copy for a pipeline</button></p>
    ${saved.other_splits > 0 && html`<p class="bad">${saved.other_splits} of them are not of the train split.</p>`}
    ${saved.absent > 0 && html`<p class="soft">${plural(saved.absent, "more row")} of this part are not in version ${version}, and not saved.</p>`}
    ${before.length > 0 && html`<p class="soft">Also of this name, and unchanged: ${before.map((name) => html`<a href=${address("/buffer", { among: name })}>${pieces(name)}</a> `)}. The name alone means the newest.</p>`}`;
}
