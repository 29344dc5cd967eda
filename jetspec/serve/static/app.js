/** The playground: the conversation, its settings, keyboard and mouse. */

import { RequestError, decode, readModel, useKey } from "./api.js";
import { Answer, about, neighbour } from "./answer.js";
import { Instruments } from "./instruments.js";
import { runRace } from "./race.js";
import { showTip } from "./tip.js";

const at = (id) => document.getElementById(id);
const instruments = new Instruments();
const sliders = ["budget", "width", "temperature", "length"];
const NEAR_END = 80;

let model = null;
let messages = [];
let running = null;
let isAtEnd = true;

// --- requests

/** Body of a request. `tree` overrides the tree settings of the sliders. */
function requestBody(tree = {}) {
  const number = (id) => Number(at(id).value);
  const shape = { trace: true, budget: number("budget"), width: number("width"), ...tree };
  return { model: model.id, messages, temperature: number("temperature"), max_tokens: number("length"), jetspec: shape };
}

async function chat(turn, signal) {
  const answer = new Answer(turn.querySelector(".answer"));
  instruments.follow(answer);
  const take = (text, round) => {
    answer.add(text, round);
    instruments.grown(answer);
    keepEndInView();
  };
  try {
    const setting = samplingSetting();
    const { finish, seconds } = await decode(requestBody(), signal, take);
    turn.querySelector(".sum").textContent = summary(answer, setting, seconds, finish);
  } catch (error) {
    if (error.name !== "AbortError") throw error;
    turn.querySelector(".sum").textContent = "stopped";
  }
  return answer.text;
}

function race(turn, signal) {
  // One seed: the same text at any temperature. Two salts: neither request finds its prompt cached.
  const seed = Math.floor(Math.random() * 2 ** 31);
  const start = (tree, take) => {
    const body = { ...requestBody(tree), seed, cache_salt: String(Math.random()) };
    return decode(body, signal, (...taken) => {
      take(...taken);
      keepEndInView();
    });
  };
  const [length, setting] = [Number(at("length").value), samplingSetting()];
  return runRace(turn, { start, length, setting, signal, instruments });
}

/** Run `job` on the prompt in the text box. After an error the prompt is put back. */
async function submit(template, job) {
  const prompt = at("prompt").value.trim();
  if (!prompt || running) return;
  clearErrors();
  if (!model) await loadModel();
  if (!model || running) return;
  running = new AbortController();
  const turn = addTurn(template, prompt);
  const conversation = messages; // "New chat" may replace it before the answer is complete
  conversation.push({ role: "user", content: prompt });
  at("prompt").value = "";
  showState();
  try {
    const text = await job(turn, running.signal);
    conversation.push({ role: "assistant", content: text });
    at("status").textContent = "The answer is complete.";
  } catch (error) {
    conversation.pop();
    if (conversation === messages && !at("prompt").value) at("prompt").value = prompt;
    if (error.name === "AbortError") at("status").textContent = "Stopped.";
    else showError(error, turn);
  } finally {
    running = null;
    turn.querySelector(".stage")?.remove();
    showState();
    keepEndInView();
  }
}

/** Sampled text takes more rounds than greedy text, so figures name what they are of. */
function samplingSetting() {
  const temperature = Number(at("temperature").value);
  return temperature ? `sampled at temperature ${temperature}` : "greedy";
}

function summary(answer, setting, seconds, finish) {
  const { tokens, rounds } = answer;
  const perRound = rounds.length ? (tokens / rounds.length).toFixed(2) : "–";
  const counts = `${tokens} tokens in ${rounds.length} rounds`;
  const facts = [counts, `${perRound} tokens per round, ${setting}`, `${seconds.toFixed(1)} s`];
  if (finish === "length") facts.push("cut at the length limit");
  return facts.join(" · ");
}

// --- showing

function addTurn(template, prompt) {
  at("welcome").hidden = true;
  const turn = at(template).content.firstElementChild.cloneNode(true);
  turn.querySelector(".asked").textContent = prompt;
  at("turns").append(turn);
  isAtEnd = true;
  keepEndInView();
  return turn;
}

function showError(error, turn) {
  if (!(error instanceof RequestError)) console.error(error);
  const words = error instanceof RequestError ? error.message : "The page has failed; see its console.";
  if (error.status === 401) askForKey(words);
  const card = document.createElement("p");
  card.className = "error";
  card.setAttribute("role", "alert");
  card.textContent = words;
  if (turn?.querySelector(".answer").textContent === "") turn.replaceWith(card);
  else at("turns").append(card);
}

