// Colours of the style sheet for what is drawn on a canvas.

/** The colour that the style sheet gives to each class. */
export class Palette {
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
