// The timeline: rows are expanded from their compact form. What is in the window is drawn, merged where it is dense.
const KINDS = { F: ["forward", 0], B: ["backward", 1], I: ["input gradients", 5], W: ["weight gradients", 2] };
const line = data.timeline, tick = line.tick_s,
  endTick = Math.round(Math.max(line.makespan_s, line.measured?.step_s ?? 0) / tick);

function expanded(row) {
  const n = row.text.length, start = new Float64Array(n), end = new Float64Array(n), code = new Uint8Array(n),
    mb = new Int32Array(n);
  const unlike = new Map(row.unlike), seen = new Array(row.codes.length).fill(0);
  let at = 0, i = 0;
  for (const entry of row.gaps) {
    const [gap, count] = Array.isArray(entry) ? entry : [entry, 1];
    for (let k = 0; k < count; k++, i++) {
      code[i] = row.text.charCodeAt(i) - 65;
      start[i] = at + gap;
      at = end[i] = start[i] + (unlike.get(i) ?? row.ticks[code[i]]);
      mb[i] = row.microbatches ? row.microbatches[i] : seen[code[i]]++;
    }
  }
  return { n, start, end, code, mb, codes: row.codes };
}
const actionsOf = line.stages.map(stage => expanded(stage.actions));
const messagesOf = line.stages.map(stage => expanded(stage.messages));
const pipelineTick = line.pipeline_s / tick;

// position of the first entry that ends after t; entries of a row of actions are in order
function firstAfter(row, t) {
  let low = 0, high = row.n;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (row.end[middle] > t) high = middle; else low = middle + 1;
  }
  return low;
}

const time = t => seconds(t * tick);
const numStages = line.stages.length,
  rowHeight = numStages <= 8 ? 44 : numStages <= 24 ? 28 : numStages <= 64 ? 18 : 11;
const SERIES = ["forward", "backward", "input gradients", "weight gradients", "recompute", "communication inside",
  "message", "end of step", "bubble"];
const LOOK = { forward: 0, backward: 1, "input gradients": 5, "weight gradients": 2, recompute: 3,
  "communication inside": 6, message: 4, "end of step": 7 };
const present = new Set(["bubble"]);
for (const row of actionsOf) for (const [kind] of row.codes) present.add(KINDS[kind][0]);
for (const stage of line.stages) {
  for (const parts of Object.values(stage.parts)) {
    for (const [name] of parts) {
      if (name !== "compute" && name !== "host") {
        present.add(name === "recompute" ? name : "communication inside");
      }
    }
  }
  if (stage.ends.length) present.add("end of step");
  if (stage.messages.text) present.add("message");
}
if (line.measured) {
  for (const name of ["forward", "backward", "end of step", "recompute", "communication inside"]) present.add(name);
}

