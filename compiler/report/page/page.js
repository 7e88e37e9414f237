// The other sections, and the start of the page.
function startOverview() {
  byId("title").textContent = data.title;
  byId("facts").append(
    ...data.facts.map(([name, text]) => element("div", {}, element("dt", {}, name), element("dd", {}, text))),
  );
  const notes = data.notes.map(note => element("li", {}, note));
  byId("notes").append(...notes.slice(0, 8));
  if (notes.length > 8) {
    byId("notes").after(
      element("details", {}, element("summary", {}, `${notes.length - 8} more notes`),
        element("ul", {}, notes.slice(8))),
    );
  }
}

function meshGrid(stage) {
  const [first, last] = stage.devices, n = last - first + 1, columns = stage.mesh.at(-1) ?? 1;
  if (n > 64) return element("span", {}, `devices ${range(first, last)}`);
  const grid = element("span", { class: "mesh" },
    Array.from({ length: n }, (_, k) => element("span", {}, String(first + k))));
  grid.style.gridTemplateColumns = `repeat(${columns}, auto)`;
  return grid;
}
function startCluster() {
  const { hosts, link, idle, idle_text: why, name, num_devices: n } = data.cluster;
  byId("idle").textContent = idle ? `Hatched: ${why}.` : `All ${n} devices of ${name} have a stage.`;
  let position = 0;
  byId("hosts").append(...hosts.map(host => {
    const first = position, alike = host.count > 1;
    position += host.count;
    return element("div", { class: "host" },
      element("div", {}, alike ? `hosts ${first}–${position - 1}: ${host.count} alike` : `host ${first}`,
        element("div", { class: "quiet" }, `${host.stages.length} × ${host.device}, ${host.memory}`)),
      element("div", { class: "devices" }, host.stages.map((stage, k) => {
        const square = element("span", { class: stage < 0 ? "device idle" : "device",
          title: `device ${host.first_device + k}${alike ? " and alike" : ""}: ${
            stage < 0 ? "idle" : `stage ${stage}`
          }` }, stage < 0 ? "–" : String(stage));
        if (stage >= 0) square.style.background = stageColour(stage);
        return square;
      })));
  }));
  byId("links").textContent = [...new Set(hosts.map(host => host.link))].map(text => `Inside a host: ${text}.`).concat(
    link ? `Between hosts: ${link}.` : [],
  ).join(" ");
  const groups = alikeStages(
    s => [s.mesh, s.axes, seconds(s.forward_s), seconds(s.backward_s), s.limit_bytes, s.devices[1] - s.devices[0]],
  );
  byId("meshes").append(
    table(["stage", "devices", "logical mesh", "layers", "forward", "backward", "busy", "memory per device"],
      groups.map(group => {
        const stage = data.stages[group[0]], last = data.stages[group.at(-1)],
          peaks = group.map(k => total(data.stages[k].memory)), peak = Math.max(...peaks), least = Math.min(...peaks);
        const layers = group.length > 1
          ? `${stage.layers.join(" + ")} … ${last.layers.join(" + ")}`
          : stage.layers.join(" + ");
        const bar = element("span", { class: "bar" }, element("i", {}));
        bar.firstChild.style.width = `${Math.min(100, 100 * peak / stage.limit_bytes)}%`;
        return [span(group), range(stage.devices[0], last.devices[1]),
          element("div", {},
            element("div", {}, stage.mesh.map((size, k) => `${size} ${stage.axes[k]}`).join(" × ") || "one device"),
            meshGrid(stage)), layers, seconds(stage.forward_s), seconds(stage.backward_s),
          percent(stage.busy_s / data.step_s),
          element("span", {}, bar,
            `${bytes(least) === bytes(peak) ? "" : `${bytes(least)} to `}${bytes(peak)} of ${
              bytes(stage.limit_bytes)
            }`)];
      }), [4, 5, 6]),
  );
}

