"use strict";
/* Curves over the steps of a run, drawn by uPlot. All charts share one range of steps and one cursor. */
mrl.charts = (() => {
  const HEIGHT = 190;
  const drawn = [];
  const sync = uPlot.sync("steps");
  let zooming = false;

  /* Chart of {title, unit, meaning, steps, curves, smooth, band, log, markers}. Charts near the window are drawn first,
   * the others while the page is idle, so that a page that is printed or captured has all of them. */
  function chart(data, { apart = false } = {}) {
    const plot = mrl.element("div", { class: "plot", role: "img", "aria-label": summary(data) });
    const readout = mrl.element("span", { class: "readout", "aria-hidden": "true" });
    const head = mrl.element("header", {}, mrl.element("h4", {}, data.title));
    const unit = data.unit === "share" ? "" : data.unit;
    if (unit) head.append(mrl.element("span", { class: "unit" }, unit));
    head.append(readout);
    const card = mrl.element("figure", { class: "chart" }, head);
    if (data.meaning) card.append(mrl.element("p", { class: "meaning" }, data.meaning));
    card.append(plot, legend(data));
    plot.draw = () => {
      if (!plot.uplot) plot.uplot = make(plot, readout, apart);
    };
    plot.chart = data;
    watcher.observe(plot);
    waiting.push(plot);
    if (waiting.length === 1) setTimeout(draw_next);
    return card;
  }

  function columns(data) {
    const edges = data.band ? [data.band[1], data.band[0]] : [];
    return [data.steps, ...data.curves.map((curve) => curve.values), ...data.smooth, ...edges];
  }

  /* Whether a chart shows all its steps. */
  function whole(plot) {
    const steps = plot.data[0];
    return plot.scales.x.min <= steps[0] && plot.scales.x.max >= steps[steps.length - 1];
  }

  const watcher = new IntersectionObserver(
    (entries) => {
      for (const entry of entries) {
        if (entry.isIntersecting) {
          watcher.unobserve(entry.target);
          entry.target.draw();
        }
      }
    },
    { rootMargin: "600px" },
  );

  const waiting = [];

  /* Draw a waiting chart, then let the page do something else. Charts in a closed box wait for the watcher. */
  function draw_next() {
    const plot = waiting.shift();
    if (plot && plot.clientWidth) plot.draw();
    if (waiting.length) setTimeout(draw_next);
  }

  addEventListener("beforeprint", () => {
    for (const plot of waiting.splice(0)) if (plot.clientWidth) plot.draw();
  });

  function summary(data) {
    const parts = data.curves.map((curve) => {
      const known = (value) => value !== null;
      const [first, last] = [curve.values.findIndex(known), curve.values.findLastIndex(known)];
      if (first < 0) return `${curve.label}: no values`;
      const said = (at) => `${mrl.number(curve.values[at], data.unit)} at step ${data.steps[at]}`;
      return `${curve.label}: ${said(first)}, ${said(last)}`;
    });
    return `${data.title}. ${parts.join("; ")}`;
  }

  function legend(data) {
    const list = mrl.element("ul", { class: "legend" });
    const several = data.curves.length > 1;
    data.curves.forEach((curve, at) => {
      if (several) list.append(mrl.element("li", {}, mrl.swatch(mrl.color(`c${at % 8}`)), curve.label));
    });
    if (data.left_out) list.append(mrl.element("li", {}, `${data.left_out} more in metrics.jsonl`));
    return list;
  }

  function make(plot, readout, apart) {
    const data = plot.chart;
    const series = [{}];
    const several = data.curves.length > 1;
    data.curves.forEach((curve, at) => {
      const color = curve.color || mrl.color(`c${at % 8}`);
      series.push({
        label: curve.label,
        stroke: data.smooth.length ? faded(color, 0.3) : color,
        width: data.smooth.length ? 1 : 1.6,
        spanGaps: data.markers,
        points: data.markers ? { show: true, size: 6, fill: color } : { show: data.steps.length < 3 },
      });
    });
    data.smooth.forEach((values, at) => {
      series.push({ label: "smoothed", stroke: mrl.color(`c${at % 8}`), width: 2, points: { show: false } });
    });
    const bands = [];
    if (data.band) {
      for (let edge = 0; edge < 2; edge += 1) {
        series.push({ stroke: "transparent", width: 0, points: { show: false } });
      }
      bands.push({ series: [series.length - 2, series.length - 1], fill: faded(mrl.color("c0"), 0.13) });
    }
    const axis = {
      stroke: mrl.color("soft"),
      font: `11px ${mrl.color("sans")}`,
      grid: { stroke: mrl.color("line"), width: 1 },
      ticks: { show: false },
    };
    const options = {
      width: Math.max(200, plot.clientWidth),
      height: HEIGHT,
      series,
      bands,
      padding: [8, 16, 0, 0],
      cursor: { sync: apart ? undefined : { key: "steps" }, points: { size: 6 }, focus: { prox: -1 } },
      scales: {
        x: { time: false },
        y: data.log && positive(data) ? { distr: 3, log: 10 } : { range: (u, low, high) => range(low, high, data.unit) },
      },
      axes: [
        { ...axis, size: 28, values: (u, ticks) => ticks.map((tick) => (Number.isInteger(tick) ? tick.toLocaleString("en") : "")) },
        {
          ...axis,
          size: (u, values) => 14 + 6.4 * Math.max(3, ...(values || []).map((text) => (text ? text.length : 0))),
          values: (u, ticks) => ticks.map((tick) => (tick === null ? "" : mrl.number(tick, data.unit))),
        },
      ],
      hooks: {
        setCursor: [(u) => { readout.textContent = reading(plot.chart, u.cursor.idx, several); }],
        setScale: [(u, key) => { if (key === "x" && !apart) zoom(u); }],
      },
    };
    const made = new uPlot(options, columns(data), plot);
    if (!apart) {
      sync.sub(made);
      drawn.push(made);
    }
    new ResizeObserver(() => {
      if (plot.clientWidth && plot.clientWidth !== made.width) made.setSize({ width: plot.clientWidth, height: HEIGHT });
    }).observe(plot);
    return made;
  }

  function reading(data, at, several) {
    if (at === null || at === undefined) return "";
    const values = data.curves.map((curve, place) => {
      const raw = mrl.number(curve.values[at], data.unit);
      const text = data.smooth.length ? `${raw} (smoothed ${mrl.number(data.smooth[place][at], data.unit)})` : raw;
      return several ? `${curve.label} ${text}` : text;
    });
    return `step ${data.steps[at].toLocaleString("en")}: ${values.slice(0, 3).join(", ")}`;
  }

  /* Same steps in all charts. */
  function zoom(source) {
    if (zooming) return;
    zooming = true;
    for (const other of drawn.filter((one) => !one.root.isConnected)) drawn.splice(drawn.indexOf(other), 1);
    const { min, max } = source.scales.x;
    const all = whole(source);
    for (const other of drawn) {
      if (other === source) continue;
      const steps = other.data[0];
      other.setScale("x", all ? { min: steps[0], max: steps[steps.length - 1] } : { min, max });
    }
    zooming = false;
  }

  function range(low, high, unit) {
    if (low === null || high === null) return [0, 1];
    if (low === high) return low === 0 ? [0, 1] : [Math.min(0, 1.2 * low), Math.max(0, 1.2 * high)];
    const room = 0.06 * (high - low);
    const bottom = low >= 0 && low - room < 0.4 * (high - low) ? 0 : low - room;
    const top = high + room;
    return [bottom, unit === "share" && high <= 1 ? Math.min(top, 1.02) : top];
  }

  function positive(data) {
    return data.curves.every((curve) => curve.values.every((value) => value === null || value > 0));
  }

  function faded(color, share) {
    return `color-mix(in srgb, ${color} ${share * 100}%, transparent)`;
  }

  /* Draw all charts of a group of the page. */
  function grid(charts, options) {
    return mrl.element("div", { class: "charts" }, ...charts.map((one) => chart(one, options)));
  }

  return { chart, grid };
})();
