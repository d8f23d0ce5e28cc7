// The live map: gateway, broker, verifiers, drafters, and their messages. The table below has the same data as text.

import { make, drawn, rounded } from "./dom.js";

const WIDTH = 320, ROW = 46, BOX = { width: 104, height: 34 };
const COLUMNS = { gateway: 4, broker: 4, worker: WIDTH - BOX.width - 4 };
const MOST_SHOWN = 8;

export class WorkMap {
  constructor(parent) {
    this.before = null; // {at, report}
    this.picture = drawn("svg", { "aria-hidden": "true", class: "map" });
    this.rows = make("tbody");
    const heads = ["worker", "role", "jobs", "steps/s"].map((name) => make("th", { scope: "col" }, name));
    this.sum = make("p", { class: "quiet" });
    parent.append(this.picture, this.sum,
      make("table", {}, make("caption", { class: "hidden" }, "Workers"), make("thead", {}, make("tr", {}, ...heads)), this.rows));
  }

  show(report) {
    const now = performance.now();
    const seconds = this.before ? (now - this.before.at) / 1000 : 0;
    const steps = new Map((this.before?.report.workers ?? []).map((worker) => [identity(worker), worker.steps]));
    const workers = report.workers.map((worker) => ({
      ...worker,
      rate: seconds && steps.has(identity(worker)) ? Math.max(0, worker.steps - steps.get(identity(worker))) / seconds : 0,
    })).toSorted((a, b) => (a.role === b.role ? a.name.localeCompare(b.name) : a.role === "target" ? -1 : 1));
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
    const busy = report.jobs.running + report.jobs.waiting > 0;
    this.picture.replaceChildren(
      ...lines,
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
      make("td", {}, String(worker.jobs)), make("td", {}, rounded(worker.rate, 0)))));
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

function box(x, y, title, text, kind) {
  return drawn("g", { class: `box ${kind}` },
    drawn("rect", { x, y, ...BOX, rx: kind === "draft" ? 17 : 5 }),
    drawn("text", { x: x + BOX.width / 2, y: y + 14, class: "title" }, title),
    drawn("text", { x: x + BOX.width / 2, y: y + 27 }, text.length > 22 ? `${text.slice(0, 21)}…` : text));
}
