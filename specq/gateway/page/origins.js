// Origins of tokens: their names in the API, and their look.
// Names of sources are those of SHOWN in specq/protocol/origins.py. To add one: a line here, and its shape and colour in style.css.

export const ORIGINS = { // name: [class, what users read, what it means]
  "draft worker": ["worker", "draft worker", ""],
  colocated: ["colocated", "draft model in the verifier", ""],
  suffix: ["suffix", "lookup", "repeats earlier text"],
  lookahead: ["lookahead", "lookahead", "an n-gram of the target model"],
  lookup: ["suffix", "lookup", "in an earlier version"],
  medusa: ["medusa", "Medusa heads", "read the target model's hidden states"],
  eagle3: ["eagle3", "EAGLE-3 head", "reads the target model's hidden states"],
  block: ["block", "block drafter", "reads the target model's hidden states"],
  engine: ["engine", "drafter of the engine", "which the engine runs itself"],
  grammar: ["grammar", "grammar", "the only tokens that the job's grammar allows"],
  corrected: ["corrected", "corrected", "the target model's own token, drafts were rejected"],
  plain: ["plain", "plain", "the target model's own token, no draft was checked"],
  drafted: ["drafted", "draft", "source unknown"],
  own: ["own", "own", "the target model's own token"],
};
export const LEGEND = ["draft worker", "colocated", "suffix", "lookahead", "medusa", "eagle3", "block", "engine", "grammar", "corrected", "plain"];

export const isAccepted = (origin) => !["corrected", "plain", "own"].includes(origin);
export const classOf = (origin) => `token o-${(ORIGINS[origin] ?? ["own"])[0]}`;
export const nameOf = (origin) => (ORIGINS[origin] ?? [origin, origin])[1];

export function meaningOf(origin) {
  const what = (ORIGINS[origin] ?? [origin, origin, origin])[2];
  if (!isAccepted(origin)) return what;
  return `accepted draft: ${nameOf(origin)}${what ? ` (${what})` : ""}`;
}

// The same beside the name, for the legend.
export function legendOf(origin) {
  return meaningOf(origin).replace(`: ${nameOf(origin)}`, "");
}