// ---- memory
const total = parts => Object.values(parts).reduce((a, b) => a + b, 0);
const CAUSES = ["parameters", "gradients", "optimizer", "activations", "temporary", "buffers", "inputs", "framework"];
const causesOf = field =>
  [...new Set(data.stages.flatMap(stage => Object.keys(stage[field])))].sort((a, b) =>
    CAUSES.indexOf(a) - CAUSES.indexOf(b)
  );
// Microbatches in flight of a stage as [tick, count] steps.
function flight(row) {
  const change = { F: 1, B: -1, I: 0, W: -1 }, steps = [[0, 0]];
  let now = 0, most = 1;
  for (let i = 0; i < row.n; i++) {
    const by = change[row.codes[row.code[i]][0]];
    if (by > 0) {
      now += by;
      steps.push([row.start[i], now]);
    } else if (by < 0) {
      now += by;
      steps.push([row.end[i], now]);
    }
    most = Math.max(most, now);
  }
  const bin = endTick / 1500, binned = [];
  if (steps.length > 3000) {
    for (const [t, count] of steps) {
      const k = Math.floor(t / bin);
      if (binned.length && binned.at(-1)[2] === k) binned.at(-1)[1] = Math.max(binned.at(-1)[1], count); else {binned
          .push([k * bin, count, k]);}
    }
  }
  return { steps: [...(binned.length ? binned : steps), [endTick, now]], most };
}
function drawMemory(index) {
  const stage = data.stages[index], { steps, most } = flight(actionsOf[index]),
    causes = causesOf("memory").filter(cause => stage.memory[cause]);
  const peak = total(stage.memory), isFar = peak < stage.limit_bytes / 6;
  const held = (data.timeline.measured?.ranks ?? []).filter(rank => rank.stage === index).map(rank => rank.peak_bytes),
    far = `The limit of ${bytes(stage.limit_bytes)} is ${digits(stage.limit_bytes / peak)} times the peak.`;
  byId("memory-words").textContent = [isFar ? far : "",
    held.length ? `Measured: whole processes of this stage held at most ${bytes(Math.max(...held))}.` : ""].join(" ");
  const shown = data.timeline.asynchronous ? [[0, most], [endTick, most]] : steps;
  draw("memory-chart", 330,
    ink => ({ legend: legend(ink),
      tooltip: { trigger: "axis", confine: true, backgroundColor: ink.raised, borderColor: ink.line,
        textStyle: { color: ink.ink, fontSize: 13 },
        formatter: items => tip(time(items[0].value[0]), items.map(p => `${p.seriesName}: ${bytes(p.value[1])}`)) },
      grid: { left: 74, right: 24, top: 40, bottom: 56 },
      xAxis: axis(ink, { type: "value", min: 0, max: endTick, label: { formatter: time } }),
      yAxis: axis(ink, { type: "value", label: { formatter: bytes },
        max: (isFar ? peak : Math.max(stage.limit_bytes, peak)) * 1.09,
        interval: niceBytes(isFar ? peak : stage.limit_bytes) }),
      dataZoom: [{ type: "slider", filterMode: "none", bottom: 6, height: 18, labelFormatter: t => time(t),
        textStyle: { color: ink.quiet } }],
      series: causes.map(cause => ({ name: words(cause), type: "line", stack: "bytes", step: "end", symbol: "none",
        lineStyle: { width: 0 }, itemStyle: paint(CAUSES.indexOf(cause)),
        areaStyle: { color: COLOURS[CAUSES.indexOf(cause) % 8], opacity: 0.85,
          decal: PATTERNS[CAUSES.indexOf(cause) % 8] }, data: shown.map((
            [t, count],
          ) => [t, cause === "activations" ? stage.memory[cause] * count / most : stage.memory[cause]]),
        markLine: cause === causes[0]
          ? { silent: true, symbol: "none", precision: 12, lineStyle: { color: ink.ink, type: "dashed", width: 2 },
            label: { formatter: `limit ${bytes(stage.limit_bytes)}`, position: "insideEndTop", color: ink.ink },
            data: [{ yAxis: stage.limit_bytes }] }
          : undefined })
      ) }));
}
const niceBytes = limit => 2 ** Math.round(Math.log2(limit / 5));
function bars(name, field, options) {
  const groups = alikeStages(stage => stage[field]), causes = options.causes,
    rows = groups.map(group => `stage ${span(group)}`);
  draw(name, 96 + 30 * groups.length,
    ink => ({ legend: legend(ink, { data: causes.map(words) }), grid: { left: 90, right: 90, top: 58, bottom: 34 },
      xAxis: axis(ink, { type: "value", label: { formatter: options.text, hideOverlap: true }, max: options.max,
        interval: options.interval }), yAxis: axis(ink, { type: "category", data: rows, inverse: true }),
      series: causes.map((cause, k) => ({ name: words(cause), type: "bar", stack: "all", barMaxWidth: 20,
        itemStyle: options.paint(cause, k, ink),
        tooltip: { formatter: p => tip(`${words(cause)}, ${p.name}`, [options.text(p.value)]) },
        data: groups.map(group => options.value(data.stages[group[0]], cause)), markLine: k === 0
          ? { silent: true, symbol: "none", precision: 12,
            data: options.marks.map(([x, label, type, align]) => ({ xAxis: x,
              label: { formatter: label, color: ink.ink, position: "start", distance: 5, align },
              lineStyle: { color: ink.ink, type, width: 2 } })
            ) }
          : undefined })
      ) }));
  return groups;
}
function startMemory() {
  const groups = alikeStages(stage => [stage.memory, stage.limit_bytes]), pick = byId("memory-stage"),
    causes = causesOf("memory");
  // stages that hold as much still do so at other times
  pick.append(
    ...data.stages.map((stage, k) => element("option", { value: k }, `${k}: devices ${range(...stage.devices)}`)),
  );
  const fullest = data.stages.map(stage => total(stage.memory));
  pick.value = String(fullest.indexOf(Math.max(...fullest)));
  pick.addEventListener("change", () => drawMemory(Number(pick.value)));
  drawMemory(Number(pick.value));
  const limits = [...new Set(data.stages.map(stage => stage.limit_bytes))], most = Math.max(...fullest);
  const scale = most < Math.min(...limits) / 6 ? most : Math.max(...limits);
  bars("peak-chart", "memory", { causes, text: bytes, max: scale * 1.02, interval: niceBytes(scale),
    value: (stage, cause) => stage.memory[cause] ?? 0, paint: cause => paint(CAUSES.indexOf(cause)),
    marks: scale === most ? [] : limits.map(limit => [limit, `limit ${bytes(limit)}`, "dashed", "center"]) });
  byId("memory-table").append(table(["stage", ...causes.map(words), "sum", "limit"], groups.map(group => {
    const stage = data.stages[group[0]];
    return [span(group), ...causes.map(c => bytes(stage.memory[c] ?? 0)), bytes(fullest[group[0]]),
      bytes(stage.limit_bytes)];
  }), [...causes.keys()].map(k => k + 1).concat(causes.length + 1, causes.length + 2)));
  if (data.timeline.measured) {
    byId("memory-table").append(
      table(["rank", "stage", "most that was held"], data.timeline.measured.ranks.map(
        r => [r.rank, r.stage ?? "idle", r.peak_bytes ? bytes(r.peak_bytes) : "not measured"],
      ), [2]),
    );
  }
}

