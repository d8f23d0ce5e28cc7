// Where tokens come from: names as the API has them, and how they are shown.
// To add one: a line here, and its shape and colour in style.css.

export const ORIGINS = {
  "draft worker": ["worker", "accepted from a draft worker"],
  colocated: ["colocated", "accepted from the verifier's own draft model"],
  lookup: ["lookup", "accepted from prompt lookup: the text repeats itself"],
  corrected: ["corrected", "the target's own, where drafts were wrong"],
  plain: ["plain", "the target's own, where nothing was drafted"],
  drafted: ["drafted", "accepted from a draft, it is not known whose"],
  own: ["own", "the target's own"],
};
export const LEGEND = ["draft worker", "colocated", "lookup", "corrected", "plain"];

export const isAccepted = (origin) => !["corrected", "plain", "own"].includes(origin);
export const classOf = (origin) => `token o-${(ORIGINS[origin] ?? ["own"])[0]}`;
export const meaningOf = (origin) => (ORIGINS[origin] ?? [origin, origin])[1];
