// The model: a tree of modules, blocks of tensors as the mesh cuts them, and what is known of the chosen row.
const kinds = data.outline.kinds;

function parsedType(text) {
  const [, dtype, shape] = /^(\w+)\[(.*)\]$/.exec(text) ?? [null, text, ""];
  return { dtype, shape: shape ? shape.split(",").map(Number) : [] };
}
const BYTES = { float64: 8, int64: 8, float32: 4, int32: 4, float16: 2, bfloat16: 2, int16: 2, bool: 1, uint8: 1,
  int8: 1, complex64: 8 };
// Parts of each dim, copies of each part, axes with addends.
function cuts(type, spec, mesh) {
  const parts = type.shape.map(() => 1), sums = [];
  let copies = 1;
  (spec ? spec.split(",") : []).forEach((placement, axis) => {
    if (placement[0] === "S") parts[Number(placement.slice(1))] *= mesh[axis];
    else {
      copies *= mesh[axis];
      if (placement[0] === "P") sums.push(axis);
    }
  });
  return { parts, copies, sums };
}
function describe(type, spec, stage) {
  const { parts, copies, sums } = cuts(type, spec, stage.mesh), axes = spec ? spec.split(",") : [];
  const cut = axes.map((p, k) => (p[0] === "S" ? `dim ${p.slice(1)} over ${stage.axes[k]}` : "")).filter(Boolean);
  const local = type.shape.map((n, d) => Math.ceil(n / parts[d])),
    size = local.reduce((a, b) => a * b, 1) * (BYTES[type.dtype] ?? 4);
  const said = [cut.length ? cut.join(", ") : "whole",
    copies > 1 ? `${cut.length ? "each block " : ""}on ${copies} devices` : "",
    sums.length ? `addends over ${sums.map(k => stage.axes[k]).join(", ")}` : "", `${bytes(size)} per device`];
  return said.filter(Boolean).join("; ");
}
// A rectangle of the two dims that are cut most, the first device's block filled.
function blocks(type, spec, stage, width, height) {
  const { parts, sums } = cuts(type, spec, stage.mesh);
  const order = parts.map((n, d) => d).sort((a, b) => parts[b] - parts[a] || a - b).slice(0, 2).sort((a, b) => a - b);
  const small = height < 30 && order.length === 2 && parts[order[1]] === 1; // stripes of a small picture stand upright
  const clipped = order.map(d => Math.min(parts[d], 16)),
    [rows, columns] = small ? [1, clipped[0]] : order.length === 2 ? clipped : [1, clipped[0] ?? 1];
  const box = element("span", { class: `blocks${sums.length ? " sum" : ""}`, role: "img",
    "aria-label": describe(type, spec, stage), title: describe(type, spec, stage) });
  box.style.cssText = `width:${width}px;height:${height}px;grid-template:repeat(${rows},1fr)/repeat(${columns},1fr)`;
  for (let k = 0; k < rows * columns; k++) {
    box.append(element("span", { class: k === 0 ? "held" : null }, k === 0 && sums.length ? "Σ" : ""));
  }
  return box;
}

// The name of a part of a layer like another: numbers on the way to the layer are those of this one.
function renamed(path, like, name) {
  const from = like.split("."), to = name.split("."), words = path.split(".");
  for (let k = 0; k < Math.min(words.length, from.length, to.length) && words[k] === from[k]; k++) words[k] = to[k];
  return words.join(".");
}
// Messages of one kind over the same axes are a row.
function collectives(messages, axes) {
  if (!messages.length) return element("p", {}, "None.");
  const rows = new Map();
  for (const [phase, kind, over, size, s] of messages) {
    const key = [phase, words(kind), over.map(k => axes[k]).join(", ")].join("|"), known = rows.get(key) ?? [0, 0, 0];
    rows.set(key, [known[0] + 1, known[1] + size, known[2] + s]);
  }
  return element("div", { class: "scroll" },
    table(["when", "collective", "over", "count", "bytes", "seconds"],
      [...rows].map(([key, [count, size, s]]) => [...key.split("|"), count, bytes(size), seconds(s)]), [3, 4, 5]),
    element("p", { class: "quiet" }, "Forward and backward are of one microbatch; a step's are once per step."));
}
const sum = (list, f) => list.reduce((total, x) => total + f(x), 0);
const sentSeconds = messages => sum(messages, m => m[4]);
function sentWords(messages) {
  return messages.length
    ? `${messages.length} collective${messages.length > 1 ? "s" : ""}, ${bytes(sum(messages, m => m[3]))}, ${
      seconds(sentSeconds(messages))
    }`
    : "";
}
const labelWords = (op, stage) =>
  op.labels.split(",").map((label,
    k) => (label && label !== "whole" ? `${data.outline.words[label] ?? label} over ${stage.axes[k]}` : "")
  ).filter(Boolean).join(", ") || "whole on every device";