// ---- seconds
function startSeconds() {
  const causes = [...causesOf("seconds"), "idle"],
    value = (stage, cause) => (cause === "idle" ? stage.idle_s : stage.seconds[cause] ?? 0);
  const groups = bars("seconds-chart", "seconds", { causes, text: seconds, value,
    marks: [[data.step_s, `step ${seconds(data.step_s)}`, "solid", "left"], [data.bound_s,
      `bound ${seconds(data.bound_s)} `, "dashed", "right"]], max: data.step_s * 1.04,
    paint: (cause, k, ink) => (cause === "idle"
      ? { color: "transparent", borderColor: ink.quiet, borderType: "dashed", borderWidth: 1 }
      : paint(k)) });
  const beside = data.stages.some(stage => Object.keys(stage.beside).length)
    ? " Messages between stages and the part of the gradient reduction that runs beside the backward are in no bar."
    : "";
  byId("bound").textContent = data.search.bound + beside;
  byId("seconds-table").append(
    table(["stage", ...causes.map(words), "beside: messages", "beside: gradients"], groups.map(group => {
      const stage = data.stages[group[0]];
      return [span(group), ...causes.map(c => seconds(value(stage, c))), seconds(stage.beside.transfer ?? 0),
        seconds(stage.beside.overlapped ?? 0)];
    }), [...Array(causes.length + 2).keys()].map(k => k + 1)),
  );
}

