// The page that the viewer's tokens are compared with: an element for every token of a row, always.
import { fetchTokens } from "/static/tokens.js";
import { LENSES, classes } from "/static/lenses.js";

const lens = (id) => LENSES.find((one) => one.id === id);
const all = document.getElementById("all");
const tokens = await fetchTokens(location.search.slice(1), undefined);
const drawn = [];
for (let i = 0; i < tokens.length; i++) {
  const span = document.createElement("span");
  span.className = classes(lens("logprob"), tokens, i);
  span.textContent = tokens.piece(i);
  drawn.push(span);
}
all.replaceChildren(...drawn);
bench.use = (id) => drawn.forEach((span, i) => (span.className = classes(lens(id), tokens, i)));
bench.last = () => drawn.at(-1).scrollIntoView({ block: "center" });
bench.drawn = true;
