// All tokens of a row at a glance: a cell per token, or per several. Tool errors and breaks of the mask's proof stand out.
import { html, useEffect, useRef } from "./ui.js";

/** @typedef {import("./painter.js").Painter} Painter */
/** @typedef {import("./wire.js").ShownMessage} Turn */

const WIDTH = 56;
const LANE = 6; // for the roles and errors
const ROW = 3;

/** @param {{painter: Painter, messages: Turn[], spans: [number, number][], lens: string, theme: string, jump: (token: number) => void}} props */
export function Minimap({ painter, messages, spans, lens, theme, jump }) {
  const canvas = useRef(/** @type {HTMLCanvasElement | null} */ (null));
  const view = useRef(/** @type {HTMLElement | null} */ (null));
  const length = painter.tokens.length;

  useEffect(() => {
    const draw = () => canvas.current && paint(canvas.current, painter, messages, spans);
    const frame = requestAnimationFrame(draw);
    addEventListener("resize", draw);
    return () => {
      cancelAnimationFrame(frame);
      removeEventListener("resize", draw);
    };
  }, [painter, lens, theme, messages]);

  useEffect(() => {
    let [frame, task] = [0, 0];
    const measure = () => {
      frame = 0;
      const [first, last] = inView(painter);
      view.current?.style.setProperty("top", `${(100 * first) / length}%`);
      view.current?.style.setProperty("height", `${Math.max(0.5, (100 * (last - first)) / length)}%`);
    };
    const follow = () => {
      frame ||= requestAnimationFrame(() => (task = setTimeout(measure))); // within the frame it would lay all out once more
    };
    follow();
    addEventListener("scroll", follow, { passive: true });
    addEventListener("resize", follow);
    return () => {
      cancelAnimationFrame(frame);
      clearTimeout(task);
      removeEventListener("scroll", follow);
      removeEventListener("resize", follow);
    };
  }, [painter]);

  const errors = messages.filter((turn) => turn.error).length;
  const press = (/** @type {PointerEvent} */ event) => {
    if (event.type === "pointermove" && !(event.buttons & 1)) return;
    const box = /** @type {Element} */ (event.currentTarget).getBoundingClientRect();
    jump(Math.min(length - 1, Math.max(0, Math.floor(((event.clientY - box.top) / box.height) * length))));
  };
  return html`<div class="minimap" onPointerDown=${press} onPointerMove=${press}>
    <canvas ref=${canvas} role="img" aria-label=${`map of ${length} tokens under the lens ${lens}; ${errors} tool errors, ${painter.tokens.breaches.size} breaks of the mask's proof`}></canvas>
    <div class="view" ref=${view}></div>
  </div>`;
}

/** The first and last token in view, by blocks. @param {Painter} painter @returns {[number, number]} */
function inView({ blocks }) {
  let [low, high] = [0, blocks.length];
  while (low < high) {
    const middle = (low + high) >> 1;
    if (blocks[middle].element.getBoundingClientRect().bottom > 96) high = middle;
    else low = middle + 1;
  }
  let last = low;
  while (last + 1 < blocks.length && blocks[last + 1].element.getBoundingClientRect().top < innerHeight) last++;
  return blocks.length ? [within(blocks[Math.min(low, blocks.length - 1)], 96), within(blocks[Math.min(last, blocks.length - 1)], innerHeight)] : [0, 0];
}

/** The token of a block at a height of the window. @param {import("./painter.js").Block} block @param {number} y */
function within(block, y) {
  const box = block.element.getBoundingClientRect();
  const share = Math.min(1, Math.max(0, (y - box.top) / Math.max(1, box.height)));
  return block.from + share * (block.to - block.from);
}

/** @param {HTMLCanvasElement} canvas @param {Painter} painter @param {Turn[]} messages @param {[number, number][]} spans */
function paint(canvas, { tokens, lens }, messages, spans) {
  const height = canvas.clientHeight;
  const density = devicePixelRatio;
  canvas.width = WIDTH * density;
  canvas.height = height * density;
  const brush = /** @type {CanvasRenderingContext2D} */ (canvas.getContext("2d"));
  brush.scale(density, density);
  const palette = new Palette();
  const rows = Math.max(1, Math.floor(height / ROW));
  const columns = Math.max(1, Math.min(Math.ceil(tokens.length / rows), (WIDTH - LANE) / 2));
  const cells = rows * columns;
  const wide = (WIDTH - LANE - 2) / columns;
  for (let cell = 0; cell < cells; cell++) {
    const i = Math.floor((cell * tokens.length) / cells);
    const mark = lens.mark(tokens, i);
    brush.fillStyle = palette.colour(mark || (tokens.covered(i) ? "inked" : "blank"));
    brush.fillRect(LANE + 2 + (cell % columns) * wide, Math.floor(cell / columns) * ROW, wide, ROW - 1);
  }
  const y = (/** @type {number} */ i) => (i / tokens.length) * height;
  messages.forEach((turn, i) => {
    const [from, to] = spans[i];
    brush.fillStyle = palette.colour(turn.error ? "error-mark" : `role-${turn.role}`);
    brush.fillRect(0, y(from), turn.error ? LANE + 4 : 3, Math.max(turn.error ? 2 : 1, y(to) - y(from) - 1));
  });
  brush.fillStyle = palette.colour("breach-mark");
  for (const i of tokens.breaches.keys()) brush.fillRect(LANE, y(i), WIDTH - LANE, 2);
  palette.close();
}

/** The colour that the style sheet gives to each class. */
class Palette {
  constructor() {
    this.probe = document.body.appendChild(document.createElement("span"));
    this.probe.hidden = true;
    /** @type {Map<string, string>} */
    this.known = new Map();
  }

  /** @param {string} name of the class */
  colour(name) {
    let colour = this.known.get(name);
    if (colour === undefined) {
      this.probe.className = `swatch ${name}`;
      colour = getComputedStyle(this.probe).backgroundColor;
      this.known.set(name, colour);
    }
    return colour;
  }

  close() {
    this.probe.remove();
  }
}