// ---- alternatives, the search, prices
function startChoices() {
  const { plans, alternatives } = data.choices, several = plans.length > 1;
  const detail = (title, rows) =>
    byId("choice").replaceChildren(element("h3", {}, title),
      element("dl", { class: "facts" }, rows.map(([name, text]) =>
        element("div", {}, element("dt", {}, name), element("dd", {}, text))
      )));
  const openPlan = k =>
    detail(plans[k].name, [["step", seconds(plans[k].step_s)], ["peak memory", bytes(plans[k].peak_bytes)], ["gap",
      percent(plans[k].bound_gap)], ...plans[k].details]);
  const openOther = k =>
    detail(`${alternatives[k].name} parallel only`, [["step", alternatives[k].step_s === null
      ? "no such plan fits"
      : `${seconds(alternatives[k].step_s)}, ${digits(alternatives[k].step_s / data.step_s)} × this plan`], [
      "microbatches",
      String(alternatives[k].microbatches ?? "not known"),
    ], ["why", alternatives[k].why || "slower"], ["memory", "not kept in a plan"]]);
  byId("choices-words").textContent = several
    ? "Step against peak memory of the plans that the page was given."
    : "The page was given no other plan, so there is no front of step time and memory to draw: mw.pareto(…) finds it, "
      + "and to_html(others=…) or --with draws it. What the plan says of its alternatives:";
  const rows = [["this plan", data.step_s],
    ...alternatives.filter(a => a.step_s !== null).map(a => [a.name, a.step_s])];
  draw("choices-chart", several ? 300 : 70 + 34 * rows.length, ink => (several
    ? { grid: { left: 80, right: 40, top: 30, bottom: 50 },
      xAxis: axis(ink, { type: "value", name: "peak memory per device", nameLocation: "middle", nameGap: 30,
        scale: true, label: { formatter: bytes, hideOverlap: true } }),
      yAxis: axis(ink, { type: "value", name: "step", scale: true, label: { formatter: seconds } }),
      series: [{ type: "scatter", symbolSize: 16,
        data: plans.map((p, k) => ({ value: [p.peak_bytes, p.step_s], symbol: k ? "circle" : "diamond",
          itemStyle: paint(k ? 0 : 1),
          label: k ? undefined : { show: true, formatter: "this plan", position: "right", color: ink.ink } })
        ),
        tooltip: { formatter: p => tip(plans[p.dataIndex].name, [`${seconds(p.value[1])}, ${bytes(p.value[0])}`]) } }] }
    : { grid: { left: 110, right: 60, top: 10, bottom: 40 },
      xAxis: axis(ink, { type: "value", label: { formatter: seconds } }),
      yAxis: axis(ink, { type: "category", data: rows.map(([name]) => name), inverse: true }),
      series: [{ type: "bar", barMaxWidth: 20,
        data: rows.map(([, s], k) => ({ value: s, itemStyle: paint(k ? 0 : 1) })),
        label: { show: true, position: "right", color: ink.ink, formatter: p => seconds(p.value) },
        tooltip: { formatter: p => tip(p.name, [seconds(p.value)]) } }] }), chart =>
    chart.on("click", p => {
      if (several || p.dataIndex === 0) openPlan(p.dataIndex); else {openOther(
          alternatives.findIndex(a => a.name === rows[p.dataIndex][0]),
        );}
    }));
  byId("choices-table").append(table(["plan", "step", "ratio", "peak memory"], [
    ...plans.map((p, k) => ({ chosen: k === 0,
      cells: [choose(p.name, () => openPlan(k)), seconds(p.step_s), `${digits(p.step_s / data.step_s)} ×`,
        bytes(p.peak_bytes)] })
    ),
    ...alternatives.map((a,
      k) => [choose(`${a.name} parallel only`, () => openOther(k)), a.step_s === null ? "–" : seconds(a.step_s),
      a.step_s === null ? "–" : `${digits(a.step_s / data.step_s)} ×`, "not kept"]
    ),
  ], [1, 2, 3]));
  if (!alternatives.length) {
    byId("choices-table").append(element("p", {}, "The search of this plan compared no pure strategies."));
  }
  openPlan(0);
}
function horizontal(name, rows, text, colour) {
  draw(name, 50 + 24 * rows.length,
    ink => ({ grid: { left: 120, right: 70, top: 6, bottom: 30 },
      xAxis: axis(ink, { type: "value", label: { formatter: text, hideOverlap: true } }),
      yAxis: axis(ink, { type: "category", data: rows.map(([n]) => n), inverse: true }),
      series: [{ type: "bar", barMaxWidth: 16, itemStyle: paint(colour), data: rows.map(([, x]) => x),
        label: { show: true, position: "right", color: ink.ink, formatter: p => text(p.value) },
        tooltip: { formatter: p => tip(p.name, [text(p.value)]) } }] }));
}
function startSearch() {
  const passes = Object.entries(data.search.passes);
  byId("search-words").append(
    ...[...data.search.sentences, data.search.bound,
      data.search.versions.length ? `Made by ${data.search.versions.join(", ")}.` : ""].filter(Boolean).map(text =>
        element("li", {}, text)
      ),
  );
  if (passes.length) horizontal("search-chart", passes, seconds, 0);
  else byId("search-words").append(element("li", {}, "The plan does not say how long its search took."));
  byId("search-table").append(table(["pass", "seconds"], passes.map(([name, s]) => [name, seconds(s)]), [1]));
}
function startPrices() {
  const shares = Object.entries(data.prices.shares).sort((a, b) => b[1] - a[1]);
  const meaning = { measured: "measured: this very op or message", interpolated: "interpolated between measurements",
    extrapolated: "extrapolated beyond them", scaled: "scaled from other measurements",
    roofline: "roofline from the data sheet", analytic: "α–β model from the data sheet", free: "free" };
  if (shares.length) horizontal("prices-chart", shares, percent, 2);
  byId("prices-words").textContent = shares.length
    ? `Shares of the busiest stage's seconds. ${
      shares.map(([name, x]) => `${percent(x)} ${meaning[name] ?? name}`).join("; ")
    }.`
    : "This plan does not say where its prices come from.";
  byId("prices-table").append(table(["device or link", "prices"], data.prices.lines));
}

// ---- start
startTheme();
for (const start of [startOverview, startCluster, startTimeline, startModel, startMemory, startSeconds, startChoices,
  startSearch, startPrices]) start();
let resizing = 0;
addEventListener("resize", () => {
  clearTimeout(resizing);
  resizing = setTimeout(() => {
    for (const { chart } of charts.values()) chart.resize();
    chartOf("timeline-chart").dispatchAction({ type: "dataZoom", dataZoomIndex: 0, start: 100 * view[0] / endTick,
      end: 100 * view[1] / endTick });
  }, 120);
});
document.documentElement.dataset.ready = "1";
window.meshwrightPage = { data, view: () => view, chart: chartOf, items: () => windowItems(...view, 1000) };
