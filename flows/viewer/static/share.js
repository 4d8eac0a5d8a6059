// Rows as one file that others open without a server.
import { bytes } from "./api.js";
import { size } from "./format.js";
import { say } from "./keys.js";

/** Makes the file on the server and hands it to the browser, which asks where to keep it. @param {import("./api.js").Params} rows what a page shows of the buffer @param {string} name */
export async function share(rows, name) {
  say("making the file …");
  const data = await bytes("/api/export", rows);
  const link = document.createElement("a");
  link.href = URL.createObjectURL(new Blob([/** @type {any} */ (data)], { type: "text/html" }));
  link.download = name;
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 60_000);
  say(`${name}, ${size(data.length)}: it needs no server, and nothing in it is redacted`);
}