// Items are [row, start, end, top, height (shares of the row), title, details…] by series.
function windowItems(from, to, width) {
  const out = Object.fromEntries(SERIES.map(name => [name, []])), px = (to - from) / width, hidden = new Set();
  const put = (series, row, a, b, top, height, title, details = []) =>
    out[series].push({ value: [row, Math.max(a, from), Math.min(b, to), top, height], title, details,
      label: (b - a) / px > 22 ? title : "" });
  const budget = Math.max(60, 4000 / numStages), block = Math.max(4, width * numStages / 1200);
  line.stages.forEach((stage, s) => {
    const row = actionsOf[s], lo = firstAfter(row, from);
    let hi = lo;
    while (hi < row.n && row.start[hi] < to) hi++;
    if (hi - lo <= budget) single(stage, s, row, lo, hi, px, put);
    else merged(s, row, lo, hi, from, px, block, put);
    for (const [name, start, length, how] of stage.ends) {
      if (start < to && start + length > from) {
        put("end of step", s, start, start + length, how === "beside" ? 0.74 : 0, how === "beside" ? 0.2 : 0.7, name, [
          time(length),
          how === "beside" ? "hidden behind the last backward" : "after the last action",
        ]);
      }
    }
    const sent = messagesOf[s];
    const few = sent.n && sent.n * (to - from) / endTick <= budget;
    for (let i = 0; i < sent.n;) {
      if (sent.end[i] <= from || sent.start[i] >= to) {
        i++;
        continue;
      }
      if (few) {
        const [source, forward] = sent.codes[sent.code[i]];
        put("message", s, sent.start[i], Math.max(sent.end[i], sent.start[i] + px), 0.74, 0.2,
          `${forward ? "activation" : "gradient"} of microbatch ${sent.mb[i]}`, [
          `from stage ${source}, ${time(sent.end[i] - sent.start[i])}`,
        ]);
        i++;
        continue;
      }
      const begin = Math.max(from, sent.start[i]), end = begin + block * px;
      let busy = 0, count = 0;
      for (; i < sent.n && sent.start[i] < end; i++, count++) busy += sent.end[i] - sent.start[i];
      put("message", s, begin, end, 0.74, 0.2 * Math.min(1, busy / (end - begin)), `${count} messages`, [
        `on their way ${percent(busy / (end - begin))} of this stretch`,
      ]);
    }
  });
  return out;
}

function single(stage, s, row, lo, hi, px, put) {
  const bubble = (a, b) => {
    if (b - a > px) put("bubble", s, a, b, 0, 0.7, "bubble", [`stage ${s} waits ${time(b - a)}`]);
  };
  bubble(lo ? row.end[lo - 1] : 0, lo < row.n ? row.start[lo] : pipelineTick);
  for (let i = lo; i < hi; i++) {
    const [kind, chunk] = row.codes[row.code[i]], a = row.start[i], b = row.end[i], [name] = KINDS[kind];
    const title = `${kind}${row.mb[i]}${chunk ? `c${chunk}` : ""}`, parts = stage.parts[kind] ?? [];
    const details = [
      `${name} of microbatch ${row.mb[i]}${
        line.chunks > 1 ? `, virtual stage ${chunk} of stage ${s}` : ` on stage ${s}`
      }`,
      `${time(a)} to ${time(b)}: ${time(b - a)}`,
      ...parts.map(([what, share]) => `${what} ${time(share * (b - a))}`),
    ];
    put(name, s, a, b, 0, 0.7, title, details);
    if ((b - a) / px > 14) {
      let at = a;
      for (const [what, share] of parts) {
        const next = at + share * (b - a);
        if (what === "recompute" || what === "communication") {
          put(what === "recompute" ? what : "communication inside", s, at, next, 0.46, 0.24, "", [
            `${what} of ${title}: ${time(next - at)}`,
            "its share of the action; where in it is not known",
          ]);
        }
        at = next;
      }
    }
    bubble(b, i + 1 < row.n ? row.start[i + 1] : Math.max(b, pipelineTick));
  }
}

// Dense actions as blocks of a few pixels: bands as high as the share of time of each kind.
function merged(s, row, lo, hi, from, px, block, put) {
  const bubble = (a, b) => {
    if (b - a > px) put("bubble", s, a, b, 0, 0.7, "bubble", [`stage ${s} waits ${time(b - a)}`]);
  };
  bubble(lo ? row.end[lo - 1] : 0, row.start[lo]);
  for (let i = lo; i < hi;) {
    const begin = Math.max(row.start[i], from), share = {};
    let j = i, last = begin;
    while (j < hi && row.end[j] - begin < block * px) {
      const [name] = KINDS[row.codes[row.code[j]][0]];
      share[name] = (share[name] ?? 0) + row.end[j] - Math.max(row.start[j], from);
      last = row.end[j++];
    }
    if (j === i) {
      const [name] = KINDS[row.codes[row.code[i]][0]];
      share[name] = row.end[i] - begin;
      last = row.end[j++];
    }
    const end = j < row.n && row.start[j] - last < px ? row.start[j] : last;
    let top = 0;
    const shares = SERIES.filter(name => name in share).map(name => [name, share[name]]);
    const details = shares.map(([name, t]) => `${name} ${percent(t / (end - begin))} of this stretch`);
    for (const [name, t] of shares) {
      const height = 0.7 * Math.min(1, t / (end - begin));
      put(name, s, begin, end, top, height, `${j - i} actions`, [...details, "zoom in to see them"]);
      top += height;
    }
    bubble(end, j < row.n ? row.start[j] : Math.max(end, pipelineTick));
    i = j;
  }
}

