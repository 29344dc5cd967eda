/**
 * The same prompt without and with the tree. The requests run one after the other, so that neither slows the other down.
 * While the second runs, the first answer is replayed at its original speed.
 */

import { Answer } from "./answer.js";

const reducedMotion = matchMedia("(prefers-reduced-motion: reduce)");

class Lane {
  constructor(element) {
    this.find = (selector) => element.querySelector(selector);
    this.answer = new Answer(this.find(".answer"));
    this.takes = [];
    this.seconds = 0;
  }

  /** Run the request; the answer has at most `expected` tokens. */
  async run(decode, expected, grown) {
    this.#start();
    try {
      const { seconds } = await decode((text, round, at) => {
        this.takes.push({ text, round, at });
        this.#take({ text, round }, expected);
        grown(this.answer);
      });
      this.seconds = seconds;
    } finally {
      this.#finish();
    }
  }

  /** Replay the answer with its timing. Ends early when the signal aborts. */
  async replay(signal) {
    const total = this.answer.tokens;
    this.answer.clear();
    this.#start();
    const began = performance.now();
    for (const take of this.takes) {
      await until(began + take.at * 1000, signal);
      this.#take(take, total);
    }
    this.#finish();
  }

  get text() {
    return this.answer.text;
  }

  #take({ text, round }, expected) {
    this.answer.add(text, round);
    this.answer.element.scrollTop = this.answer.element.scrollHeight;
    this.find("progress").value = Math.min(1, this.answer.tokens / expected);
  }

  #start() {
    const began = performance.now();
    const tick = () => {
      this.#show((performance.now() - began) / 1000);
      this.frame = requestAnimationFrame(tick);
    };
    tick();
  }

  #finish() {
    cancelAnimationFrame(this.frame);
    if (this.seconds) this.#show(this.seconds);
    const { tokens, rounds } = this.answer;
    this.find("progress").value = 1;
    this.find(".sum").textContent = this.seconds
      ? `${tokens} tokens in ${rounds.length} rounds, ${(tokens / this.seconds).toFixed(1)} tokens/s`
      : "stopped";
  }

  #show(seconds) {
    this.find(".clock").textContent = `${seconds.toFixed(2)} s`;
  }
}

/** `start(tree, take)` sends the request; `tree` overrides the tree settings. Returns the text of the second answer. */
export async function runRace(turn, { start, length, setting, signal, instruments }) {
  const stage = turn.querySelector(".stage");
  const plain = new Lane(turn.querySelector(".plain"));
  const jetspec = new Lane(turn.querySelector(".jetspec"));
  const grown = (answer) => instruments.grown(answer);

  stage.textContent = "Plain decoding runs first.";
  instruments.follow(plain.answer);
  await plain.run((take) => start({ budget: 1 }, take), length, grown);

  const isReplayed = !reducedMotion.matches;
  stage.textContent = isReplayed ? "JetSpec runs; the plain answer is replayed beside it." : "JetSpec runs.";
  const numTokens = plain.answer.tokens;
  const replayed = isReplayed ? plain.replay(signal) : null;
  instruments.follow(jetspec.answer);
  await jetspec.run((take) => start({}, take), numTokens, grown);
  await replayed;
  showVerdict(turn.querySelector(".verdict"), plain, jetspec, setting);
  return jetspec.text;
}

function showVerdict(verdict, plain, jetspec, setting) {
  const place = firstDifference(plain.text, jetspec.text);
  const ratio = plain.seconds / jetspec.seconds;
  const speed = document.createElement("strong");
  speed.textContent = ratio >= 1 ? `${ratio.toFixed(2)}× as fast` : `${(1 / ratio).toFixed(2)}× slower here`;
  const same = document.createElement("span");
  same.className = "same";
  same.textContent = place < 0 ? "identical texts" : `texts differ from character ${place + 1} on`;
  const rounds = ` in ${jetspec.answer.rounds.length} rounds instead of ${plain.answer.rounds.length}, ${setting}: `;
  verdict.dataset.identical = String(place < 0);
  verdict.replaceChildren(speed, rounds, same);
}

/** Index of the first different character, or -1. */
export function firstDifference(a, b) {
  if (a === b) return -1;
  let at = 0;
  while (at < Math.min(a.length, b.length) && a[at] === b[at]) at += 1;
  return at;
}

function until(moment, signal) {
  return new Promise((resolve) => {
    if (signal.aborted) return resolve();
    setTimeout(resolve, Math.max(0, moment - performance.now()));
    signal.addEventListener("abort", resolve, { once: true });
  });
}
