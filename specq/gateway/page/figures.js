// The numbers of an answer, and its comparison with a plain run.

import { make, drawn, rounded } from "./dom.js";
import { LEGEND, classOf, nameOf } from "./origins.js";

const WIDTH = 300, HEIGHT = 56;

export function showFigures(parent, answer, stats) {
  const lengths = answer.acceptedLengths();
  const times = answer.rounds.map((round) => round.step_ms);
  const mean = stats?.mean_accepted_length ?? (answer.rounds.length ? answer.tokens.length / answer.rounds.length : NaN);
  parent.replaceChildren(
    make("dl", { class: "numbers" },
      ...number("tokens per round", rounded(mean, 2)),
      ...number("tokens/s", rounded(stats?.choices?.[0]?.tokens_per_second)),
      ...number("accepted drafts", stats ? `${stats.accepted_tokens} of ${stats.draft_tokens}` : "–"),
      ...number("median time per round", times.length ? `${rounded(median(times))} ms` : "–")),
    share(answer),
    histogram(lengths),
    roundTimes(times),
  );
}

const number = (name, value) => [make("dt", {}, name), make("dd", {}, value)];

// The share of tokens of each origin, as one bar.
function share(answer) {
  const counts = LEGEND.map((origin) => [origin, answer.tokens.filter((token) => token.origin === origin).length]);
  const there = counts.filter(([, count]) => count);
  const bar = make("div", { class: "share", role: "img",
    "aria-label": `Tokens: ${there.map(([origin, count]) => `${count} ${nameOf(origin)}`).join(", ") || "none"}` });
  for (const [origin, count] of there) {
    const part = make("span", { class: classOf(origin) }, String(count));
    part.style.flexGrow = count;
    bar.append(part);
  }
  return bar;
}

// Rounds by the number of drafts that they accepted.
function histogram(lengths) {
  const counts = [];
  for (const length of lengths) counts[length] = (counts[length] ?? 0) + 1;
  const shown = Array.from(counts, (count) => count ?? 0);
  const most = Math.max(1, ...shown), step = WIDTH / Math.max(shown.length, 9);
  const label = shown.map((count, length) => `${length}: ${count}`).join(", ");
  const bars = shown.flatMap((count, length) => {
    const height = (HEIGHT - 26) * count / most;
    const middle = (length + 0.5) * step;
    return [
      drawn("rect", { x: length * step + 3, y: HEIGHT - 14 - height, width: step - 6, height, rx: 2 }),
      drawn("text", { x: middle, y: HEIGHT - 2 }, step < 15 && length % 2 ? "" : String(length)),
      drawn("text", { x: middle, y: HEIGHT - 17 - height }, count ? String(count) : ""),
    ];
  });
  return figure("Accepted draft tokens per round", label, bars);
}

// The last rounds' times.
function roundTimes(times) {
  const last = times.slice(-100), sorted = last.toSorted((a, b) => a - b);
  const most = (sorted[Math.floor(sorted.length * 0.98)] ?? 1) * 1.1;
  const step = WIDTH / Math.max(last.length, 30);
  const bars = last.map((time, i) => {
    const height = Math.min(1, time / most) * (HEIGHT - 16);
    return drawn("rect", { x: i * step, y: HEIGHT - 2 - height, width: Math.max(step - 1, 0.5), height });
  });
  const label = last.length ? `median ${rounded(median(last))} ms, longest ${rounded(sorted.at(-1))} ms` : "none";
  return figure(`Time per round: ${label}`, label, bars);
}

function figure(title, label, bars) {
  return make("figure", {}, make("figcaption", {}, title),
    drawn("svg", { viewBox: `0 0 ${WIDTH} ${HEIGHT}`, role: "img", "aria-label": `${title}: ${label || "none"}` }, ...bars));
}

function median(values) {
  return values.toSorted((a, b) => a - b)[Math.floor(values.length / 2)];
}

export function showComparison(parent, drafted, plain) {
  const [fast, slow] = [drafted, plain].map((run) => run.stats?.choices?.[0]?.tokens_per_second ?? NaN);
  const same = drafted.text === plain.text;
  parent.replaceChildren(
    make("p", { class: "ratio" }, `${rounded(fast / slow, 2)}×`, make("span", {}, ` speedup, ${rounded(fast)} vs ${rounded(slow)} tokens/s`)),
    make("p", { class: same ? "same" : "differs" }, same ? "✓ The texts are the same." : "≠ The texts differ. With the strategy deterministic they are the same."),
  );
}
