// Two token sequences side by side, from the first token in which they differ. What they share is folded.
import { plural } from "./format.js";
import { LENSES } from "./lenses.js";
import { Painter } from "./painter.js";
import { html, useLayoutEffect, useMemo, useRef, useState } from "./ui.js";

/** @typedef {import("./tokens.js").Tokens} Tokens */
/** @typedef {{name: import("./vendor/preact.js").Child, tokens: Tokens, says: string}} Side */

/** @param {{shared: number, sides: Side[]}} props */
export function Versus({ shared, sides }) {
  const [open, setOpen] = useState(false);
  return html`<section class="versus" aria-label="side by side">
    <details open=${open} onToggle=${(/** @type {Event} */ event) => setOpen(/** @type {HTMLDetailsElement} */ (event.currentTarget).open)}>
      <summary>${shared ? `both begin with the same ${plural(shared, "token")}` : "they differ from the first token on"}</summary>
      ${open && shared > 0 && html`<${Drawn} tokens=${sides[0].tokens} from=${0} to=${shared} />`}
    </details>
    <div class="sides">
      ${sides.map((side) => html`<section>
        <h3>${side.name} <span class="soft">${side.says}</span></h3>
        ${shared < side.tokens.length ? html`<${Drawn} tokens=${side.tokens} from=${shared} to=${side.tokens.length} />` : html`<p class="soft">ends here: the other one goes on</p>`}
      </section>`)}
    </div>
  </section>`;
}

/** Tokens under the lens of the mask. @param {{tokens: Tokens, from: number, to: number}} props */
function Drawn({ tokens, from, to }) {
  const host = useRef(/** @type {HTMLElement | null} */ (null));
  const painter = useMemo(() => new Painter(tokens, LENSES[0]), [tokens]);
  useLayoutEffect(() => {
    const element = /** @type {HTMLElement} */ (host.current);
    const [stop, clear] = [painter.listen(element), painter.fill(element, from, to)];
    return () => {
      stop();
      clear();
    };
  }, [painter, from, to]);
  return html`<div class="tokens" ref=${host}></div>`;
}