function measuredItems(from, to, width, out) {
  const px = (to - from) / width;
  Object.values(line.measured.rows).forEach(({ rank, spans }, s) => {
    let before = -Infinity;
    for (const [name, start, length, wait, exchange, repeat] of spans) {
      const isAction = /^[FBIW]\d/.test(name), series = isAction ? (KINDS[name[0]][0]) : "end of step";
      if (start + length <= from || start - wait >= to || (length < px && start - before < px)) continue;
      before = start + length;
      const put = (key, a, b, top, height, title, details) =>
        out[key].push({ measured: true, value: [s, Math.max(a, from), Math.min(b, to), top, height], title, details,
          label: (b - a) / px > 22 ? title : "" });
      if (wait > px) {
        put("bubble", start - wait, start, 0, 0.7, "waiting", [`rank ${rank} waits ${time(wait)} for ${name}`]);
      }
      put(series, start, start + length, 0, 0.7, name, [`measured on rank ${rank}`,
        `${time(start)} to ${time(start + length)}: ${time(length)}`, exchange ? `collectives ${time(exchange)}` : "",
        repeat ? `recompute ${time(repeat)}` : ""]);
      if (length / px > 14 && exchange + repeat > 0) {
        put("recompute", start, start + repeat, 0.46, 0.24, "", [`recompute of ${name}: ${time(repeat)}`]);
        put("communication inside", start + repeat, start + repeat + exchange, 0.46, 0.24, "", [
          `collectives of ${name}: ${time(exchange)}`,
        ]);
      }
    }
  });
}

let view = [0, endTick], selected = { stage: 0, action: -1 };
const plotLeft = 74, names = SERIES.filter(name => present.has(name));
function renderItem(ink, name) {
  return (params, api) => {
    const [x0, y] = api.coord([api.value(1), api.value(0)]), [x1] = api.coord([api.value(2), api.value(0)]);
    const band = api.size([0, 1])[1], top = y - band / 2 + band * (0.08 + api.value(3)),
      height = Math.max(1, band * api.value(4)), w = Math.max(0.7, x1 - x0);
    const look = name === "bubble"
      ? { color: "transparent", decal: { ...lines(Math.PI / 4, 6), color: ink.quiet } }
      : paint(LOOK[name]);
    return { type: "rect", shape: { x: x0, y: top, width: w, height },
      style: { fill: look.color, decal: w > 9 && height > 6 ? look.decal : undefined,
        opacity: name === "bubble" ? 0.45 : 1, stroke: w > 5 ? ink.ground : undefined, lineWidth: 0.6 } };
  };
}

