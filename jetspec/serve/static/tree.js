/** The draft tree of a round as SVG, left to right: the accepted path in the top row, rejected nodes below. */

import { make, set } from "./svg.js";

const [ROW, BOX, GAP, PAD, INSET] = [26, 20, 16, 8, 6];
const MAX_LABEL = 14;
const MIN_ROWS = 3;
const MIN_SCALE = 0.75;

/**
 * Selects the nodes to draw and their rows, at most `maxRows`: always the path, then the best nodes. Every other node is
 * counted in `folded` of its nearest drawn ancestor. The last node is the bonus token.
 */
export function arrange(tree, maxRows) {
  const bonus = tree.tokens.length;
  const parents = [...tree.parents, tree.path.at(-1)];
  const onPath = new Set([...tree.path, bonus]);
  const { drawn, folded } = choose(parents, onPath, maxRows);
  const children = parents.map(() => []);
  for (const node of [...drawn].sort((a, b) => onPath.has(b) - onPath.has(a) || a - b)) {
    if (node !== 0) children[parents[node]].push(node);
  }
  const nodes = [];
  let lastRow = 0;
  const walk = (node, depth, isFirst) => {
    if (!isFirst) lastRow += 1;
    const kind = node === bonus ? "bonus" : onPath.has(node) ? "kept" : "dropped";
    nodes.push({ node, parent: parents[node], depth, row: lastRow, kind, folded: folded[node] });
    children[node].forEach((child, rank) => walk(child, depth + 1, rank === 0));
  };
  walk(0, 0, true);
  return { nodes, numRows: lastRow + 1, numFolded: folded.reduce((sum, n) => sum + n, 0) };
}

/** Nodes come best first and after their parents, so one pass suffices. A first child shares its parent's row. */
function choose(parents, onPath, maxRows) {
  const drawn = new Set(onPath);
  const hasChild = new Set([...onPath].filter((node) => node !== 0).map((node) => parents[node]));
  const host = parents.map((_, node) => node);
  const folded = parents.map(() => 0);
  let numRows = 1;
  for (let node = 1; node < parents.length; node += 1) {
    if (drawn.has(node)) continue;
    const parent = parents[node];
    const needsRow = hasChild.has(parent);
    if (drawn.has(parent) && (!needsRow || numRows < maxRows)) {
      drawn.add(node);
      hasChild.add(parent);
      numRows += needsRow;
    } else {
      host[node] = host[parent];
      folded[host[node]] += 1;
    }
  }
  return { drawn, folded };
}

/** Draws a round into `svg`, folded to fit `frame` unless `isWhole`. Returns the number of folded nodes. */
export function drawTree(svg, frame, round, isWhole) {
  const { tree } = round;
  const labels = [...tree.tokens, tree.bonus].map(label);
  const measure = ruler(svg);
  const lay = (maxRows) => place(arrange(tree, maxRows), labels, measure, frame.clientWidth);
  const available = (scale) => (frame.clientHeight - 2 * PAD) / scale;
  const fit = (scale) => Math.max(MIN_ROWS, Math.floor((available(scale) - PAD) / ROW));
  let layout = lay(isWhole ? Infinity : fit(1));
  if (layout.numFolded && layout.scale < 1) {
    // Scaled down, more rows fit; but more rows can change the scale.
    const more = lay(fit(layout.scale));
    if (more.height <= available(more.scale)) layout = more;
  }
  const { nodes, width, height, scale, numFolded } = layout;
  const byNode = new Map(nodes.map((box) => [box.node, box]));
  const links = nodes.filter((box) => box.node !== 0).map((box) => link(byNode.get(box.parent), box, tree));
  // The path is drawn last, above other lines.
  links.sort((a, b) => a.classList.contains("lit") - b.classList.contains("lit"));
  svg.replaceChildren(...links, ...nodes.map(boxOf));
  set(svg, {
    viewBox: `0 0 ${width} ${height}`,
    width: Math.floor(width * scale),
    height: Math.floor(height * scale),
    "aria-label": describe(round),
  });
  const tip = byNode.get(tree.tokens.length);
  frame.scrollLeft = (tip.x + tip.width + PAD) * scale - frame.clientWidth;
  return numFolded;
}

/** Places the boxes of the nodes: a column per depth, as wide as its widest label. Wide trees are scaled down. */
function place({ nodes, numRows, numFolded }, labels, measure, frameWidth) {
  const columns = [];
  const boxes = nodes.map((node) => {
    const more = node.folded ? `\u00a0+${node.folded}` : "";
    const width = measure(labels[node.node] + more) + 2 * INSET;
    columns[node.depth] = Math.max(columns[node.depth] ?? 0, width);
    return { ...node, text: labels[node.node], more, width, y: PAD / 2 + ROW * (node.row + 0.5) };
  });
  let right = PAD;
  const left = columns.map((width) => (right += width + GAP) - width - GAP);
  const width = right - GAP + PAD;
  const scale = Math.min(1, Math.max(MIN_SCALE, (frameWidth - PAD) / width));
  const placed = boxes.map((box) => ({ ...box, x: left[box.depth] }));
  return { nodes: placed, width, height: numRows * ROW + PAD, scale, numFolded };
}

/** `16 nodes, 3 accepted + 1`: the last is the bonus token. */
export function countNodes({ tree }) {
  const size = tree.tokens.length;
  return `${size} node${size > 1 ? "s" : ""}, ${tree.path.length - 1} accepted + 1`;
}

/** Log-probability of a node given its parent; scores are sums along the path. */
export function nodeLogprob(tree, node) {
  return tree.scores[node] - tree.scores[tree.parents[node]];
}

function describe({ round, tree }) {
  const path = tree.path.slice(1).map((node) => tree.tokens[node]).join("");
  return `Round ${round}: ${countNodes({ tree })}. Accepted: “${path}”, then “${tree.bonus}”.`;
}

/** Label of a token; spaces at its ends are shown as dots. */
function label(text) {
  const shown = text.replace(/ {2,}/g, "··").replace(/^ | $/g, "·") || "∅";
  return shown.length > MAX_LABEL ? `${shown.slice(0, MAX_LABEL - 1)}…` : shown;
}

const canvas = document.createElement("canvas").getContext("2d");

function ruler(svg) {
  const style = getComputedStyle(svg);
  canvas.font = `${style.fontSize} ${style.fontFamily}`;
  return (text) => Math.ceil(canvas.measureText(text).width);
}

function link(parent, child, tree) {
  const [start, end] = [parent.x + parent.width, child.x];
  const middle = end - GAP / 2;
  const isLit = child.kind !== "dropped";
  const chance = child.kind === "bonus" ? 1 : Math.exp(Math.min(nodeLogprob(tree, child.node), 0));
  return make("path", {
    class: `${child.kind}${isLit ? " lit" : ""}`,
    d: `M${start} ${parent.y}C${middle} ${parent.y} ${middle} ${child.y} ${end} ${child.y}`,
    "stroke-width": (1 + 2.5 * (Number.isFinite(chance) ? chance : 0)).toFixed(1),
  });
}

function boxOf(box) {
  const group = make("g", { class: box.kind, "data-node": box.node });
  const text = make("text", { x: box.x + INSET, y: box.y + 4 });
  text.textContent = box.text;
  if (box.more) {
    const more = make("tspan", { class: "more" });
    more.textContent = box.more;
    text.append(more);
  }
  const shape = { x: box.x, y: box.y - BOX / 2, width: box.width, height: BOX, rx: 5 };
  group.append(make("rect", shape), text);
  return group;
}
