// What a reader can take away from a row.
import { json } from "./api.js";
import { route, rowAddress } from "./location.js";
import { store, whole } from "./served.js";

/** @typedef {import("./wire.js").RowAnswer} Row */

const AWAY = "this file does not know where its store is";

/**
 * Name, text, and why it cannot be had.
 * @param {string} id
 * @param {Row} row
 * @returns {[string, () => string | Promise<string>, string][]}
 */
export function copies(id, row) {
  const uncut = (/** @type {Row["messages"][number]} */ message) =>
    message.cut ? json(`/api/rows/${encodeURIComponent(id)}/messages/${message.number}`, { at: String(row.version) }) : message;
  const learner = row.lineage.learned_by.find((trained) => trained.steps.length);
  return [
    ["link", () => whole(rowAddress(id, { at: row.version, lens: route.peek().params.lens })), ""],
    ["JSON", async () => JSON.stringify({ ...row, messages: await Promise.all(row.messages.map(uncut)) }, null, 2), ""],
    ["pytest fixture", () => fixture(id, row.version), store ? "" : AWAY],
    ["agentrl replay line", () => replay(learner), store ? (learner ? "" : "no training step that wrote its numbers learned from this row") : AWAY],
  ];
}

/** @param {string} id @param {number} version */
async function fixture(id, version) {
  return `import polars as pl
import pytest

from agentrl.datastore import TrajectoryBuffer


@pytest.fixture
def trajectory() -> dict:
    rows = TrajectoryBuffer(${JSON.stringify(await store?.())}).scan(${version})
    return rows.filter(pl.col("trajectory_id") == ${JSON.stringify(id)}).collect().row(0, named=True)
`;
}

/** @param {import("./wire.js").LearnedBy | undefined} learner */
async function replay(learner) {
  if (!learner) return "";
  const word = (/** @type {string} */ text) => (/^[\w./:@-]+$/.test(text) ? text : `'${text.replaceAll("'", "'\\''")}'`);
  return `agentrl replay ${word(`${learner.stage}/${learner.fingerprint}`)} --step ${learner.steps[0]} --store ${word((await store?.()) ?? "")}`;
}
