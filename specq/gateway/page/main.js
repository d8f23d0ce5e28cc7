// The page: a chat whose tokens show their origin. It connects the other modules, which draw the parts.

import { Answer } from "./answer.js";
import { chat, getJson } from "./api.js";
import { showBatches } from "./batches.js";
import { $, make } from "./dom.js";
import { showComparison, showFigures } from "./figures.js";
import { WorkMap } from "./map.js";
import { LEGEND, classOf, isAccepted, legendOf, nameOf } from "./origins.js";
import { Settings } from "./settings.js";

const EXAMPLES = ["Name three colours and say what each reminds you of.", "Write a Python function that adds two numbers.",
  "Why is the sky blue? Answer in two sentences."];
const STATUS_MS = 1500;

const settings = new Settings();
const map = new WorkMap($("map"));
let messages = []; // of the conversation, as the API has them
let running = null; // what stops the answer that is under way
let last = null; // {answer, body, stats} of the last one

// --- one run ---------------------------------------------------------------------------------------------------------

async function run(body, take) {
  running = new AbortController();
  mark(true);
  try {
    for await (const chunk of chat(body, settings.values.key, running.signal)) take(chunk);
    return true;
  } catch (error) {
    if (error.name !== "AbortError") fail(error);
    return false;
  } finally {
    running = null;
    mark(false);
  }
}

function mark(busy) {
  $("send").hidden = busy;
  $("stop").hidden = !busy;
  $("compare").disabled = busy || !last?.stats;
  document.body.classList.toggle("is-busy", busy);
}

function fail(error) {
  $("error").textContent = error.message;
  if (error.status === 401) settings.askForKey();
}

// --- chat ------------------------------------------------------------------------------------------------------------

async function ask(text) {
  if (running || !text.trim()) return;
  $("error").textContent = $("said").textContent = "";
  $("comparison").replaceChildren();
  $("welcome").hidden = true;
  $("prompt").value = "";
  const asked = [...messages, { role: "user", content: text }];
  const answer = new Answer(), body = { ...settings.body(asked), ...format() };
  $("messages").append(make("li", { class: "question" }, text), answer.element);
  const mine = last = { answer, body, stats: null };
  const whole = await run(body, (chunk) => {
    answer.take(chunk);
    mine.stats = chunk.usage?.speculation ?? mine.stats;
    refresh();
    answer.element.scrollIntoView({ block: "end" });
  });
  if (last !== mine) return; // another chat has begun
  answer.end();
  if (answer.text || whole) messages = [...asked, { role: "assistant", content: answer.text }];
  showFigures($("figures"), answer, last.stats);
  $("said").textContent = answer.text;
  $("prompt").focus();
}

// The schema is sent as text, since JavaScript would change the order of some keys.
function format() {
  const json = $("schema").value.trim();
  return json ? { structured_outputs: { json } } : {};
}

let isDue = false;
function refresh() {
  if (isDue) return;
  isDue = true;
  requestAnimationFrame(() => {
    isDue = false;
    if (last) showFigures($("figures"), last.answer, last.stats);
  });
}

// The same messages and seed, without drafts.
async function compare() {
  const { body, stats, answer } = last;
  const plain = { text: "", stats: null };
  $("comparison").replaceChildren(make("p", { class: "quiet" }, "The same prompt and seed without drafts …"));
  const whole = await run({ ...body, mode: "plain", strategy: "deterministic", explain: false }, (chunk) => {
    plain.text += chunk.choices?.[0]?.delta?.content ?? "";
    plain.stats = chunk.usage?.speculation ?? plain.stats;
  });
  if (whole) showComparison($("comparison"), { text: answer.text, stats }, plain);
  else $("comparison").replaceChildren();
}

// --- always visible --------------------------------------------------------------------------------------------------

async function watch() {
  if (!document.hidden) {
    try {
      const report = await getJson("/specq/status", settings.values.key);
      settings.offer(report.models);
      map.show(report);
      await showBatches(settings.values.key);
      for (const item of $("legend").children) item.hidden = !isThere(report, item.dataset.origin);
      state(report.models.length ? `${report.models.join(", ")} · specq ${report.version}` : "waiting for a verifier", report.models.length > 0);
    } catch (error) {
      state(error.status === 401 ? "needs an API key" : "not reachable", false);
    }
  }
  setTimeout(watch, STATUS_MS);
}

// Whether tokens of an origin are expected. A source counts if it is in use, or has sent drafts before.
function isThere(report, origin) {
  if (!isAccepted(origin)) return true;
  const verifiers = report.workers.filter((worker) => worker.role === "target").map((worker) => worker.metrics ?? {});
  const isOf = (label) => label.split(" ")[0].split("+").includes(origin);
  return (origin === "draft worker" && report.workers.some((worker) => worker.role === "draft"))
    || verifiers.some((metrics) => metrics.judged?.[origin]?.[0] > 0 || Object.keys(metrics.choices ?? {}).some(isOf));
}

function state(text, isReady) {
  if ($("state").textContent !== text) $("state").textContent = text;
  $("state").classList.toggle("is-ready", isReady);
}

$("legend").append(...LEGEND.map((origin) =>
  make("li", { "data-origin": origin }, make("span", { class: classOf(origin) }, nameOf(origin)), ` ${legendOf(origin)}`)));
$("examples").append(...EXAMPLES.map((text) => {
  const button = make("button", { type: "button" }, text);
  button.addEventListener("click", () => ask(text));
  return button;
}));
$("form").addEventListener("submit", (event) => {
  event.preventDefault();
  ask($("prompt").value);
});
$("prompt").addEventListener("keydown", (event) => {
  if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
  event.preventDefault();
  $("form").requestSubmit();
});
$("schema").addEventListener("input", () => { $("schema-state").textContent = $("schema").value.trim() ? "given" : "none"; });
$("stop").addEventListener("click", () => running?.abort());
$("compare").addEventListener("click", compare);
$("show-rejected").addEventListener("change", (event) => document.body.classList.toggle("shows-rejected", event.target.checked));
$("new-chat").addEventListener("click", () => {
  running?.abort();
  messages = [];
  last = null;
  $("messages").replaceChildren();
  $("comparison").replaceChildren();
  $("welcome").hidden = false;
  mark(false);
  $("prompt").focus();
});
watch();