function timelineSeries(ink, width) {
  const items = windowItems(...view, width), all = [];
  const grids = [[items, 0]];
  if (line.measured) {
    const measured = Object.fromEntries(SERIES.map(name => [name, []]));
    measuredItems(...view, width, measured);
    grids.push([measured, 1]);
  }
  for (const [some, grid] of grids) {
    for (const name of names) {
      all.push({ id: `${name}-${grid}`, name, type: "custom", xAxisIndex: grid, yAxisIndex: grid, clip: true,
        renderItem: renderItem(ink, name), encode: { x: [1, 2], y: 0 }, itemStyle: name === "bubble"
          ? { color: ink.ground, borderColor: ink.quiet, decal: { ...lines(Math.PI / 4, 4), color: ink.quiet } }
          : paint(LOOK[name]), data: some[name], tooltip: { formatter: p =>
            tip(p.data.title || name, p.data.details) } });
    }
  }
  // numbers of microbatches where there is room
  for (const [some, grid] of grids) {
    if (rowHeight >= 28) {
      all.push({ id: `labels-${grid}`, name: "labels", type: "custom", xAxisIndex: grid, yAxisIndex: grid, clip: true,
        silent: true, z: 4, encode: { x: [1, 2], y: 0 }, data: names.filter(name =>
          name in LOOK
        ).flatMap(name => some[name]).filter(item => item.label && item.value[3] === 0), renderItem: (params, api) => {
          const [x0, y] = api.coord([api.value(1), api.value(0)]), [x1] = api.coord([api.value(2), api.value(0)]),
            band = api.size([0, 1])[1];
          return { type: "text",
            style: { text: labelTexts[grid][params.dataIndex], x: (x0 + x1) / 2, y: y - band / 2 + band * 0.3,
              align: "center", verticalAlign: "middle", fontSize: 11, fill: "#000", stroke: "#fff", lineWidth: 2.5,
              width: x1 - x0, overflow: "truncate" } };
        } });
    }
  }
  const labelTexts = grids.map(([some]) =>
    names.filter(name => name in LOOK).flatMap(name => some[name]).filter(item => item.label && item.value[3] === 0)
      .map(item => item.label)
  );
  return all;
}

