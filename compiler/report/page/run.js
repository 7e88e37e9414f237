// The page of a run: its figures over the steps, the terms of its report, its ranks.
const series = name => data.steps.filter(one => Number.isFinite(one[name])).map(one => [one.step, one[name]]);
const has = name => series(name).length > 0;

// Lines over the steps; each is [name, points, look].
function over(box, label, rows, form, more = []) {
  if (!rows.some(([, points]) => points.length)) {
    byId(box).replaceWith(element("p", { class: "missing" }, `The log has no ${label}.`));
    return;
  }
  draw(box, 260, ink => ({
    legend: legend(ink), grid: { left: 80, right: 20, top: 34, bottom: 56 },
    xAxis: axis(ink, { type: "value", name: "step", nameLocation: "middle", nameGap: 26, min: "dataMin",
      max: "dataMax" }),
    yAxis: axis(ink, { type: "value", scale: true, name: label, axisLabel: { color: ink.quiet, formatter: form } }),
    dataZoom: [{ type: "inside" }],
    tooltip: { trigger: "axis", confine: true, backgroundColor: ink.raised, borderColor: ink.line,
      textStyle: { color: ink.ink, fontSize: 13 },
      formatter: found => tip(`step ${found[0].value[0].toLocaleString("en")}`,
        found.map(one => `${one.seriesName}: ${form(one.value[1])}`)) },
    series: [...rows.map(([name, points, look], k) => ({ name, type: "line", data: points, showSymbol: points.length < 3,
      sampling: "lttb", lineStyle: { width: 2, type: look ?? "solid" }, itemStyle: { color: COLOURS[k] } })),
      ...more.map(make => make(ink))],
  }));
}

function startRun() {
  byId("title").textContent = data.title;
  byId("facts").append(
    ...data.facts.map(([name, text]) => element("div", {}, element("dt", {}, name), element("dd", {}, text))),
  );
  byId("findings").append(...data.findings.map(text => element("li", {}, text)));
  const plain = x => digits(x);
  over("loss-chart", "loss", [["loss", series("loss")]], plain, [
    () => ({ name: "evaluation", type: "scatter", symbol: "diamond", symbolSize: 11, itemStyle: { color: COLOURS[5] },
      data: data.evaluations.filter(one => Number.isFinite(one.loss)).map(one => [one.step, one.loss]) }),
    ink => ({ name: "checkpoint", type: "line", data: [], itemStyle: { color: ink.quiet }, markLine: { symbol: "none",
      label: { show: false }, lineStyle: { color: ink.quiet, type: "dotted" },
      data: data.checkpoints.map(one => ({ xAxis: one.step })) } }),
  ]);
  over("gradient-chart", "norm of the gradient", [["norm of the gradient", series("grad_norm")]], plain);
  over("seconds-chart", "seconds of a step", [["measured", series("step_s")],
    ["predicted", series("predicted_step_s"), "dashed"]], seconds);
  const unit = has("tokens_per_s") ? "tokens" : "samples";
  over("rate-chart", `${unit} per second`, [[`${unit} per second`, series(`${unit}_per_s`)]], plain);
  over("memory-chart", "peak memory", [["fullest rank", series("peak_bytes")]], bytes);
}

function startReport() {
  const { report } = data;
  if (!report) {
    for (const name of ["terms", "ranks"]) {
      byId(`${name}-words`).textContent = "The run gathered no report; MetricsLogger.report() does.";
    }
    return;
  }
  const longest = Math.max(...report.terms.map(term => Math.max(term.predicted_s, term.measured_s)), 0);
  const terms = report.terms.filter(term => Math.max(term.predicted_s, term.measured_s) > longest / 500);
  const name = term => `stage ${term.stage}: ${term.name}`;
  if (terms.length && terms.length <= 40) {
    pairedBars("terms-chart", terms.map(name), [["predicted", terms.map(term => term.predicted_s)],
      ["measured", terms.map(term => term.measured_s)]], seconds);
  }
  byId("terms-table").append(
    table(["term", "times a step", "predicted", "measured", "off by"],
      terms.map(term => [name(term), term.times, seconds(term.predicted_s), seconds(term.measured_s),
        term.predicted_s > 0 ? percent(term.measured_s / term.predicted_s - 1) : "–"]), [1, 2, 3, 4]),
  );
  const ranks = report.ranks.filter(rank => rank.stage !== null);
  const own = rank => rank.forward_s + rank.backward_s + rank.weights_s + rank.recompute_s - rank.skew_s;
  byId("ranks-words").textContent = ranks.length > 64
    ? "Own work of the 64 slowest ranks, without waiting for others." : "Own work of each rank, without waiting for others.";
  const shown = ranks.length > 64 ? [...ranks].sort((a, b) => own(b) - own(a)).slice(0, 64) : ranks;
  pairedBars("ranks-chart", shown.map(rank => `rank ${rank.rank}, stage ${rank.stage}`), [["own work", shown.map(own)]],
    seconds);
}

startTheme();
startRun();
startReport();
addEventListener("resize", () => {
  for (const { chart } of charts.values()) chart.resize();
});
document.documentElement.dataset.ready = "1";
