/** Gauges and the tree. They follow the answer being generated, or show a selected round. */

import { SHADES } from "./answer.js";
import { make, set } from "./svg.js";
import { countNodes, drawTree } from "./tree.js";

const MIN_GAP_MS = 90;
const MAX_BARS = 48;
const at = (id) => document.getElementById(id);

export class Instruments {
  constructor() {
    this.answer = null;
    this.selected = null;
    this.showsAll = false;
    this.timer = 0;
    this.drawnAt = 0;
    at("scrub").addEventListener("input", ({ target }) => {
      this.show(this.answer, this.answer.rounds[target.value - 1]);
    });
    at("tree-all").addEventListener("click", () => {
      this.showsAll = !this.showsAll;
      this.#draw();
    });
    new ResizeObserver(() => this.#draw()).observe(at("tree-frame"));
  }

  /** The shown round. */
  get round() {
    return this.selected ?? this.answer?.rounds.at(-1);
  }

  /** Follow an answer. */
  follow(answer) {
    [this.answer, this.selected] = [answer, null];
    this.#draw();
  }

  /** Called when an answer has grown. The drawing rate is limited: rounds can be faster than the display. */
  grown(answer) {
    if (answer !== this.answer || this.timer) return;
    const wait = Math.max(0, this.drawnAt + MIN_GAP_MS - performance.now());
    this.timer = setTimeout(() => requestAnimationFrame(() => this.#draw()), wait);
  }

  /** Show one round. The last round of an answer follows it. */
  show(answer, round) {
    this.answer = answer;
    this.selected = round === answer.rounds.at(-1) ? null : round;
    this.#draw();
  }

  #draw() {
    clearTimeout(this.timer);
    [this.timer, this.drawnAt] = [0, performance.now()];
    const rounds = this.answer?.rounds ?? [];
    at("tree-empty").hidden = rounds.length > 0;
    at("tree-foot").hidden = rounds.length === 0;
    drawGauges(rounds);
    this.#drawScrub(rounds);
    if (!this.round) {
      at("tree").replaceChildren();
      at("tree-title").textContent = "Draft tree";
      at("tree-facts").textContent = "";
      at("tree-all").hidden = true;
      return;
    }
    const numFolded = drawTree(at("tree"), at("tree-frame"), this.round, this.showsAll);
    at("tree-title").textContent = `Round ${this.round.round}`;
    at("tree-facts").textContent = countNodes(this.round);
    at("tree-all").hidden = !numFolded && !this.showsAll;
    at("tree-all").textContent = this.showsAll ? "Fold" : `Show ${numFolded} more`;
    at("tree-all").setAttribute("aria-pressed", String(this.showsAll));
  }

  #drawScrub(rounds) {
    const scrub = at("scrub");
    scrub.disabled = rounds.length < 2;
    scrub.max = Math.max(rounds.length, 1);
    scrub.value = this.selected ? rounds.indexOf(this.selected) + 1 : scrub.max;
    scrub.setAttribute("aria-valuetext", `round ${scrub.value} of ${scrub.max}`);
  }
}

function drawGauges(rounds) {
  const tokens = rounds.reduce((sum, round) => sum + round.tokens.length, 0);
  // The first round has no speed: the clock starts at its end.
  const speeds = rounds.slice(1).map((round) => round.tokens_per_s);
  at("speed").textContent = speeds.length ? speeds.at(-1).toFixed(speeds.at(-1) < 100 ? 1 : 0) : "–";
  at("yield").textContent = rounds.length ? (tokens / rounds.length).toFixed(2) : "–";
  drawLine(at("speed-line"), speeds.slice(-MAX_BARS));
  drawBars(at("yield-bars"), rounds.slice(-MAX_BARS));
}

function drawLine(svg, values) {
  const top = Math.max(...values, 1) * 1.05;
  const points = values.map((value, i) => `${i} ${(top - value).toFixed(2)}`);
  set(svg, { viewBox: `0 0 ${MAX_BARS - 1} ${top}`, preserveAspectRatio: "none" });
  svg.replaceChildren(...(points.length > 1 ? [make("path", { d: `M${points.join("L")}` })] : []));
}

/** A bar per round in the shade of its text; the dashed line is plain decoding, one token per round. */
function drawBars(svg, rounds) {
  const top = Math.max(...rounds.map((round) => round.tokens.length), 4);
  set(svg, { viewBox: `0 0 ${MAX_BARS} ${top}`, preserveAspectRatio: "none" });
  const bars = rounds.map((round, x) => {
    const height = round.tokens.length;
    return make("rect", { x, y: top - height, width: 0.72, height, class: `shade-${round.round % SHADES}` });
  });
  svg.replaceChildren(...bars, make("path", { d: `M0 ${top - 1}H${MAX_BARS}` }));
}
