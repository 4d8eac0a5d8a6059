// What is said of a row, of a part of it, or of a pair: how it is sent, and what stands already.
import { post } from "./api.js";

/** @typedef {import("./wire.js").GivenLabel} Given */
/** @typedef {Pick<Given, "turn" | "token_start" | "token_end" | "pair_id">} Target all null for a whole row */
/** @typedef {Target & {trajectory_id: string, author: string, name: string, value?: string | null, comment?: string, correction?: string}} Annotation */

/** It is on the disk when this is done. @param {Annotation} annotation @returns {Promise<void>} */
export const annotate = (annotation) => post("/api/annotation", { annotation_id: unique(), ...annotation });

/** The value that an author gave a target under a name. @param {Given[]} given @param {string} name @param {string} author @param {Target} target */
export const valueOf = (given, name, author, target) =>
  given.find((each) => each.name === name && each.author === author && each.turn === target.turn && each.token_start === target.token_start && each.token_end === target.token_end && each.pair_id === target.pair_id)?.value;

/** A name that nothing else has, so that what is sent twice is kept once. Addresses without TLS have no randomUUID. */
const unique = () => [...crypto.getRandomValues(new Uint8Array(16))].map((byte) => byte.toString(16).padStart(2, "0")).join("");
