// Draws the charts with Observable Plot and tells how each token came about. Every figure is in #data.
"use strict";
(() => {
  const data = JSON.parse(document.getElementById("data").textContent);
  const WHOLE = "var(--whole)", OTHER = "var(--other)", SOFT = "var(--soft)", PAPER = "var(--paper)";
  const NARROW = 480;
  const times = (value) => `${value.toFixed(2)}×`;
  const cut = (label, most) => (label.length > most ? `${label.slice(0, most - 1)}…` : label);

  function frame(width, options) {
    return Plot.plot({
      width, style: { background: "none", fontFamily: "inherit", fontSize: "12px", overflow: "visible" }, ...options,
    });
  }

  // One row an input: two marks and their intervals. `marks` is [field, colour, symbol, dy, name].
  function dots(width, rows, marks, extra, xLabel, hasHead = false) {
    const narrow = width < NARROW, labels = rows.map((row) => row.label);
    const of = (field) => rows.filter((row) => row[field]).map((row) => ({ label: row.label, ...row[field] }));
    const title = (name) => (d) =>
      `${d.label}, ${name}\n${times(d.median)}${d.around ? `, ${d.kind} ${d.around.map((v) => v.toFixed(2)).join("–")}` : ""}` +
      `${d.pairs ? `\n${d.pairs} pair${d.pairs === 1 ? "" : "s"}` : ""}`;
    const drawn = marks.flatMap(([field, colour, symbol, dy, name]) => [
      Plot.ruleY(of(field).filter((d) => d.around), {
        y: "label", x1: (d) => d.around[0], x2: (d) => d.around[1], stroke: colour, strokeWidth: 2,
        strokeOpacity: 0.55, dy, strokeLinecap: "round",
      }),
      Plot.dot(of(field), {
        y: "label", x: "median", dy, r: symbol === "circle" ? 5 : 4, symbol, stroke: colour, strokeWidth: 2,
        fill: symbol === "circle" ? colour : PAPER, title: title(name), tip: true, className: `dots ${field}`,
      }),
    ]);
    return frame(width, {
      height: rows.length * 27 + 46 + (hasHead ? 28 : 8), marginLeft: narrow ? 74 : width > 700 ? 128 : 92, marginRight: narrow ? 14 : width > 700 ? 64 : 20, marginTop: hasHead ? 28 : 8, marginBottom: 40,
      x: { label: xLabel, labelArrow: "none", labelAnchor: "center", nice: true, grid: true, ticks: width > 700 ? 8 : 4, tickFormat: (v) => `${v}×`, tickSize: 0 },
      y: { domain: labels, label: null, tickSize: 0, tickFormat: (label) => cut(label, narrow ? 10 : 18) },
      marks: [...extra, ...drawn],
    });
  }

  const draw = {
    speedups({ rows, quoted, worst }, width) {
      const narrow = width < NARROW, last = rows.find((row) => row.label === worst);
      const reach = rows.flatMap(({ whole, serial }) => [1, whole.median, ...(serial ? [serial.median] : [])]);
      // Two captions that would meet lean away from each other.
      const gap = quoted ? (quoted.value - 1) / (Math.max(...reach) - Math.min(...reach) || 1) : 1;
      const near = Math.abs(gap) * width < 130, before = gap < 0 ? "start" : "end", behind = gap < 0 ? "end" : "start";
      const caption = (value, text, anchor, more) => Plot.text([value], {
        x: (d) => d, text: () => text, frameAnchor: "top", dy: -20, textAnchor: near ? anchor : "middle",
        dx: near ? (anchor === "start" ? 2 : -2) : 0, ...more });
      return dots(width, rows, [
        ["serial", OTHER, "diamond", 5, "leaner forward alone"], ["whole", WHOLE, "circle", -3, "against stock"],
      ], [
        Plot.ruleX([1], { stroke: "currentColor", strokeWidth: 1.5 }),
        caption(1, "stock", before, { fill: "currentColor" }),
        ...(quoted ? [
          Plot.ruleX([quoted.value], { stroke: WHOLE, strokeDasharray: "3 4" }),
          caption(quoted.value, `${quoted.name} ${times(quoted.value)}`, behind, { fill: WHOLE, fontWeight: 600 }),
        ] : []),
        ...(last && rows.length > 1 ? [Plot.text([last], {
          x: (d) => (d.whole.around ?? [0, d.whole.median])[1], y: "label", dx: 10, dy: -3, textAnchor: "start",
          text: (d) => (narrow ? "worst" : `worst, ${times(d.whole.median)}`), fill: SOFT, stroke: PAPER, strokeWidth: 4,
        })] : []),
      ], "times stock’s speed", true);
    },

    split({ serial, speculation, whole }, width) {
      const narrow = width < NARROW, reach = serial * speculation;
      const bars = [
        { name: "leaner forward", from: 1, to: serial, text: `× ${serial.toFixed(2)}`, fill: OTHER },
        { name: "speculation", from: serial, to: reach, text: `× ${speculation.toFixed(2)}`, fill: "var(--third)" },
        { name: "together", from: 1, to: whole, text: `= ${whole.toFixed(2)}×`, fill: WHOLE },
      ];
      const ends = [1, serial, reach, whole], low = Math.min(...ends), high = Math.max(...ends, 1.2);
      return frame(width, {
        height: 178, marginLeft: narrow ? 98 : 128, marginRight: narrow ? 72 : 80, marginTop: 8, marginBottom: 38,
        x: { type: "log", domain: [low * (low < 1 ? 0.95 : 1), high], label: "times stock’s speed, logarithmic", labelArrow: "none", labelAnchor: "center",
             ticks: [0.25, 0.5, 0.75, 1, 1.25, 1.5, 2, 2.5, 3, 4, 5, 6, 8, 10].filter((v) => v >= low * 0.95 && v <= high && !(narrow && v === 1.25)), tickFormat: (v) => `${v}×`, grid: true, tickSize: 0 },
        y: { domain: bars.map((bar) => bar.name), label: null, tickSize: 0, padding: 0.3 },
        marks: [
          Plot.barX(bars, { y: "name", x1: "from", x2: "to", fill: "fill", rx: 2, className: "bars" }),
          Plot.ruleX([1], { stroke: "currentColor", strokeWidth: 1.5 }),
          Plot.ruleX([serial], { stroke: OTHER, strokeDasharray: "2 3" }),
          Plot.text(bars, { y: "name", x: (d) => Math.max(d.from, d.to), dx: 8, textAnchor: "start", text: "text", fontWeight: 600, fontSize: 13, stroke: PAPER, strokeWidth: 4, fill: "currentColor" }),
        ],
      });
    },

    positions({ rows }, width) {
      const shown = (field, name) => ({ x: "position", y: field, tip: true, title: (d) =>
        `position ${d.position}, ${name}\n${Math.round(d[field] * 100)} %  (${d.num_trials} tries, ${d.num_rounds} rounds)` });
      const known = (field) => rows.filter((row) => row[field] !== null);
      return frame(width, {
        height: 250, marginLeft: 44, marginRight: 16, marginBottom: 40,
        x: { label: "position in the draft", labelArrow: "none", labelAnchor: "center", type: "linear", domain: [0.7, Math.max(...rows.map((row) => row.position)) + 0.3], ticks: rows.length > 14 ? 8 : rows.map((row) => row.position), tickFormat: "d", tickSize: 0 },
        y: { label: null, domain: [0, 1], tickFormat: (v) => `${Math.round(v * 100)} %`, ticks: 5, grid: true, tickSize: 0 },
        marks: [
          Plot.lineY(known("joint"), { x: "position", y: "joint", stroke: OTHER, strokeWidth: 2, strokeDasharray: "5 4" }),
          Plot.lineY(known("conditional"), { x: "position", y: "conditional", stroke: WHOLE, strokeWidth: 2 }),
          Plot.dot(known("joint"), { ...shown("joint", "joint"), stroke: OTHER, strokeWidth: 2, fill: PAPER, symbol: "diamond", r: 3.5, className: "dots joint" }),
          Plot.dot(known("conditional"), { ...shown("conditional", "conditional"), fill: WHOLE, r: 4, className: "dots conditional" }),
        ],
      });
    },

    offsets({ rows }, width) {
      const known = rows.filter((row) => row.tokens_per_forward !== null);
      return frame(width, {
        height: 250, marginLeft: 44, marginRight: 16, marginBottom: 40,
        x: { label: "tokens from the start of the output", labelArrow: "none", labelAnchor: "center", ticks: width < NARROW ? 4 : 8, tickSize: 0 },
        y: { label: null, domain: [0, Math.max(1.2, ...known.map((row) => row.tokens_per_forward)) * 1.05], grid: true, ticks: 5, tickSize: 0 },
        marks: [
          Plot.rectY(known, { x1: "start", x2: "end", y: "tokens_per_forward", fill: WHOLE, fillOpacity: 0.8, inset: 1, rx: 2, tip: true, className: "bars",
            title: (d) => `tokens ${d.start}–${d.end - 1}\n${d.tokens_per_forward.toFixed(2)} tokens a forward\n${d.num_rounds} rounds` }),
          Plot.ruleY([1], { stroke: "currentColor", strokeWidth: 1.5 }),
        ],
      });
    },

    curve({ points, depths }, width) {
      const most = Math.max(...points.map((p) => p.rows), ...depths.map((d) => d.rows));
      const contexts = [...new Set(points.map((p) => p.context))];
      const styles = ["none", "6 4", "2 3", "9 3 2 3"], colours = [WHOLE, OTHER, "var(--third)", "var(--s3)"];
      const which = (context) => contexts.indexOf(context) % 4;
      const x = { domain: [0.4, most + 0.6], tickSize: 0, ticks: [...new Set(points.map((p) => p.rows))], tickFormat: "d" };
      const sides = { marginLeft: 48, marginRight: width < NARROW ? 44 : 66 };
      const ends = contexts.map((context) => points.filter((p) => p.context === context).at(-1));
      const box = document.createElement("div");
      box.append(frame(width, {
        ...sides, height: 240, marginTop: 26, marginBottom: depths.length ? 22 : 40,
        x: { ...x, label: depths.length ? null : "rows of a verification", labelArrow: "none", labelAnchor: "center" },
        y: { label: "milliseconds", labelArrow: "none", labelAnchor: "top", domain: [0, Math.max(...points.map((p) => p.ms)) * 1.05], grid: true, ticks: 5, tickSize: 0 },
        marks: [
          ...contexts.map((context) => Plot.lineY(points.filter((p) => p.context === context), {
            x: "rows", y: "ms", stroke: colours[which(context)], strokeWidth: 2, strokeDasharray: styles[which(context)] })),
          Plot.dot(points, { x: "rows", y: "ms", r: 3, fill: (d) => colours[which(d.context)], tip: true, className: "dots curve",
            title: (d) => `${d.rows} row${d.rows === 1 ? "" : "s"}, ${d.context} positions\n${d.ms.toFixed(1)} ms` }),
          Plot.text(spread(ends, "ms", points, 240), { x: "rows", y: "at", dx: 8, textAnchor: "start", text: (d) => `${d.context}`, fill: (d) => colours[which(d.context)], fontWeight: 600 }),
        ],
      }));
      if (depths.length) {
        const total = Math.max(...depths.map((d) => d.rounds));
        box.append(frame(width, {
          ...sides, height: 128, marginTop: 10, marginBottom: 40,
          x: { ...x, label: "rows of a verification (depth + 1)", labelArrow: "none", labelAnchor: "center" },
          y: { label: null, domain: [0, total], ticks: 3, grid: true, tickSize: 0 },
          marks: [
            Plot.rectY(depths, { x1: (d) => d.rows - 0.38, x2: (d) => d.rows + 0.38, y: "rounds", fill: SOFT, rx: 1, tip: true, className: "bars",
              title: (d) => `depth ${d.depth}, ${d.rows} row${d.rows === 1 ? "" : "s"}\n${d.rounds} rounds` }),
            Plot.ruleY([0], { stroke: "currentColor" }),
            Plot.text(["rounds"], { frameAnchor: "top-right", text: (d) => d, fill: SOFT }),
          ],
        }));
      }
      return box;
    },

    predicted({ rows }, width) {
      const shaped = rows.map((row) => ({
        label: row.label, predicted: row.predicted === null ? null : { median: row.predicted },
        measured: row.measured === null ? null : { median: row.measured },
      }));
      return dots(width, shaped, [["predicted", OTHER, "diamond", 0, "predicted"], ["measured", WHOLE, "circle", 0, "measured"]],
        [one(), between(shaped, "predicted", "measured")], "speculation’s gain");
    },

    repeats({ rows }, width) {
      return dots(width, rows, [["first", OTHER, "diamond", 0, "first seen"], ["repeat", WHOLE, "circle", 0, "repeats"]],
        [one(), between(rows, "first", "repeat")], "times stock’s speed");
    },

    memory({ bars }, width) {
      const mib = (bytes) => `${Math.round(bytes / 2 ** 20).toLocaleString("en").replaceAll(",", "\u202f")} MiB`;
      const several = new Set(bars.map((bar) => bar.kind)).size > 1;
      const named = bars.map((bar) => ({ ...bar, name: several ? `${bar.arm}, ${bar.kind}` : bar.arm }));
      return frame(width, {
        height: 44 * bars.length + 16, marginLeft: several ? 110 : 56, marginRight: 84, marginTop: 4, marginBottom: 8,
        x: { axis: null, domain: [0, Math.max(...bars.map((bar) => bar.bytes))] },
        y: { label: null, domain: named.map((bar) => bar.name), tickSize: 0, padding: 0.28 },
        marks: [
          Plot.barX(named, { y: "name", x: "bytes", fill: (d) => (d.arm === "stock" ? SOFT : WHOLE), rx: 2, className: "bars" }),
          Plot.text(named, { y: "name", x: "bytes", dx: 8, textAnchor: "start", text: (d) => mib(d.bytes), fontWeight: 600, fontSize: 13 }),
        ],
      });
    },
  };

  const one = () => Plot.ruleX([1], { stroke: "currentColor", strokeWidth: 1.5 });
  function between(rows, a, b) {
    return Plot.ruleY(rows.filter((row) => row[a] && row[b]), {
      y: "label", x1: (d) => d[a].median, x2: (d) => d[b].median, stroke: SOFT, strokeWidth: 1.5 });
  }
  // End labels of the lines, moved apart so that none covers another.
  function spread(ends, field, points, height) {
    const least = (Math.max(...points.map((p) => p.ms)) * 14) / (height - 60);
    let above = -Infinity;
    return [...ends].sort((a, b) => a[field] - b[field]).map((end) => {
      above = Math.max(end[field], above + least);
      return { ...end, at: above };
    });
  }

  function drawAll() {
    for (const place of document.querySelectorAll(".plot")) {
      const width = Math.floor(place.clientWidth);
      if (!width || place.dataset.width === String(width)) continue;
      place.dataset.width = String(width);
      const made = draw[place.dataset.chart](data.charts[place.dataset.chart], width);
      place.replaceChildren(made);
      place.setAttribute("role", "img");
      place.setAttribute("aria-label", place.dataset.alt);
    }
  }
  drawAll();
  new ResizeObserver(drawAll).observe(document.querySelector("main"));

  // Tokens
  const tip = document.getElementById("tip");
  const ordinal = (n) => n + (n % 100 > 10 && n % 100 < 14 ? "th" : ["th", "st", "nd", "rd"][n % 10] ?? "th");
  let current = null, pinned = false;

  function add(parent, tag, text) {
    const made = document.createElement(tag);
    made.textContent = text;
    parent.append(made);
  }

  function how(token, round) {
    if (token.classList.contains("p")) return "Chosen by the prompt’s own forward.";
    if (!round) return "This arm left no trace of how it came about.";
    if (token.classList.contains("d")) return `Drafted by ${round.source} and accepted: ${ordinal(Number(token.dataset.p) + 1)} of ${round.depth} drafted.`;
    return round.depth ? "The model’s own token, after the draft." : "The model’s own token; nothing was drafted.";
  }

  function describe(token, output) {
    const all = output.querySelectorAll(".t"), index = [...all].indexOf(token);
    const { rounds, margins } = data.texts[Number(output.dataset.text)];
    const round = token.dataset.r === undefined ? null : rounds[Number(token.dataset.r)];
    tip.replaceChildren();
    add(tip, "b", `Token ${index + 1} of ${all.length}`);
    add(tip, "p", how(token, round));
    if (token.classList.contains("half")) add(tip, "p", "Shows nothing by itself: a part of a character, or a token without text.");
    const list = document.createElement("dl");
    const figures = round ? [["round", token.dataset.r], ["depth", String(round.depth)], ["accepted", String(round.accepted)]] : [];
    const margin = margins?.[index];
    figures.push(["margin", margins === null ? "not replayed" : margin === null || margin === undefined ? "none" : String(Number(margin.toPrecision(3)))]);
    if (round?.reason) figures.push(["why this depth", round.reason]);
    if (round?.redecided) figures.push(["near-ties decided again", String(round.redecided)]);
    for (const [name, value] of figures) { add(list, "dt", name); add(list, "dd", value); }
    tip.append(list);
  }

  function place(token) {
    tip.hidden = false;
    const at = token.getClientRects()[0] ?? token.getBoundingClientRect(), box = tip.getBoundingClientRect(), room = document.documentElement.clientWidth;
    const left = Math.min(Math.max(12, at.left), Math.max(12, room - box.width - 12));
    const above = at.top - box.height - 10;
    tip.style.left = `${left + scrollX}px`;
    tip.style.top = `${(above > 8 ? above : at.bottom + 10) + scrollY}px`;
  }

  function clear() {
    for (const marked of document.querySelectorAll(".t.on, .t.same")) marked.classList.remove("on", "same");
    tip.hidden = true;
    current = null;
    pinned = false;
  }

  function select(token) {
    const output = token.closest(".output");
    clear();
    current = token;
    if (token.dataset.r !== undefined) {
      for (const other of output.querySelectorAll(`[data-r="${token.dataset.r}"]`)) other.classList.add("same");
    }
    token.classList.add("on");
    describe(token, output);
    place(token);
  }

  for (const output of document.querySelectorAll(".output")) {
    const token = (event) => event.target.closest(".t");
    output.addEventListener("pointerover", (event) => { if (!pinned && event.pointerType === "mouse" && token(event)) select(token(event)); });
    output.addEventListener("pointerleave", () => { if (!pinned) clear(); });
    output.addEventListener("click", (event) => {
      const chosen = token(event), again = pinned && chosen === current;
      if (!chosen || again) return clear();
      select(chosen);
      pinned = true;
    });
    output.addEventListener("focus", () => { if (!current && output.matches(":focus-visible")) { const first = output.querySelector(".t"); if (first) select(first); } });
    output.addEventListener("blur", clear);
    output.addEventListener("keydown", (event) => {
      const all = [...output.querySelectorAll(".t")], now = all.indexOf(current);
      const next = { ArrowRight: now + 1, ArrowLeft: now - 1, Home: 0, End: all.length - 1 }[event.key];
      if (event.key === "Escape") return clear();
      if (next === undefined || !all[next]) return;
      event.preventDefault();
      select(all[next]);
      pinned = true;
    });
  }
  document.addEventListener("pointerdown", (event) => { if (!event.target.closest(".output")) clear(); });

  // On paper every fold is open.
  let opened = [];
  addEventListener("beforeprint", () => {
    opened = [...document.querySelectorAll("details:not([open])")];
    for (const fold of opened) fold.open = true;
  });
  addEventListener("afterprint", () => { for (const fold of opened) fold.open = false; });
})();
