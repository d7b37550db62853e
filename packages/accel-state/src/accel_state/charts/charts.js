"use strict";
(() => {
  const HEIGHT = 240;
  const plots = [];
  const css = name => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
  // Sizes at which a unit begins, largest first.
  const UNITS = {
    s: [[1, "s"], [1e-3, "ms"], [1e-6, "µs"], [0, "ns", 1e-9]],
    B: [[2 ** 40, "TiB"], [2 ** 30, "GiB"], [2 ** 20, "MiB"], [2 ** 10, "KiB"], [0, "B", 1]],
  };
  const POWERS = Array.from({ length: 64 }, (_, power) => 2 ** power);
  const shown = (value, unit = "") => {
    if (value == null) return "–";
    const size = Math.abs(value);
    if (unit && size !== 0) {
      const [low, name, scale = low] = UNITS[unit].find(([smallest]) => size >= smallest);
      return `${Number((value / scale).toPrecision(4))} ${name}`;
    }
    if (size !== 0 && (size < 1e-3 || size >= 1e7)) return Number(value.toPrecision(4)).toExponential();
    return String(Number(value.toPrecision(6)));
  };
  const colorOf = curve => (curve.color == null ? "--text" : `--curve-${curve.color}`);
  // The exponential moving average of `accel track show --smooth`, with the bias correction of Adam.
  const smoothed = (values, weight) => {
    let average = 0, total = 0;
    return values.map(value => {
      if (value == null) return value;
      average = weight * average + (1 - weight) * value;
      total = weight * total + (1 - weight);
      return average / total;
    });
  };
  const slider = document.getElementById("smoothing");
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
    const stacked = content.curves.some(curve => curve.stacked);
    const format = (plot, splits) => splits.map(value => (value == null ? "" : shown(value, content.unit)));
    // Lanes are rows with names, at the heights 0, 1, 2 and so on.
    const lanes = content.lanes.length
      ? {
          range: () => [-0.6, content.lanes.length - 0.4],
          axis: axis({ size: wide, splits: () => content.lanes.map((lane, row) => row), values: () => content.lanes }),
        }
      : {
          range: stacked ? (plot, low, high) => [0, widened(0, high)[1] * 1.08] : padded,
          axis: axis({ size: wide, values: format, ...(content.unit === "B" ? { incrs: POWERS } : {}) }),
        };
    const options = {
      width: target.clientWidth,
      height: HEIGHT,
      scales: { x: { time: false, range: (plot, low, high) => widened(low, high) }, y: { range: lanes.range } },
      axes: [axis({ size: 30, space: 70 }), lanes.axis],
      legend: { markers: { width: 0, fill: (plot, index) => `var(${colorOf(content.curves[index - 1])})` } },
      // Charts with another horizontal axis have no value at the same place.
      cursor: { sync: { key: content.x, scales: ["x", null] }, points: { size: content.lanes.length ? 0 : 7 } },
      series: [
        { label: content.x, value: (plot, value) => shown(value) },
        ...content.curves.map(curve => ({
          label: curve.label,
          stroke: () => css(colorOf(curve)),
          width: curve.stacked ? 0 : curve.width,
          ...(curve.stacked ? { fill: () => css(colorOf(curve)), points: { show: false } } : {}),
          ...(curve.dashed ? { dash: [6, 4] } : {}),
          ...(content.lanes.length ? { paths: bars(curve) } : {}),
          ...(curve.marked ? { points: { show: true, size: 11, width: 3 } } : {}),
          // The value in a lane is its row, which has a name.
          value: (plot, value, series, at) =>
            content.lanes.length ? "" : shown(at == null ? value : own[series][at], content.unit),
        })),
      ],
      hooks: { setSeries: stacked ? [(plot, index, change) => change.show != null && refresh()] : [] },
    };
    // An interruption of one curve lasts until its next point, also where other curves have points in between.
    const EXPAND_NULLS = 2;
    let own = [[]]; // the values of each curve, as the legend shows them
    const compute = isShown => {
      const weight = slider && !stacked && !content.lanes.length ? Number(slider.value) : 0;
      const tables = content.curves.map(curve => [curve.x, weight ? smoothed(curve.y, weight) : curve.y]);
      own = tables.length ? uPlot.join(tables, tables.map(() => [0, EXPAND_NULLS])) : [[]];
      if (!stacked) return own;
      const drawn = [...own];
      let below = own[0].map(() => 0);
      // The last one is the lowest, and drawn last: each area reaches down to zero, and covers those behind it.
      for (let index = content.curves.length; index > 0; index--) {
        if (!content.curves[index - 1].stacked || !isShown(index)) continue;
        drawn[index] = below = below.map((sum, at) => sum + (own[index][at] ?? 0));
      }
      return drawn;
    };
    const plot = new uPlot(options, compute(() => true), target);
    const refresh = () => {
      const { min, max } = plot.scales.x;
      plot.setData(compute(index => plot.series[index].show), false);
      plot.setScale("x", { min, max }); // keeps the zoom, and draws again
    };
    plots.push(plot);
    if (slider) slider.addEventListener("input", refresh);
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

  if (slider) slider.addEventListener("input", () => { slider.nextElementSibling.textContent = Number(slider.value).toFixed(2); });
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
