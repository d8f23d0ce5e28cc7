// Where tokens come from: names as the API has them, and how they are shown.
// Names of sources are those of SHOWN in specq/protocol/origins.py. To add one: a line here, and its shape and colour in style.css.

export const ORIGINS = { // name: [class, what users read, what it means]
  "draft worker": ["worker", "draft worker", ""],
  colocated: ["colocated", "draft model in the verifier", ""],
  suffix: ["suffix", "lookup", "the text repeats one that was there"],
  lookahead: ["lookahead", "lookahead", "an n-gram that the target gave before"],
  lookup: ["suffix", "lookup", "by a verifier of before"],
  medusa: ["medusa", "Medusa heads", "on the target's hidden states"],
  eagle3: ["eagle3", "EAGLE-3 head", "on the target's hidden states"],
  corrected: ["corrected", "corrected", "the target's own, where drafts were wrong"],
  plain: ["plain", "plain", "the target's own, where nothing was drafted"],
  drafted: ["drafted", "draft", "it is not known whose"],
  own: ["own", "own", "the target's own"],
};
export const LEGEND = ["draft worker", "colocated", "suffix", "lookahead", "medusa", "eagle3", "corrected", "plain"];

export const isAccepted = (origin) => !["corrected", "plain", "own"].includes(origin);
export const classOf = (origin) => `token o-${(ORIGINS[origin] ?? ["own"])[0]}`;
export const nameOf = (origin) => (ORIGINS[origin] ?? [origin, origin])[1];

export function meaningOf(origin) {
  const what = (ORIGINS[origin] ?? [origin, origin, origin])[2];
  if (!isAccepted(origin)) return what;
  return `accepted: ${nameOf(origin)}${what ? ` (${what})` : ""}`;
}
