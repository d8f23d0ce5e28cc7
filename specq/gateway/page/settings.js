// Settings: the form's values, stored in this browser. The API key is stored for this tab only.

import { $, make } from "./dom.js";

const STRATEGIES = ["deterministic", "probabilistic", "threshold", "typical", "greedy"];
const FIELDS = [
  { name: "system", label: "System prompt", kind: "textarea", value: "" },
  { name: "temperature", label: "Temperature", hint: "0: greedy decoding", kind: "number", value: 0, min: 0, max: 100, step: 0.05 },
  { name: "seed", label: "Seed", hint: "empty: a random seed for each answer", kind: "number", value: "", min: 0, max: 2 ** 53 - 1, step: 1 },
  { name: "max_tokens", label: "Maximum tokens", hint: "a longer answer is cut there, with a note", kind: "number", value: 256, min: 1, max: 100000, step: 1 },
  { name: "mode", label: "Mode", kind: "select", value: "async", options: ["async", "sync", "jit", "plain"] },
  { name: "strategy", label: "Strategy", hint: "the first two keep the model's own output", kind: "select", value: "deterministic", options: STRATEGIES },
  { name: "model", label: "Model", kind: "select", value: "", options: [] },
  { name: "key", label: "API key", hint: "if the gateway requires one; kept for this tab only", kind: "text", value: "" },
];
const PLACE = "specq-settings";

export class Settings {
  constructor() {
    const fresh = Object.fromEntries(FIELDS.map((field) => [field.name, field.value]));
    this.values = { ...fresh, ...read(localStorage), ...read(sessionStorage) };
    $("fields").append(...FIELDS.map((field) => this.#field(field)));
    $("reset").addEventListener("click", () => this.#set({ ...fresh, key: this.values.key }));
    $("open-settings").addEventListener("click", () => $("settings").showModal());
    $("settings-form").addEventListener("input", () => this.#read());
    $("settings-form").addEventListener("change", () => this.#read());
    this.#set(this.values);
  }

  #field({ name, label, hint, kind, options, ...rest }) {
    const id = `set-${name}`;
    const tag = kind === "textarea" || kind === "select" ? kind : "input";
    const control = make(tag, { id, name, ...(tag === "input" ? { type: kind, autocomplete: "off" } : {}),
      ...(kind === "textarea" ? { rows: 3 } : {}), ...limits(rest), ...(hint ? { "aria-describedby": `${id}-hint` } : {}) });
    for (const option of options ?? []) control.append(make("option", { value: option }, option));
    return make("div", { class: "field" }, make("label", { for: id }, label), control,
      ...(hint ? [make("small", { id: `${id}-hint` }, hint)] : []));
  }

  #set(values) {
    for (const { name } of FIELDS) $(`set-${name}`).value = values[name] ?? "";
    this.#read();
  }

  #read() {
    // While no models are known, the chosen one stays.
    for (const { name } of FIELDS) if ($(`set-${name}`).options?.length !== 0) this.values[name] = $(`set-${name}`).value;
    const { key, ...others } = this.values;
    write(localStorage, others);
    write(sessionStorage, { key });
  }

  offer(models) {
    const select = $("set-model"), wanted = this.values.model;
    const names = [...select.options].map((option) => option.value);
    if (!models.length || names.join("\n") === models.join("\n")) return;
    select.replaceChildren(...models.map((model) => make("option", { value: model }, model)));
    select.value = models.includes(wanted) ? wanted : models[0] ?? "";
    this.#read();
  }

  askForKey() {
    if ($("settings").open) return;
    $("settings").showModal();
    $("set-key").focus();
  }

  // The body of a chat's request. The seed is drawn here, because the broker's have too many digits for JavaScript numbers.
  body(messages) {
    const { system, temperature, seed, max_tokens, mode, strategy, model } = this.values;
    const first = system.trim() ? [{ role: "system", content: system }] : [];
    return {
      messages: [...first, ...messages], explain: true, mode, strategy, ...(model ? { model } : {}),
      temperature: Number(temperature) || 0, max_tokens: Number(max_tokens) || 256,
      seed: seed === "" ? crypto.getRandomValues(new Uint32Array(1))[0] : Number(seed),
    };
  }
}

const limits = ({ min, max, step }) => ({ min, max, step });

function read(storage) {
  try {
    return JSON.parse(storage.getItem(PLACE) ?? "{}");
  } catch {
    return {};
  }
}

function write(storage, values) {
  try {
    storage.setItem(PLACE, JSON.stringify(values));
  } catch { /* a browser without storage */ }
}
