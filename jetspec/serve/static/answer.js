/** The text of an answer: a shade per round, a span per token, and what is known about each. */

export const SHADES = 3;

const known = new WeakMap();

/** What stands behind a span: the answer, the round and its tokens. */
export const about = (span) => known.get(span);

export class Answer {
  /** `element` is empty and takes the spans. */
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

  /** One round: the text that became visible with it, and its trace, if the chunk had one. */
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
    // Where nothing was drafted every token is the target's own, and none needs a mark.
    if (tokens.length && isOwn(tokens.at(-1)) && round.tree.tokens.length > 1) span.classList.add("own");
    known.set(span, { answer: this, round, tokens });
    return span;
  }
}

/** Whether the target wrote the token itself: it was not in the draft. */
export const isOwn = (token) => token.draft_logprob == null;

/**
 * Share out text among the tokens that wait for it. The text is what counts: its pieces add up to it exactly. A
 * character that several tokens make up is one piece of all of them; tokens that do not show yet wait on.
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

/** Where a key leads from a token: along the text, or to the first token of the round before or after. */
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
