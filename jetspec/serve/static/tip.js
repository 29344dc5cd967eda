/** Tooltip with the data of a token or a node. */

import { about, isOwn } from "./answer.js";
import { nodeLogprob } from "./tree.js";

const box = document.getElementById("tip");
const MARGIN = 8;

/** Show the tooltip of an element, or hide it if the element has no data. */
export function showTip(element, round) {
  const lines = element?.matches(".token")
    ? aboutToken(about(element))
    : element?.matches("g[data-node]") && round
      ? aboutNode(round, Number(element.dataset.node))
      : [];
  box.hidden = lines.length === 0;
  if (box.hidden) return;
  box.replaceChildren(...lines.map(paragraph));
  place(element.getClientRects()[0] ?? element.getBoundingClientRect());
}

function aboutToken({ round, tokens }) {
  if (!round) return [];
  const lines = [`Round ${round.round}`];
  for (const token of tokens) {
    lines.push(`depth ${token.depth} of ${round.tokens.length}`);
    lines.push(isOwn(token) ? "not in the draft: sampled from the target" : `draft: ${chance(token.draft_logprob)}`);
    if (token.logprob != null) lines.push(`target: ${chance(token.logprob)}`);
  }
  return lines;
}

function aboutNode({ tree }, node) {
  if (node === 0) return [quote(tree.tokens[0]), "anchor: the last committed token"];
  if (node === tree.tokens.length) return [quote(tree.bonus), "bonus token: sampled from the target"];
  const verdict = tree.path.includes(node) ? "accepted" : "rejected";
  const sum = tree.scores[node];
  return [
    `${quote(pathText(tree, node))}, ${verdict}`,
    `draft: ${chance(nodeLogprob(tree, node))}`,
    sum == null ? "" : `path so far: ${chance(sum)}`,
  ].filter(Boolean);
}

function pathText(tree, node) {
  let text = "";
  for (let at = node; at !== 0; at = tree.parents[at]) text = tree.tokens[at] + text;
  return text;
}

const quote = (text) => `“${text}”`;

/** A log-probability and the probability in per cent. */
function chance(logprob) {
  return `log-probability ${logprob.toFixed(2).replace("-", "−")} (${(100 * Math.exp(logprob)).toFixed(0)} %)`;
}

function paragraph(text) {
  const made = document.createElement("p");
  made.textContent = text;
  return made;
}

/** Above the element if it fits there, and always inside the window. */
function place(target) {
  const { width, height } = box.getBoundingClientRect();
  const above = target.top - height - MARGIN;
  const x = Math.min(Math.max(MARGIN, target.left), innerWidth - width - MARGIN);
  box.style.left = `${x}px`;
  box.style.top = `${above >= MARGIN ? above : target.bottom + MARGIN}px`;
}
