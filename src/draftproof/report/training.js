// Draws the lines of a training with Observable Plot. Every figure is in #data.
"use strict";
(() => {
  const data = JSON.parse(document.getElementById("data").textContent);
  const STROKE = { train: "var(--other)", "held-out": "var(--whole)" };
  const DASH = { train: "5 4", "held-out": null };

  // One line a part; where rows have a draft step, one panel a step.
  function lines(width, { rows, label, percent }) {
    const drafts = new Set(rows.map((row) => row.draft).filter((draft) => draft !== undefined)).size;
    const facet = drafts > 0 ? { fx: "draft" } : {};
    const read = (value) => (percent ? `${(100 * value).toFixed(1)} %` : value.toFixed(3));
    const marks = Object.keys(STROKE).flatMap((part) => {
      const own = rows.filter((row) => row.part === part);
      const common = { x: "step", y: "value", stroke: STROKE[part], ...facet };
      return [
        Plot.line(own, { ...common, strokeWidth: 2, strokeDasharray: DASH[part] }),
        Plot.dot(own, { ...common, r: 3, fill: STROKE[part], tip: true, title: (d) => `step ${d.step}, ${part}\n${read(d.value)}` }),
      ];
    });
    return Plot.plot({
      width, height: 260, marginLeft: 52, marginBottom: 42, marginTop: drafts ? 40 : 28,
      style: { background: "none", fontFamily: "inherit", fontSize: "12px", overflow: "visible" },
      x: { label: "training step", labelArrow: "none", labelAnchor: "center", ticks: drafts ? Math.max(2, Math.round(width / drafts / 90)) : 8, tickSize: 0 },
      y: { label, labelArrow: "none", grid: true, nice: true, tickFormat: percent ? (v) => `${Math.round(100 * v)} %` : undefined, tickSize: 0 },
      ...(drafts ? { fx: { label: "draft step", padding: 0.12 } } : {}),
      marks,
    });
  }

  function drawAll() {
    for (const place of document.querySelectorAll("[data-chart]")) {
      const plot = lines(Math.max(place.clientWidth, 280), data[place.dataset.chart]);
      plot.setAttribute("role", "img");
      plot.setAttribute("aria-label", place.dataset.alt);
      place.replaceChildren(plot);
    }
  }
  drawAll();
  let waiting = null;
  addEventListener("resize", () => {
    clearTimeout(waiting);
    waiting = setTimeout(drawAll, 150);
  });
})();
