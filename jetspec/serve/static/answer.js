/** The text of an answer: a shade per round, a span per token, and the data of each token. */

export const SHADES = 3;

const data = new WeakMap();

/** Data of a span: its answer, its round and its tokens. */
export const about = (span) => data.get(span);

export class Answer {
  /** `element` is empty; the spans are added to it. */
  constructor(element) {
    this.element = element;
    this.clear();
  }

  clear() {
    this.element.replaceChildren();
    this.text = "";
    this.rounds = [];
    this.tokens = 0;
    this.waiting = [];
  }

  /** Add a round: the text that became visible with it, and its trace, if the chunk had one. */
  add(text, round) {
    if (round) {
      this.rounds.push(round);
      this.tokens += round.tokens.length;
      this.waiting.push(...round.tokens.map((token) => ({ ...token, round })));
    }
    this.text += text;
    const { pieces, waiting } = split(text, this.waiting);
    this.waiting = waiting;
    this.element.append(...pieces.map((piece) => this.#span(piece)));
  }

  #span({ text, tokens }) {
    const span = document.createElement("span");
    const round = tokens[0]?.round ?? this.rounds.at(-1);
    span.textContent = text;
    span.className = "token";
    span.tabIndex = this.element.firstChild ? -1 : 0;
    if (round) span.classList.add(`shade-${round.round % SHADES}`);
    // Without a draft every token comes from the target, and none is marked.
    if (tokens.length && isOwn(tokens.at(-1)) && round.tree.tokens.length > 1) span.classList.add("own");
    data.set(span, { answer: this, round, tokens });
    return span;
  }
}

/** True for a token that was not in the draft. */
export const isOwn = (token) => token.draft_logprob == null;

/**
 * Split text among the waiting tokens. The pieces add up to exactly the text. A character made of several tokens is one
 * piece of all of them; tokens whose text has not come yet go on waiting.
 */
export function split(text, waiting) {
  const pieces = [];
  let at = 0;
  let next = 0;
  while (at < text.length) {
    const token = waiting[next];
    if (token?.text && text.startsWith(token.text, at)) {
      pieces.push({ text: token.text, tokens: [token] });
      at += token.text.length;
      next += 1;
      continue;
    }
    let after = next + 1;
    let until = -1;
    for (; after < waiting.length; after += 1) {
      const whole = waiting[after].text && !waiting[after].text.includes("\uFFFD");
      until = whole ? text.indexOf(waiting[after].text, at) : -1;
      if (until > at) break;
    }
    if (until <= at) [after, until] = [waiting.length, text.length];
    pieces.push({ text: text.slice(at, until), tokens: waiting.slice(next, after) });
    [at, next] = [until, after];
  }
  return { pieces, waiting: waiting.slice(next) };
}

/** Token that a key moves to: along the text, or to the first token of the previous or next round. */
export function neighbour(span, key) {
  const spans = [...span.parentElement.children];
  const at = spans.indexOf(span);
  const round = (index) => about(spans[index])?.round;
  const steps = {
    ArrowRight: () => at + 1,
    ArrowLeft: () => at - 1,
    Home: () => 0,
    End: () => spans.length - 1,
    ArrowDown: () => spans.findIndex((_, i) => i > at && round(i) !== round(at)),
    ArrowUp: () => {
      const last = spans.findLastIndex((_, i) => i < at && round(i) !== round(at));
      return last < 0 ? -1 : spans.findIndex((_, i) => round(i) === round(last));
    },
  };
  return key in steps ? spans[steps[key]()] : undefined;
}
