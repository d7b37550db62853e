"use strict";
(() => {
  const HEIGHT = 240;
  const plots = [];
  const css = name => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
  const shown = value => {
    if (value == null) return "–";
    const size = Math.abs(value);
    if (size !== 0 && (size < 1e-3 || size >= 1e7)) return value.toExponential(3);
    return String(Number(value.toPrecision(6)));
  };
  // A range of one value has no width.
  const widened = (low, high) => {
    if (low == null || high == null || !isFinite(low) || !isFinite(high)) return [0, 1];
    if (low < high) return [low, high];
    const margin = Math.abs(low) * 0.05 || 1;
    return [low - margin, high + margin];
  };
  const padded = (plot, low, high) => {
    const [first, last] = widened(low, high);
    const margin = (last / 2 - first / 2) * 0.08;
    return [first - margin, last + margin];
  };
  const axis = (more = {}) => ({
    stroke: () => css("--soft"),
    grid: { stroke: () => css("--grid"), width: 1 },
    ticks: { stroke: () => css("--line"), width: 1, size: 4 },
    font: "12px system-ui, sans-serif",
    values: (plot, splits) => splits.map(value => (value == null ? "" : shown(value))),
    ...more,
  });
  // In a lane, what is shorter than a pixel is shown as one.
  const bars = curve => plot => {
    const path = new Path2D();
    const at = index => plot.valToPos(curve.x[index], "x", true);
    for (let index = 0; index + 1 < curve.x.length; index++) {
      if (curve.y[index] == null || curve.y[index + 1] == null) continue;
      const height = plot.valToPos(curve.y[index], "y", true);
      path.moveTo(at(index), height);
      path.lineTo(Math.max(at(index + 1), at(index) + 1), height);
    }
    return { stroke: path };
  };
  const draw = figure => {
    const content = JSON.parse(figure.querySelector("script").textContent);
    const target = figure.querySelector(".plot");
    const wide = (plot, values) => 14 + 7 * Math.max(3, ...(values || []).map(text => text.length));
    // Lanes are rows with names, at the heights 0, 1, 2 and so on.
    const lanes = content.lanes.length
      ? {
          range: () => [-0.6, content.lanes.length - 0.4],
          axis: axis({ size: wide, splits: () => content.lanes.map((lane, row) => row), values: () => content.lanes }),
        }
      : { range: padded, axis: axis({ size: wide }) };
    const options = {
      width: target.clientWidth,
      height: HEIGHT,
      scales: { x: { time: false, range: (plot, low, high) => widened(low, high) }, y: { range: lanes.range } },
      axes: [axis({ size: 30, space: 70 }), lanes.axis],
      legend: { markers: { width: 0, fill: (plot, index) => `var(--curve-${content.curves[index - 1].color})` } },
      cursor: { sync: { key: "page", scales: ["x", null] }, points: { size: 7 } },
      series: [
        { label: content.x, value: (plot, value) => shown(value) },
        ...content.curves.map(curve => ({
          label: curve.label,
          stroke: () => css(`--curve-${curve.color}`),
          width: curve.width,
          ...(content.lanes.length ? { paths: bars(curve) } : {}),
          points: curve.marked ? { show: true, size: 11, width: 3 } : {},
          value: (plot, value) => shown(value),
        })),
      ],
    };
    // An interruption of one curve lasts until its next point, also where other curves have points in between.
    const EXPAND_NULLS = 2;
    const tables = content.curves.map(curve => [curve.x, curve.y]);
    const data = tables.length ? uPlot.join(tables, tables.map(() => [0, EXPAND_NULLS])) : [[]];
    const plot = new uPlot(options, data, target);
    plots.push(plot);
    for (const key of document.querySelectorAll(".key[aria-pressed=false]")) show(plot, key.dataset.label, false);
    new ResizeObserver(() => plot.setSize({ width: target.clientWidth, height: HEIGHT })).observe(target);
  };
  const show = (plot, label, visible) => {
    plot.series.forEach((series, index) => {
      if (index && series.label === label) plot.setSeries(index, { show: visible });
    });
  };
  // A page may have hundreds of charts: each is drawn when it is almost in view.
  const observer = new IntersectionObserver(
    entries => {
      for (const entry of entries) {
        if (!entry.isIntersecting) continue;
        observer.unobserve(entry.target);
        draw(entry.target);
      }
    },
    { rootMargin: "800px" },
  );
  for (const figure of document.querySelectorAll("figure.chart")) observer.observe(figure);
  addEventListener("beforeprint", () => {
    for (const figure of document.querySelectorAll("figure.chart")) {
      observer.unobserve(figure);
      if (!figure.querySelector(".uplot")) draw(figure);
    }
  });
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => plots.forEach(plot => plot.redraw(false)));

  for (const key of document.querySelectorAll(".key[data-label]")) {
    key.addEventListener("click", () => {
      const visible = key.getAttribute("aria-pressed") !== "true";
      key.setAttribute("aria-pressed", String(visible));
      for (const plot of plots) show(plot, key.dataset.label, visible);
    });
  }

  const compare = (one, other) => {
    const [a, b] = [one.dataset, other.dataset];
    if (a.number !== undefined && b.number !== undefined) return Number(a.number) - Number(b.number);
    return (a.sort ?? a.number ?? "").localeCompare(b.sort ?? b.number ?? "", "en", { numeric: true });
  };
  const empty = cell => cell.dataset.number === undefined && cell.dataset.sort === undefined;
  for (const table of document.querySelectorAll("table.sortable")) {
    const heads = [...table.tHead.rows[0].cells];
    heads.forEach((head, column) => {
      head.querySelector("button").addEventListener("click", () => {
        const down = head.getAttribute("aria-sort") === "ascending";
        heads.forEach(other => other.removeAttribute("aria-sort"));
        head.setAttribute("aria-sort", down ? "descending" : "ascending");
        const rows = [...table.tBodies[0].rows];
        rows.sort((one, other) => {
          const [a, b] = [one.cells[column], other.cells[column]];
          if (empty(a) || empty(b)) return empty(a) - empty(b); // without a value: last, either way
          return down ? compare(b, a) : compare(a, b);
        });
        table.tBodies[0].append(...rows);
      });
    });
  }
})();
