// The live map: gateway, broker, verifiers, drafters, and their messages. The table below has the same data as text.

import { make, drawn, rounded } from "./dom.js";

const WIDTH = 344, ROW = 46, BOX = { width: 104, height: 34 };
const COLUMNS = { gateway: 4, broker: 4, worker: WIDTH - BOX.width - 28 };
const MOST_SHOWN = 8;

export class WorkMap {
  constructor(parent) {
    this.before = null; // {at, report}
    this.picture = drawn("svg", { "aria-hidden": "true", class: "map" });
    this.rows = make("tbody");
    const heads = ["worker", "role", "jobs", "steps/s", "drafts for (accepted tokens/s)"].map((name) => make("th", { scope: "col" }, name));
    this.sum = make("p", { class: "quiet" });
    parent.append(this.picture, this.sum,
      make("table", {}, make("caption", { class: "hidden" }, "Workers"), make("thead", {}, make("tr", {}, ...heads)), this.rows));
  }

  show(report) {
    const now = performance.now();
    const seconds = this.before ? (now - this.before.at) / 1000 : 0;
    const known = new Map((this.before?.report.workers ?? []).map((worker) => [identity(worker), worker]));
    const workers = report.workers.map((worker) => {
      const former = known.get(identity(worker));
      const rate = (now, before) => (seconds && former ? Math.max(0, (now ?? 0) - (before ?? 0)) / seconds : 0);
      const accepted = worker.metrics?.accepted_for ?? {}, earlier = former?.metrics?.accepted_for ?? {};
      const served = new Set([...Object.keys(worker.drafts_for ?? {}), ...Object.keys(accepted)]);
      const pairs = [...served].sort().map((name) => ({ name, rate: rate(accepted[name], earlier[name]) }));
      return { ...worker, rate: rate(worker.steps, former?.steps), pairs };
    }).toSorted((a, b) => (a.role === b.role ? a.name.localeCompare(b.name) : a.role === "target" ? -1 : 1));
    this.before = { at: now, report };
    this.#draw(report, workers);
    this.#tell(report, workers);
  }

  #draw(report, workers) {
    const shown = workers.slice(0, MOST_SHOWN);
    const height = Math.max(2, shown.length) * ROW + 6;
    const middle = height / 2;
    const places = [middle - ROW, middle];
    this.picture.setAttribute("viewBox", `0 0 ${WIDTH} ${height}`);
    const lines = shown.map((worker, i) => line(places[1] + BOX.height / 2 - 8, i * ROW + 6 + BOX.height / 2, worker));
    const places_of = new Map(shown.map((worker, i) => [worker.role === "target" ? worker.name : "", i]));
    const arcs = shown.flatMap((worker, i) => worker.pairs.filter((pair) => places_of.has(pair.name))
      .map((pair) => arc(i, places_of.get(pair.name), worker, pair)));
    const busy = report.jobs.running + report.jobs.waiting > 0;
    this.picture.replaceChildren(
      ...lines, ...arcs,
      drawn("path", { class: `wire ${busy ? "busy" : ""}`, d: `M${COLUMNS.broker + BOX.width / 2} ${places[0] + BOX.height} V${places[1]}` }),
      box(COLUMNS.gateway, places[0], "gateway", "this page", "gateway"),
      box(COLUMNS.broker, places[1] - 2, "broker", `${report.jobs.running} running, ${report.jobs.waiting} waiting`, "broker"),
      ...shown.map((worker, i) => box(COLUMNS.worker, i * ROW + 6, does(worker), worker.model, worker.role)),
    );
  }

  #tell(report, workers) {
    const { running, waiting, finished } = report.jobs;
    this.sum.textContent = `Jobs: ${running} running, ${waiting} waiting, ${finished} finished. Journal: ${report.journal.records} records.`;
    this.rows.replaceChildren(...workers.map((worker) => make("tr", {},
      make("th", { scope: "row" }, worker.name), make("td", {}, worker.state === "ready" ? does(worker) : worker.state),
      make("td", {}, String(worker.jobs)), make("td", {}, rounded(worker.rate, 0)),
      make("td", {}, worker.pairs.map((pair) => `${pair.name} (${rounded(pair.rate, 0)})`).join(", ")))));
  }
}

const identity = (worker) => `${worker.incarnation} ${worker.name}`; // two may have one name
const does = (worker) => (worker.role === "target" ? "verifier" : "draft worker");

function line(from, to, worker) {
  const left = COLUMNS.broker + BOX.width, right = COLUMNS.worker, middle = (left + right) / 2;
  const width = worker.rate ? Math.min(5, 1.5 + Math.log10(1 + worker.rate)) : 1.5;
  const path = drawn("path", { class: `wire ${worker.role} ${worker.rate ? "busy" : ""}`,
    d: `M${left} ${from} C${middle} ${from} ${middle} ${to} ${right} ${to}` });
  path.style.strokeWidth = width;
  return path;
}

// From a draft worker to a verifier that it drafts for, at the right of both.
function arc(from, to, worker, pair) {
  const right = COLUMNS.worker + BOX.width, [start, end] = [from, to].map((place) => place * ROW + 6 + BOX.height / 2);
  const path = drawn("path", { class: `wire draft ${pair.rate ? "busy" : ""}`,
    d: `M${right} ${start} C${right + 26} ${start} ${right + 26} ${end} ${right} ${end}` },
  drawn("title", {}, `${worker.name} drafts for ${pair.name}: ${rounded(pair.rate, 0)} accepted tokens/s`));
  path.style.strokeWidth = pair.rate ? Math.min(5, 1.5 + Math.log10(1 + pair.rate)) : 1.5;
  return path;
}

function box(x, y, title, text, kind) {
  return drawn("g", { class: `box ${kind}` },
    drawn("rect", { x, y, ...BOX, rx: kind === "draft" ? 17 : 5 }),
    drawn("text", { x: x + BOX.width / 2, y: y + 14, class: "title" }, title),
    drawn("text", { x: x + BOX.width / 2, y: y + 27 }, text.length > 22 ? `${text.slice(0, 21)}…` : text));
}