function panel(title, ...content) {
  const box = byId("panel");
  box.replaceChildren(element("h3", {}, title), ...content.flat(2).filter(Boolean));
}
const shown = (type, spec, stage, caption) =>
  element("figure", {}, blocks(type, spec, stage, 130, 76),
    element("figcaption", {}, `${caption}: ${describe(type, spec, stage)}`));

function showOp(op, path, stage) {
  panel(path, element("p", {}, `${op.op}, ${op.type}: ${labelWords(op, stage)}`),
    element("div", { class: "specs" }, shown(parsedType(op.type), op.spec, stage, "output")),
    element("p", {},
      `Forward ${seconds(op.forward_s)}, backward ${seconds(op.backward_s)} of a microbatch, without collectives${
        op.again ? "; the backward runs the forward again" : ""
      }.`), element("h4", {}, "Collectives"), collectives(op.messages, stage.axes));
}
function showWeight(weight, path, stage) {
  const type = parsedType(weight.type), home = weight.sharding, [value, back] = home.compute.split("|");
  const words = { replicated: "kept as ops read it", zero1: "ZeRO-1: its optimizer state is cut further",
    zero2: "ZeRO-2: its gradients and optimizer state are cut further",
    zero3: "ZeRO-3: it is stored in parts and gathered in every microbatch", custom: "as written in the plan" };
  panel(path, element("p", {}, `${weight.type}: ${words[weight.pattern] ?? weight.pattern}`),
    element("div", { class: "specs" }, shown(type, value, stage, "read"), shown(type, back, stage, "gradient made"),
      shown(type, home.stored, stage, "stored"), shown(type, home.gradient, stage, "gradient kept"),
      shown(type, home.optimizer, stage, "optimizer state")), weight.pattern === "replicated"
    ? null
    : element("p", {}, `Gathered once per ${home.gather}, reduced once per ${home.reduce}.`),
    element("h4", {}, "Collectives"), collectives(weight.messages, stage.axes));
}
function showLayer(layer, stage, index) {
  const kind = kinds[layer.kind], why = data.outline.why[layer.kind],
    all = [...kind.ops.flatMap(op => op.messages), ...kind.weights.flatMap(w => w.messages), ...kind.gathers];
  const subjects = [...new Set((why ?? []).map(row => row.subject))];
  panel(layer.name,
    element("p", {},
      `Stage ${index}; recompute: ${layer.recompute}. Ops take ${
        seconds(sum(kind.ops, op => op.forward_s))
      } forward and ${seconds(sum(kind.ops, op => op.backward_s))} backward per microbatch, without collectives.`),
    element("h4", {}, "Why"), why
    ? subjects.map(
      subject => [element("p", {}, subject.replace(layer.like, layer.first)),
        table(["", "per step", "per device", ""],
          why.filter(row => row.subject === subject).map(row => ({ chosen: row.chosen,
            cells: [`${row.chosen ? "→ " : ""}${row.label}`,
              row.chosen ? "" : row.seconds === null ? "–" : `${row.seconds >= 0 ? "+" : ""}${seconds(row.seconds)}`,
              row.chosen ? "" : row.bytes === null ? "–" : `${row.bytes >= 0 ? "+" : ""}${bytes(row.bytes)}`,
              row.chosen ? "chosen" : row.reason] })
          ), [1, 2])],
    ).flat()
    : element("p", {},
      "What other choices would cost is not in this page. It asks where it has the model (--target MODEL), "
        + "for half a minute at most; or ask ",
      element("code", {}, `meshwright why PLAN ${layer.first} --target MODEL`)), element("h4", {}, "Collectives"),
    collectives(all, stage.axes));
}

