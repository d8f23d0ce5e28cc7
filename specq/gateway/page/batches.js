// The newest batches of the user's key. Without batches the section is hidden.

import { getJson } from "./api.js";
import { $, make } from "./dom.js";

const MOST = 8;

let areOff = false; // the gateway has none

export async function showBatches(key) {
  if (areOff) return;
  const found = await getJson(`/v1/batches?limit=${MOST}`, key).catch((error) => {
    areOff = error.code === "batches_off";
    return { data: [] };
  });
  $("batches").hidden = !found.data.length;
  const heads = ["batch", "status", "done"].map((name) => make("th", { scope: "col" }, name));
  $("batch-rows").replaceChildren(make("table", {}, make("thead", {}, make("tr", {}, ...heads)),
    make("tbody", {}, ...found.data.map(row))));
}

function row({ id, status, request_counts: { total, completed, failed } }) {
  const done = total ? `${completed + failed}/${total}` : "–";
  return make("tr", {}, make("th", { scope: "row", title: id }, id.slice(0, 14)), make("td", {}, status.replace("_", " ")),
    make("td", {}, done));
}
