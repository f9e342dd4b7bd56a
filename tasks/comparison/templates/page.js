"use strict";
const table = document.getElementById("table");
const body = table.tBodies[0];
const rows = [...body.rows];
const filter = document.getElementById("filter");
const stage = document.getElementById("stage");

// Jobs without figures belong to every stage.
function showMatching() {
  const words = filter.value.toLowerCase().split(/\s+/).filter(Boolean);
  for (const row of rows) {
    const text = row.textContent.toLowerCase();
    const inStage = !stage.value || !row.dataset.stage || row.dataset.stage === stage.value;
    row.hidden = !inStage || !words.every((word) => text.includes(word));
  }
  const shown = rows.filter((row) => !row.hidden).length;
  document.getElementById("shown").value = `${shown} of ${rows.length} rows`;
}

// A number, text where there is none, null for what was not measured.
function cellValue(row, column) {
  const cell = row.cells[column];
  if (!cell || cell.colSpan > 1 || cell.dataset.value === "") return null;
  return cell.dataset.value === undefined ? cell.textContent : Number(cell.dataset.value);
}

function compare(a, b) {
  return typeof a === "number" ? a - b : a.localeCompare(b);
}

function sortBy(column, header) {
  const ascending = header.getAttribute("aria-sort") !== "ascending";
  for (const other of table.tHead.rows[0].cells) other.removeAttribute("aria-sort");
  header.setAttribute("aria-sort", ascending ? "ascending" : "descending");
  const keyed = rows.map((row) => [cellValue(row, column), row]);
  keyed.sort(([a], [b]) => {
    if (a === null || b === null) return (a === null) - (b === null); // not measured: last, either way
    return ascending ? compare(a, b) : compare(b, a);
  });
  body.append(...keyed.map(([, row]) => row));
}

for (const [column, header] of [...table.tHead.rows[0].cells].entries()) {
  const button = document.createElement("button");
  button.type = "button";
  button.textContent = header.textContent;
  header.replaceChildren(button);
  button.addEventListener("click", () => sortBy(column, header));
}
document.getElementById("controls").addEventListener("submit", (event) => event.preventDefault());
filter.addEventListener("input", showMatching);
stage.addEventListener("change", showMatching);
document.getElementById("controls").hidden = false;
showMatching();
