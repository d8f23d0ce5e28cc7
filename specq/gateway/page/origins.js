// Where tokens come from: names as the API has them, and how they are shown.
// Names of sources are those of SHOWN in specq/protocol/origins.py. To add one: a line here, and its shape and colour in style.css.

export const ORIGINS = {
  "draft worker": ["worker", "accepted: draft worker"],
  colocated: ["colocated", "accepted: draft model in the verifier"],
  suffix: ["suffix", "accepted: lookup (the text repeats one that was there)"],
  lookahead: ["lookahead", "accepted: lookahead (an n-gram that the target gave before)"],
  lookup: ["suffix", "accepted: lookup, by a verifier of before"],
  medusa: ["medusa", "accepted: Medusa heads (on the target's hidden states)"],
  eagle3: ["eagle3", "accepted: EAGLE-3 head (on the target's hidden states)"],
  corrected: ["corrected", "the target's own, where drafts were wrong"],
  plain: ["plain", "the target's own, where nothing was drafted"],
  drafted: ["drafted", "accepted: draft, it is not known whose"],
  own: ["own", "the target's own"],
};
export const LEGEND = ["draft worker", "colocated", "suffix", "lookahead", "medusa", "eagle3", "corrected", "plain"];

export const isAccepted = (origin) => !["corrected", "plain", "own"].includes(origin);
export const classOf = (origin) => `token o-${(ORIGINS[origin] ?? ["own"])[0]}`;
export const meaningOf = (origin) => (ORIGINS[origin] ?? [origin, origin])[1];
