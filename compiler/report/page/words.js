// What all sections share: the data, elements, numbers as words, colours with patterns, charts that follow the theme.
const data = JSON.parse(document.getElementById("data").textContent);
const byId = name => document.getElementById(name);

// An element with these attributes; children are elements or text, never markup.
function element(tag, attributes = {}, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name.startsWith("on")) made.addEventListener(name.slice(2), value);
    else if (value !== null && value !== undefined) made.setAttribute(name, value);
  }
  made.append(...children.flat().filter(child => child !== null && child !== undefined && child !== ""));
  return made;
}

const digits = x => (x >= 100 ? Math.round(x).toLocaleString("en") : Number(x.toPrecision(3)).toString());
function seconds(s) {
  const sign = s < 0 ? "−" : "", x = Math.abs(s);
  return sign
    + (x >= 1 || x === 0
      ? `${digits(x)} s`
      : x >= 1e-3
      ? `${digits(x * 1e3)} ms`
      : x >= 1e-6
      ? `${digits(x * 1e6)} µs`
      : `${digits(x * 1e9)} ns`);
}
function bytes(b) {
  const x = Math.abs(b), sign = b < 0 ? "−" : "";
  for (const [unit, scale] of [["GiB", 2 ** 30], ["MiB", 2 ** 20], ["KiB", 2 ** 10]]) {
    if (x >= scale) return `${sign}${digits(x / scale)} ${unit}`;
  }
  return `${sign}${Math.round(x)} B`;
}
const percent = x => `${digits(100 * x)} %`;
const words = name => name.replaceAll("_", " ");
const range = (a, b) => (a === b ? `${a}` : `${a}–${b}`);
const span = numbers => range(numbers[0], numbers.at(-1));

// Neighbouring stages with equal keys, as [first, …, last].
function alikeStages(key) {
  const groups = [];
  let before = null;
  data.stages.forEach((stage, index) => {
    const text = JSON.stringify(key(stage, index));
    if (text === before) groups.at(-1).push(index);
    else groups.push([index]);
    before = text;
  });
  return groups;
}

// Okabe and Ito's colours, which colour-blind people tell apart; patterns say the same again.
const COLOURS = ["#0072b2", "#e69f00", "#009e73", "#cc79a7", "#56b4e9", "#d55e00", "#f0e442", "#8c96a0"];
const lines = (rotation, gap = 5) => ({ symbol: "line", dashArrayX: [1, 0], dashArrayY: [2, gap], rotation,
  color: "rgba(0,0,0,.4)" });
const dots = size => ({ symbol: "circle", dashArrayX: [[size, size]], dashArrayY: [size, size], symbolSize: 0.7,
  color: "rgba(0,0,0,.4)" });
const PATTERNS = [{ symbol: "none" }, lines(Math.PI / 4), lines(0), dots(6), lines(-Math.PI / 4), lines(Math.PI / 2),
  dots(4), lines(Math.PI / 4, 2)];
const paint = k => ({ color: COLOURS[k % 8], decal: PATTERNS[(k + Math.floor(k / 8)) % 8] });
const stageColour = k =>
  ["#7fb8de", "#f3c566", "#7fcfb6", "#e3b3cf", "#b0d9f4", "#f0a575", "#f2ea8b", "#c3cad1"][k % 8];

// Charts are made again when the theme changes.
const charts = new Map();
const dark = () => document.documentElement.classList.contains("dark");
const inks = () => (dark()
  ? { ink: "#e6eaee", quiet: "#a3adb8", line: "#3a434d", ground: "#14181d", raised: "#1e242b" }
  : { ink: "#1b2026", quiet: "#57606a", line: "#cfd6dd", ground: "#ffffff", raised: "#f4f6f8" });
function draw(name, height, option, after = () => {}) {
  const box = byId(name);
  box.style.height = `${height}px`;
  const make = () => {
    echarts.getInstanceByDom(box)?.dispose();
    const chart = echarts.init(box, null, { renderer: "canvas" });
    const ink = inks();
    chart.setOption({ animation: false, textStyle: { color: ink.ink, fontFamily: "system-ui, sans-serif" },
      tooltip: { confine: true, backgroundColor: ink.raised, borderColor: ink.line,
        textStyle: { color: ink.ink, fontSize: 13 } }, aria: { enabled: true }, ...option(ink) });
    after(chart, ink);
    return chart;
  };
  charts.set(name, { make, chart: make() });
}
const chartOf = name => charts.get(name).chart;
function redraw() {
  for (const entry of charts.values()) entry.chart = entry.make();
}
const legend = (ink, more = {}) => ({ type: "scroll", top: 0, textStyle: { color: ink.ink },
  pageTextStyle: { color: ink.ink }, pageIconColor: ink.ink, itemWidth: 22, itemHeight: 13, ...more });
const axis = (ink, more = {}) => ({ axisLine: { lineStyle: { color: ink.line } },
  axisLabel: { color: ink.quiet, showMaxLabel: more.max === undefined, ...more.label },
  splitLine: { lineStyle: { color: ink.line, opacity: 0.6 } }, nameTextStyle: { color: ink.quiet }, ...more });

function table(head, rows, numbers = []) {
  const cell = (tag, value, k) =>
    element(tag, { class: numbers.includes(k) ? "number" : null, scope: tag === "th" ? "col" : null },
      value instanceof Node ? value : String(value));
  return element("table", {}, element("thead", {}, element("tr", {}, head.map((x, k) => cell("th", x, k)))),
    element("tbody", {},
      rows.map(row =>
        element("tr", { class: row.chosen ? "chosen" : null }, (row.cells ?? row).map((x, k) => cell("td", x, k)))
      )));
}
function tip(title, rows) {
  return element("div", {}, element("strong", {}, title), rows.map(row => element("div", {}, row)));
}

// Bars of several series beside each other, one row a name.
function pairedBars(box, names, rows, form) {
  draw(box, 70 + 24 * names.length * rows.length, ink => ({
    legend: legend(ink), grid: { left: 210, right: 70, top: 34, bottom: 30 },
    xAxis: axis(ink, { type: "value", axisLabel: { color: ink.quiet, formatter: form } }),
    yAxis: axis(ink, { type: "category", data: names, inverse: true }),
    series: rows.map(([name, values], k) => ({ name, type: "bar", data: values, itemStyle: paint(k) })),
    tooltip: { trigger: "axis", confine: true, backgroundColor: ink.raised, borderColor: ink.line,
      textStyle: { color: ink.ink, fontSize: 13 },
      formatter: found => tip(found[0].name, found.map(one => `${one.seriesName}: ${form(one.value)}`)) },
  }));
}

// The theme of the system, until the button says another.
function startTheme() {
  const system = matchMedia("(prefers-color-scheme: dark)");
  let forced = null;
  function setTheme() {
    const isDark = forced ?? system.matches;
    document.documentElement.classList.toggle("dark", isDark);
    document.documentElement.style.colorScheme = isDark ? "dark" : "light";
    byId("theme").textContent = isDark ? "Light" : "Dark";
  }
  setTheme();
  system.addEventListener("change", () => {
    setTheme();
    redraw();
  });
  byId("theme").addEventListener("click", () => {
    forced = !dark();
    setTheme();
    redraw();
  });
}