function lazily(details, build) {
  details.addEventListener("toggle", () => {
    if (details.open && !details.dataset.built) {
      details.dataset.built = "1";
      details.append(...build());
    }
  });
  return details;
}
function row(summary, build) {
  return lazily(element("details", {}, element("summary", {}, summary)), build);
}
function choose(text, act) {
  return element("button", { type: "button", onclick: event => {
    event.preventDefault();
    act();
  } }, text);
}

// Ops and weights of a layer, nested by their modules.
function moduleTree(layer, stage) {
  const kind = kinds[layer.kind], root = { children: new Map(), leaves: [] };
  const at = path =>
    path.split(".").filter(Boolean).reduce((node, word) => {
      if (!node.children.has(word)) node.children.set(word, { children: new Map(), leaves: [] });
      return node.children.get(word);
    }, root);
  for (const op of kind.ops) {
    const name = renamed(op.module, layer.like, layer.first);
    at(name).leaves.push(
      element("div", { class: "leaf" }, blocks(parsedType(op.type), op.spec, stage, 34, 18), choose(op.op, () =>
        showOp(op, [name, op.op].filter(Boolean).join(": "), stage)),
        element("span", { class: "role" },
          [labelWords(op, stage), sentWords(op.messages)].filter(Boolean).join(" · "))),
    );
  }
  for (const weight of kind.weights) {
    const name = renamed(weight.name, layer.like, layer.first), [, module, own] = /^(?:(.*)\.)?([^.]+)$/.exec(name);
    at(module ?? "").leaves.unshift(
      element("div", { class: "leaf" }, blocks(parsedType(weight.type), weight.sharding.stored, stage, 34, 18),
        choose(own, () => showWeight(weight, name, stage)),
        element("span", { class: "role" },
          [weight.type, weight.pattern === "replicated" ? "" : weight.pattern.replace("zero", "ZeRO-"),
            sentWords(weight.messages)].filter(Boolean).join(" · "))),
    );
  }
  let node = root, prefix = [];
  while (node.children.size === 1 && !node.leaves.length) {
    const [[word, child]] = node.children;
    prefix.push(word);
    node = child;
  }
  const shownNode =
    one => [...one.leaves, ...[...one.children].map(([word, child]) => row(word, () => shownNode(child)))];
  const out = shownNode(node);
  if (kind.gathers.length) {
    out.push(
      element("div", { class: "leaf" },
        element("span", { class: "role" }, `gathers of the layer's weights: ${sentWords(kind.gathers)}`)),
    );
  }
  return out;
}
function startModel() {
  byId("model-missing").textContent = data.outline.missing;
  const one = (layer, stage, index, note = "") =>
    row([choose(layer.name, () => showLayer(layer, stage, index)),
      element("span", { class: "role" }, ` ${[layerWords(layer), note].filter(Boolean).join(" · ")}`)], () =>
      moduleTree(layer, stage));
  byId("tree").append(...data.tree.map(group => {
    const stage = data.stages[group.stage],
      where = data.timeline.chunks > 1 ? `stage ${group.stage}, virtual stage ${group.chunk}` : `stage ${group.stage}`;
    const note = `${group.count > 1 ? `× ${group.count} alike, ` : ""}${where}`,
      role = element("span", { class: "role" }, ` ${note}`);
    if (group.words) {
      return row([group.title, role], () => [group.words.length
        ? table(["weights", "how they are sharded"], group.words)
        : element("p", {}, "No weights.")]);
    }
    if (group.layers.length === 1) return one(group.layers[0], stage, group.stage, note);
    return row([group.title, role], () => group.layers.map(layer => one(layer, stage, group.stage)));
  }));
}
function layerWords(layer) {
  const kind = kinds[layer.kind], messages = [...kind.ops.flatMap(op => op.messages), ...kind.gathers];
  return [sentWords(messages), layer.recompute === "none" ? "" : `recompute ${layer.recompute}`].filter(Boolean).join(
    " · ",
  );
}
