// One answer as it grows: its tokens by origin, the drafts rejected beside them, its rounds, and a line that explains a token.
//
// Keyboard: the answer is one stop of Tab; the arrow keys go from token to token.

import { make } from "./dom.js";
import { classOf, isAccepted, meaningOf, nameOf } from "./origins.js";

export class Answer {
  constructor() {
    this.tokens = []; // {id, text, origin, element}
    this.rejected = new Map(); // place -> drafts that were rejected there
    this.rounds = []; // {place, step_ms, wait_ms}
    this.text = "";
    this.finish = null; // why it ended, as the API has it
    this.current = -1;
    this.body = make("div", { class: "tokens", tabindex: "0", role: "group",
      "aria-label": "Answer. Arrow keys show where each token comes from" });
    this.line = make("p", { class: "explained", "aria-live": "polite" });
    this.element = make("li", { class: "answer" }, this.body, this.line);
    this.body.addEventListener("keydown", (event) => this.#key(event));
    for (const kind of ["pointerover", "click"]) {
      this.body.addEventListener(kind, (event) => this.#pointed(event.target));
    }
  }

  // Add a chunk: its text, and the data of each token.
  take(chunk) {
    const content = chunk.choices?.[0]?.delta?.content ?? "";
    this.text += content;
    this.finish = chunk.choices?.[0]?.finish_reason ?? this.finish;
    const details = chunk.specq;
    if (!details) return;
    this.rounds.push(...details.rounds);
    this.#reject(details.rejected);
    for (const token of details.tokens) this.#add(token);
  }

  // Show that the answer was cut, if it was.
  end() {
    if (this.finish !== "length") return;
    const said = `Cut here, after ${this.tokens.length} tokens. Raise “Maximum tokens” in Settings for longer answers.`;
    this.element.append(make("p", { class: "quiet cut" }, said));
  }

  #add(token) {
    const element = make("span", { class: classOf(token.origin) }, token.text);
    const place = this.tokens.push({ ...token, element }) - 1;
    element.dataset.place = place;
    const rejected = this.rejected.get(place);
    if (rejected) {
      element.classList.add("has-rejected");
      this.body.append(this.#drafts(rejected));
    }
    this.body.append(element);
  }

  // Drafts at a place of the text. Drafts below a rejected one are shown behind it.
  #reject(drafts) {
    const heads = drafts.map((draft) => ({ ...draft, chain: draft.text }));
    drafts.forEach((draft, i) => {
      if (draft.parent < 0) return;
      let head = i;
      while (drafts[head].parent >= 0) head = drafts[head].parent;
      heads[head].chain += draft.text;
    });
    for (const draft of heads.filter((one) => one.parent < 0)) {
      this.rejected.set(draft.place, [...(this.rejected.get(draft.place) ?? []), draft]);
    }
  }

  #drafts(rejected) {
    return make("span", { class: "drafts", "aria-hidden": "true" },
      ...rejected.map((draft) => make("del", { class: classOf(draft.origin) }, draft.chain)));
  }

  #pointed(target) {
    const place = target.closest?.("[data-place]")?.dataset.place;
    if (place !== undefined) this.show(Number(place));
  }

  #key(event) {
    const moves = { ArrowRight: this.current + 1, ArrowLeft: this.current - 1, Home: 0, End: this.tokens.length - 1 };
    if (!(event.key in moves) || !this.tokens.length) return;
    event.preventDefault();
    this.show(Math.min(Math.max(moves[event.key], 0), this.tokens.length - 1));
  }

  // Explain one token.
  show(place) {
    this.tokens[this.current]?.element.classList.remove("is-current");
    this.current = place;
    const token = this.tokens[place];
    token.element.classList.add("is-current");
    const rejected = this.rejected.get(place) ?? [];
    this.line.replaceChildren(
      make("span", { class: classOf(token.origin) }, visible(token.text)), ` ${meaningOf(token.origin)}.`,
      ...(rejected.length ? [" Rejected here: "] : []),
      ...rejected.flatMap((draft) => [
        make("del", { class: classOf(draft.origin) }, visible(draft.chain)),
        ` (${nameOf(draft.origin)}, expected acceptance ${Math.round(draft.accept_prob * 100)}%) `,
      ]),
    );
  }

  // The number of drafts that each round accepted.
  acceptedLengths() {
    const starts = this.rounds.map((round) => round.place);
    return starts.map((start, i) => {
      const end = starts[i + 1] ?? this.tokens.length;
      return this.tokens.slice(start, end).filter((token) => isAccepted(token.origin)).length;
    });
  }
}

function visible(text) {
  return text.replaceAll("\n", "⏎").replaceAll(" ", "␣") || "∅";
}
