// The page of a comparison: two sides of each row, bars where the rows are seconds or bytes.
const FORMS = { s: seconds, B: bytes, share: percent, "": digits };
const cell = (value, unit) => (value === null ? "–" : typeof value === "string" ? value : FORMS[unit](value));
const times = row => row.ratio === null || row.unit === "share" ? ""
  : Math.abs(row.ratio - 1) < 5e-4 ? "=" : `${digits(row.ratio)}×`;

function compare(section, number) {
  const id = `section-${number}`, box = `chart-${number}`;
  byId("contents").append(element("a", { href: `#${id}` }, section.title));
  const here = element("section", { id }, element("h2", {}, section.title));
  byId("sections").append(here);
  const isNumber = x => x === null || typeof x === "number";
  const numeric = section.rows.length > 0 && section.rows.every(row => isNumber(row.before) && isNumber(row.after));
  const unit = section.rows[0]?.unit;
  if (numeric && (unit === "s" || unit === "B") && section.rows.length > 1
    && section.rows.every(row => row.unit === unit)) {
    here.append(element("div", { id: box, class: "chart" }));
    const shown = section.rows.slice(0, 40);
    pairedBars(box, shown.map(row => row.name), [["A", shown.map(row => row.before ?? 0)],
      ["B", shown.map(row => row.after ?? 0)]], FORMS[unit]);
  }
  const ratios = section.rows.some(row => times(row)) ? ["B over A"] : [];
  const rows = section.rows.map(row => [row.name, cell(row.before, row.unit), cell(row.after, row.unit),
    ...ratios.map(() => times(row))]);
  if (rows.length) {
    here.append(element("div", { class: "scroll" }, table(["", "A", "B", ...ratios], rows, numeric ? [1, 2, 3] : [3])));
  }
  here.append(element("p", { class: "quiet" }, rows.length ? section.note : section.note || "no difference"));
}

function startComparison() {
  byId("title").textContent = data.title;
  const section = element("section", {}, element("dl", { class: "facts" },
    ...[["A", data.before], ["B", data.after]].map(([side, name]) =>
      element("div", {}, element("dt", {}, side), element("dd", {}, name)))));
  byId("sections").append(section);
  if (data.same) section.append(element("p", {}, "no difference"));
  else data.sections.forEach(compare);
}

startTheme();
startComparison();
addEventListener("resize", () => {
  for (const { chart } of charts.values()) chart.resize();
});
document.documentElement.dataset.ready = "1";