const measuredRows = line.measured ? Object.entries(line.measured.rows) : [];
const simulatedHeight = numStages * rowHeight, measuredHeight = measuredRows.length * rowHeight;
function drawTimeline() {
  const rows = data.stages.map((_, s) => `stage ${s}`), top = 54, gap = 46;
  const height = top + simulatedHeight + (line.measured ? gap + measuredHeight : 0) + 78;
  draw("timeline-chart", height,
    ink => ({ legend: legend(ink, { data: names }),
      grid: [{ left: plotLeft, right: 24, top, height: simulatedHeight }, ...(line.measured
        ? [{ left: plotLeft, right: 24, top: top + simulatedHeight + gap, height: measuredHeight }]
        : [])], title: line.measured
        ? [{ text: "simulated", left: 4, top: top - 22, textStyle: { fontSize: 12, color: ink.quiet } }, {
          text: "measured",
          left: 4,
          top: top + simulatedHeight + gap - 22,
          textStyle: { fontSize: 12, color: ink.quiet },
        }]
        : [],
      xAxis: [0, ...(line.measured ? [1] : [])].map(k =>
        axis(ink, { type: "value", gridIndex: k, min: 0, max: endTick, label: { formatter: time }, splitNumber: 6 })
      ), yAxis: [{ rows }, ...(line.measured ? [{ rows: measuredRows.map(([, r]) => `rank ${r.rank}`) }] : [])].map((
        { rows },
        k,
      ) =>
        axis(ink, { type: "category", gridIndex: k, data: rows, inverse: true, axisTick: { show: false },
          label: { interval: Math.max(0, Math.ceil(15 / rowHeight) - 1) },
          splitLine: { show: true, lineStyle: { color: ink.line, opacity: 0.5 } } })
      ), dataZoom: [
        { type: "inside", xAxisIndex: "all", filterMode: "none", zoomOnMouseWheel: "ctrl", moveOnMouseMove: true,
          minSpan: 1e-4 },
        { type: "slider", xAxisIndex: "all", filterMode: "none", bottom: 8, height: 22, labelFormatter: t => time(t),
          textStyle: { color: ink.quiet }, minSpan: 1e-4 },
      ], series: [] }), (chart, ink) => {
    let waiting = false;
    const fill = () => {
      waiting = false;
      chart.setOption({ series: timelineSeries(ink, Math.max(200, chart.getWidth() - plotLeft - 24)) });
    };
    chart.on("datazoom", () => {
      const zoom = chart.getOption().dataZoom[0];
      view = [zoom.start / 100 * endTick, zoom.end / 100 * endTick];
      if (!waiting) {
        waiting = true;
        requestAnimationFrame(fill);
      }
    });
    show(chart, ...view);
    fill();
  });
}
function show(chart, from, to) {
  const width = Math.min(endTick, Math.max(endTick * 1e-6, to - from)),
    a = Math.min(Math.max(0, from), endTick - width);
  chart.dispatchAction({ type: "dataZoom", dataZoomIndex: 0, start: 100 * a / endTick,
    end: 100 * (a + width) / endTick });
}
function move(how) {
  const [a, b] = view, w = b - a, chart = chartOf("timeline-chart");
  const few = Math.min(endTick, 14 * Math.max(...actionsOf.map(row => (row.n ? row.end[0] - row.start[0] : 0)))
    * Math.max(1, Math.min(numStages, 6)) / 2);
  const to =
    { in: [a + w / 4, b - w / 4], out: [a - w / 2, b + w / 2], left: [a - w / 3, b - w / 3],
      right: [a + w / 3, b + w / 3], all: [0, endTick], begin: [0, few],
      middle: [(endTick - few) / 2, (endTick + few) / 2], end: [endTick - few, endTick] }[how];
  show(chart, ...to);
}
function select(stage, step) {
  const s = Math.min(Math.max(0, stage), numStages - 1), row = actionsOf[s];
  if (!row.n) return;
  const at = step === 0
    ? Math.min(firstAfter(row, view[0]), row.n - 1)
    : Math.min(Math.max(0, selected.action + step), row.n - 1);
  selected = { stage: s, action: at };
  const [kind, chunk] = row.codes[row.code[at]], a = row.start[at], b = row.end[at];
  byId("timeline-readout").textContent = `Stage ${s}: ${KINDS[kind][0]} of microbatch ${row.mb[at]}${
    line.chunks > 1 ? `, virtual stage ${chunk}` : ""
  }, from ${time(a)} to ${time(b)} (${time(b - a)})`;
  if (a < view[0] || b > view[1]) {
    show(chartOf("timeline-chart"), (a + b) / 2 - (view[1] - view[0]) / 2, (a + b) / 2 + (view[1] - view[0]) / 2);
  }
}
function startTimeline() {
  const said = [];
  if (line.asynchronous) {
    said.push(
      "An asynchronous pipeline never drains: one step of it is drawn as it goes on for long, with the end of the step "
        + "spread over its backwards. Its messages are not drawn.",
    );
  }
  said.push(
    line.measured
      ? `Simulated above (${seconds(line.makespan_s)}), measured below (${
        seconds(line.measured.step_s)
      }), on one clock; of each stage its first rank.`
      : "Simulated by the plan's own seconds. No measured step was given: Parallel.trace writes one, "
        + "--measured draws it below.",
  );
  if (present.has("message")) said.push("Thin bars below a stage's actions are messages on their way to it.");
  said.push("Hatched stretches are bubbles.");
  byId("timeline-words").textContent = said.join(" ");
  drawTimeline();
  for (const button of document.querySelectorAll("[data-view]")) {
    button.addEventListener("click", () => move(button.dataset.view));
  }
  byId("timeline-chart").addEventListener("keydown", event => {
    const how =
      { ArrowLeft: "left", ArrowRight: "right", "+": "in", "=": "in", "-": "out", Home: "begin",
        End: "end" }[event.key];
    if (event.ctrlKey || event.metaKey) return;
    if (how) move(how);
    else if (event.key === "ArrowUp") select(selected.stage - 1, 0);
    else if (event.key === "ArrowDown") select(selected.stage + 1, 0);
    else if (event.key === ".") select(selected.stage, 1);
    else if (event.key === ",") select(selected.stage, -1);
    else return;
    event.preventDefault();
  });
}