function clearErrors() {
  for (const card of at("turns").querySelectorAll(".error")) card.remove();
}

/** Scroll to the end, unless the user has scrolled up. */
function keepEndInView() {
  if (isAtEnd) at("thread").scrollTop = at("thread").scrollHeight;
}

function showState() {
  at("send").hidden = at("race").hidden = Boolean(running);
  at("stop").hidden = !running;
  at("race").disabled = !hasDrafter();
  at("thread").setAttribute("aria-busy", String(Boolean(running)));
}

const hasDrafter = () => Boolean(model) && model.jetspec.drafter !== "none" && model.jetspec.budget > 1;

function showSliders() {
  for (const id of sliders) {
    const value = Number(at(id).value);
    at(`${id}-now`).textContent = id === "temperature" ? value.toFixed(1) : value;
  }
}

// --- the model and its key

async function loadModel() {
  try {
    model = await readModel();
  } catch (error) {
    return showError(error);
  }
  const { drafter, budget, width } = model.jetspec;
  at("model").textContent = model.id;
  for (const [id, most] of [["budget", budget], ["width", width]]) {
    at(id).max = most;
    at(id).value = most;
    at(id).disabled = !hasDrafter();
  }
  const longest = Math.min(at("length").max, model.jetspec.max_tokens);
  if (longest < at("length").step * 2) at("length").min = at("length").step = 1;
  at("length").max = longest;
  if (!hasDrafter()) at("race").title = "This server has no drafter: it decodes plainly";
  else if (drafter === "ngram") at("model").textContent += " · n-gram drafts";
  showSliders();
  showState();
}

function askForKey(why) {
  at("key-error").textContent = why;
  at("key").value = "";
  if (!at("key-dialog").open) at("key-dialog").showModal();
}

// --- keys and clicks

at("composer").addEventListener("submit", (event) => {
  event.preventDefault();
  submit("turn", chat);
});
at("race").addEventListener("click", () => submit("race-turn", race));
at("stop").addEventListener("click", () => {
  running?.abort();
  at("prompt").focus();
});
at("prompt").addEventListener("keydown", (event) => {
  if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
  event.preventDefault();
  at("composer").requestSubmit();
});
addEventListener("keydown", (event) => {
  if (event.key !== "Escape") return;
  showTip(null);
  running?.abort();
});
at("new-chat").addEventListener("click", () => {
  running?.abort();
  messages = [];
  at("turns").replaceChildren();
  at("welcome").hidden = false;
  instruments.follow(null);
  at("prompt").focus();
});
at("examples").addEventListener("click", ({ target }) => {
  if (!target.matches("button")) return;
  at("prompt").value = target.textContent;
  at("prompt").focus();
});
at("key-dialog").addEventListener("close", () => {
  if (!at("key").value) return;
  useKey(at("key").value);
  clearErrors();
  loadModel();
});
for (const id of sliders) at(id).addEventListener("input", showSliders);

at("thread").addEventListener("keydown", (event) => {
  if (!event.target.matches(".token")) return;
  const next = neighbour(event.target, event.key);
  if (!next) return;
  event.preventDefault();
  next.focus();
});
at("thread").addEventListener("focusin", ({ target }) => {
  if (!target.matches(".token")) return;
  const { answer, round } = about(target);
  for (const span of answer.element.querySelectorAll('[tabindex="0"]')) span.tabIndex = -1;
  target.tabIndex = 0;
  if (round) instruments.show(answer, round);
  showTip(target);
});
at("thread").addEventListener("focusout", () => showTip(null));
at("thread").addEventListener("click", ({ target }) => target.matches(".token") && target.focus());
addEventListener("pointerover", ({ target }) => {
  showTip(target.closest(".token, #tree g[data-node]") ?? focusedToken(), instruments.round);
});
addEventListener("scroll", () => showTip(null), { capture: true, passive: true });
at("thread").addEventListener("scroll", ({ target }) => {
  isAtEnd = target.scrollHeight - target.scrollTop - target.clientHeight < NEAR_END;
});

const focusedToken = () => (document.activeElement?.matches(".token") ? document.activeElement : null);

at("settings").open = matchMedia("(min-width: 60rem)").matches;
showSliders();
showState();
loadModel();
