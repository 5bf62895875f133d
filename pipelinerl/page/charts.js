/* Charts of the run's pages: lines, bars and a heat map as inline SVG. views.js decides what to draw.
 *
 * Each chart function fills one element with a <figure>. The figure has a title, a legend if there are several series, a drawing as
 * wide as the element, and a readout that follows the pointer or the arrow keys. When the figure is drawn again with newer data,
 * keyboard focus and readout are kept. Text is always set as text, never as HTML. */
"use strict";

const PrlCharts = (() => {
  const SVG = "http://www.w3.org/2000/svg";
  const HEIGHT = 210;
  const PAD = { top: 14, right: 14, bottom: 34, left: 52 };

  const isKnown = (value) => value !== null && value !== undefined;

  function fill(made, attributes, children) {
    for (const [key, value] of Object.entries(attributes)) {
      if (key === "style") made.style.cssText = value; // the page's security policy refuses it as an attribute
      else made.setAttribute(key, value);
    }
    made.append(...children.filter(isKnown));
    return made;
  }

  /* Return a new HTML element. Children are elements or texts; null and undefined are left out. */
  const node = (name, attributes = {}, ...children) => fill(document.createElement(name), attributes, children);
  /* Return a new SVG element. */
  const shape = (name, attributes = {}, ...children) => fill(document.createElementNS(SVG, name), attributes, children);

  /* Return a round step that divides [low, high] into about `count` parts; if `whole` is true, an integer. */
  function tickStep(low, high, count, whole = false) {
    const rough = Math.max(whole ? 1 : 0, (high - low || 1) / Math.max(1, count));
    const power = 10 ** Math.floor(Math.log10(rough));
    return [1, 2, 2.5, 5, 10].map((m) => m * power).find((s) => s >= rough * 0.999 && (!whole || Number.isInteger(s)));
  }

  /* Return the multiples of `tickStep` within [low, high]. */
  function ticks(low, high, count, whole = false) {
    const step = tickStep(low, high, count, whole), found = [];
    for (let i = Math.ceil(low / step - 1e-9); i * step <= high + step * 1e-9; i++) found.push(i * step);
    return found;
  }

  function number(value) {
    if (!isKnown(value) || Number.isNaN(value)) return "–";
    const size = Math.abs(value);
    if (size >= 1e9) return (value / 1e9).toFixed(1) + "G";
    if (size >= 1e6) return (value / 1e6).toFixed(1) + "M";
    if (size >= 1e4) return (value / 1e3).toFixed(size >= 1e5 ? 0 : 1) + "k";
    if (size !== 0 && size < 1e-3) return value.toExponential(1);
    return String(Number(value.toPrecision(3)));
  }

  const placeText = (value) => (Number.isInteger(value) ? String(value) : number(value)); // steps are not abbreviated

  /* For each element with a chart: `at`, label of the position in its readout; `focused`, whether the chart has keyboard focus. */
  const reading = new WeakMap();

  function frame(root, options) {
    const focused = document.activeElement !== null && root.contains(document.activeElement);
    reading.set(root, { at: (reading.get(root) || {}).at ?? null, focused });
    const kept = { ...reading.get(root) };
    root.replaceChildren(); // blurs the focused element, which closes the readout
    reading.set(root, kept);
    const sub = options.sub ? node("div", { class: "sub" }, options.sub) : null;
    const caption = node("figcaption", {}, node("div", { class: "title" }, options.title), sub);
    return root.appendChild(node("figure", { class: "chart" }, caption));
  }

  /* Return the style of a short line in the colour and dash of a series. */
  const keyStyle = ({ color, dash }) => (dash ? `width:24px;height:0;border-top:3px ${dash} ${color}` : `background:${color}`);
  const DASHES = { dashed: "9 5", dotted: "1 5" };

  function legend(figure, series) {
    if (series.length < 2) return;
    const key = (one) => node("span", { class: "key", style: `${keyStyle(one)};opacity:${one.faint ? 0.35 : 1}` });
    figure.append(node("div", { class: "legend" }, ...series.map((one) => node("span", {}, key(one), one.name))));
  }

  const empty = (figure, text) => figure.append(node("div", { class: "empty" }, text || "No data"));

  /* Add a drawing that is drawn again when the figure's width changes. */
  function responsive(figure, label, draw, height = HEIGHT) {
    const svg = figure.appendChild(shape("svg", { height, role: "img", "aria-label": label, tabindex: 0 }));
    let drawn = 0;
    const redraw = () => {
      if (!svg.isConnected) return observer.disconnect();
      const width = Math.floor(svg.getBoundingClientRect().width);
      if (width < 40 || width === drawn) return;
      drawn = width;
      svg.setAttribute("viewBox", `0 0 ${width} ${height}`);
      svg.replaceChildren();
      draw(svg, width);
    };
    const observer = new ResizeObserver(redraw);
    observer.observe(svg);
    redraw();
    if ((reading.get(figure.parentNode) || {}).focused) svg.focus({ preventScroll: true });
  }

  function yAxis(svg, width, low, high, y, format) {
    for (const tick of ticks(low, high, 4)) {
      svg.append(shape("line", { class: "grid", x1: PAD.left, x2: width - PAD.right, y1: y(tick), y2: y(tick) }));
      svg.append(shape("text", { x: PAD.left - 8, y: y(tick) + 4, "text-anchor": "end" }, format(tick)));
    }
    baseLine(svg, width);
  }

  function baseLine(svg, width) {
    const base = HEIGHT - PAD.bottom;
    svg.append(shape("line", { class: "base", x1: PAD.left, x2: width - PAD.right, y1: base, y2: base }));
  }

  function xLabel(svg, width, text) {
    svg.append(shape("text", { x: width - PAD.right, y: HEIGHT - 3, "text-anchor": "end" }, text));
  }

  /* Add a readout that follows the pointer or the arrow keys. positions: [{x, lines: [{name, color, text}], at}], with x in pixels. */
  function readout(figure, svg, width, positions) {
    if (!positions.length) return;
    const cross = svg.appendChild(shape("line", { class: "cross", y1: PAD.top, y2: HEIGHT - PAD.bottom, visibility: "hidden" }));
    figure.querySelectorAll(".tip").forEach((old) => old.remove());
    const tip = figure.appendChild(node("div", { class: "tip", hidden: "" }));
    const kept = reading.get(figure.parentNode) || {};
    let current = -1;
    const show = (index) => {
      current = Math.max(0, Math.min(positions.length - 1, index));
      const { x, lines, at } = positions[current];
      kept.at = at;
      cross.setAttribute("x1", x);
      cross.setAttribute("x2", x);
      cross.setAttribute("visibility", "visible");
      const style = "display:inline-block;width:10px;height:3px;margin-right:6px;vertical-align:middle;";
      tip.replaceChildren(node("div", { class: "at" }, at), ...lines.map((one) =>
        node("div", {}, one.color ? node("span", { class: "key", style: style + keyStyle(one) }) : null, `${one.name ? one.name + " " : ""}${one.text}`)));
      tip.hidden = false;
      const scale = svg.getBoundingClientRect().width / width;
      const left = svg.offsetLeft || 14;
      const wanted = left + x * scale + 12;
      tip.style.left = Math.max(4, wanted + tip.offsetWidth > figure.clientWidth ? wanted - tip.offsetWidth - 24 : wanted) + "px";
      tip.style.top = figure.clientHeight - HEIGHT + "px";
    };
    const hide = () => { tip.hidden = true; cross.setAttribute("visibility", "hidden"); current = -1; kept.at = null; };
    if (isKnown(kept.at)) show(Math.max(0, positions.findIndex((one) => one.at === kept.at)));
    const nearest = (event) => {
      const box = svg.getBoundingClientRect();
      const at = ((event.clientX - box.left) / box.width) * width;
      let low = 0, high = positions.length - 1;
      while (high - low > 1) { const mid = (low + high) >> 1; if (positions[mid].x < at) low = mid; else high = mid; }
      return at - positions[low].x < positions[high].x - at ? low : high;
    };
    svg.onpointermove = (event) => show(nearest(event));
    svg.onpointerdown = svg.onpointermove;
    svg.onpointerleave = hide;
    svg.onblur = hide;
    svg.onkeydown = (event) => {
      const move = { ArrowLeft: -1, ArrowRight: 1, PageUp: -10, PageDown: 10, Home: -1e9, End: 1e9 }[event.key];
      if (event.key === "Escape") hide();
      if (move === undefined) return;
      event.preventDefault();
      const start = ["ArrowLeft", "PageUp", "End"].includes(event.key) ? positions.length - 1 : 0;
      show(current < 0 ? start : current + move);
    };
  }

  /* Return the range of a vertical axis. `low` and `high` fix its ends; an end that is not fixed is a tick. Equal values get a range
   * from 0 to twice the value. If the least value is positive and at most half of the largest, the range begins at 0. It spans
   * at least 4 % of the largest value, so that tick labels of three digits differ. */
  function extent(values, low, high) {
    let least = low ?? Infinity, most = high ?? -Infinity;
    for (const value of values) { if (low === undefined && value < least) least = value; if (high === undefined && value > most) most = value; }
    if (most <= least) {
      if (high !== undefined) return [high - (Math.abs(high) || 1) * 0.1, high];
      if (low !== undefined) return [low, low + (Math.abs(low) || 1) * 0.1];
      return least === 0 ? [0, 1] : [Math.min(0, 2 * least), Math.max(0, 2 * least)];
    }
    if (low === undefined && least > 0 && least <= most / 2) least = 0;
    const lacking = Math.max(0, 0.04 * Math.max(Math.abs(least), Math.abs(most)) - (most - least)) / 2;
    const step = tickStep(least - lacking, most + lacking, 4);
    return [low ?? step * Math.floor((least - lacking) / step + 1e-9), high ?? step * Math.ceil((most + lacking) / step - 1e-9)];
  }

  /* Return the range and tick labels of a horizontal axis of `width` pixels. Both ends are labelled. A single value is in the
   * middle. The labels of integers are integers. */
  function across(values, width) {
    const low = Math.min(...values), high = Math.max(...values);
    if (low === high) return { low: low - 0.5, high: high + 0.5, marks: [low] };
    const apart = (50 * (high - low)) / width;
    const inner = ticks(low, high, width / 90, values.every(Number.isInteger)).filter((one) => one - low > apart && high - one > apart);
    return { low, high, marks: [low, ...inner, high] };
  }

  /* Draw lines over a numeric x. series: [{name, color, points: [[x, y | null], ...], dots, dash, label}]. `dash`: "dashed" or
   * "dotted". `label`: a letter at the line's end. `hold`: the readout also shows the last value of each line before its position.
   * yLow and yHigh fix the range of y. The range of x includes xRange, [low, high]. */
  function lines(root, options) {
    const format = options.format || number;
    const series = options.series.filter((one) => one.points.some((point) => isKnown(point[1])));
    const figure = frame(root, options);
    if (!series.length) return empty(figure, options.emptyText);
    legend(figure, series);
    const known = series.map((one) => one.points.filter((point) => isKnown(point[1])));
    const places = [...new Set([...(options.xRange || []), ...known.flat().map((point) => point[0])])];
    const [yLow, yHigh] = extent(known.flat().map((point) => point[1]), options.yLow, options.yHigh);
    responsive(figure, `${options.title}: ${summary(known, series, format)}`, (svg, width) => {
      const { low, high, marks } = across(places, width);
      const x = (v) => PAD.left + ((v - low) / (high - low)) * (width - PAD.left - PAD.right);
      const y = (v) => HEIGHT - PAD.bottom - ((v - yLow) / (yHigh - yLow)) * (HEIGHT - PAD.top - PAD.bottom);
      yAxis(svg, width, yLow, yHigh, y, format);
      for (const tick of marks)
        svg.append(shape("text", { x: x(tick), y: HEIGHT - PAD.bottom + 16, "text-anchor": "middle" }, placeText(tick)));
      xLabel(svg, width, options.xName || "");
      series.forEach((one, index) => drawSeries(svg, one, known[index], x, y));
      labelEnds(svg, series, known.map((points) => points[points.length - 1]).map(([px, py]) => [x(px), y(py)]));
      const told = options.hold ? known.map((points) => held(points, places)) : known;
      readout(figure, svg, width, positionsOf(series, told, x, format, options.xName || ""));
    });
  }

  function drawSeries(svg, one, points, x, y) {
    const path = points.map((p, i) => `${i ? "L" : "M"}${x(p[0]).toFixed(1)},${y(p[1]).toFixed(1)}`).join("");
    svg.append(shape("path", { d: path, fill: "none", stroke: one.color, "stroke-width": 2, "stroke-linejoin": "round", "stroke-linecap": "round", "stroke-dasharray": DASHES[one.dash] || "none", "stroke-opacity": one.faint ? 0.35 : 1 }));
    if (one.dots || points.length < 8)
      for (const p of points) svg.append(shape("circle", { cx: x(p[0]), cy: y(p[1]), r: 4, fill: one.color, stroke: "var(--card)", "stroke-width": 2 }));
  }

  const LABEL = 12;

  /* Return the heights of labels at `ends`, [x, y] in pixels, so that labels next to each other do not overlap. */
  function spreadEnds(ends, bottom) {
    const heights = ends.map(([, y]) => y), order = ends.map((_, i) => i).sort((a, b) => heights[a] - heights[b]);
    const near = (i, j) => Math.abs(ends[i][0] - ends[j][0]) < LABEL;
    order.forEach((i, at) => order.slice(0, at).forEach((j) => { if (near(i, j)) heights[i] = Math.max(heights[i], heights[j] + LABEL); }));
    [...order].reverse().forEach((i, at, down) => {
      const below = down.slice(0, at).filter((j) => near(i, j)).map((j) => heights[j] - LABEL);
      heights[i] = Math.min(heights[i], bottom, ...below);
    });
    return heights;
  }

  function labelEnds(svg, series, ends) {
    const heights = spreadEnds(ends, HEIGHT - PAD.bottom);
    series.forEach(({ label }, i) => { if (label) svg.append(shape("text", { class: "end", x: ends[i][0] + 4, y: heights[i] + 4 }, label)); });
  }

  /* For each of `places` within the range of `points`, return [place, value of the last point up to that place]. */
  function held(points, places) {
    let at = -1;
    const sorted = [...places].sort((a, b) => a - b).filter((place) => place <= points[points.length - 1][0]);
    return sorted.flatMap((place) => { while (at + 1 < points.length && points[at + 1][0] <= place) at++; return at < 0 ? [] : [[place, points[at][1]]]; });
  }

  function positionsOf(series, known, x, format, xName) {
    const at = new Map();
    known.forEach((points, index) => {
      for (const [px, py] of points) {
        if (!at.has(px)) at.set(px, []);
        const { name, color, dash } = series[index];
        at.get(px).push({ name: series.length > 1 ? name : "", color, dash, text: format(py) });
      }
    });
    return [...at.entries()].sort((a, b) => a[0] - b[0]).map(([px, found]) => ({ x: x(px), lines: found, at: `${xName} ${placeText(px)}` }));
  }

  function summary(known, series, format) {
    return known.map((points, i) => `${series[i].name} from ${format(points[0][1])} to ${format(points[points.length - 1][1])}`).join("; ");
  }

  /* Draw one bar for each of bars: [{label, value, note}]. A null value leaves a gap. */
  function bars(root, options) {
    const format = options.format || number;
    const figure = frame(root, options);
    const given = options.bars, values = given.map((bar) => bar.value).filter((value) => value !== null);
    if (!values.length) return empty(figure, options.emptyText);
    const [low, high] = extent(values, options.yLow ?? 0, options.yHigh);
    const label = `${options.title}: ${given.map((bar) => `${bar.label} ${format(bar.value)}`).join(", ")}`;
    responsive(figure, label, (svg, width) => {
      const y = (v) => HEIGHT - PAD.bottom - ((v - low) / (high - low)) * (HEIGHT - PAD.top - PAD.bottom);
      const slot = (width - PAD.left - PAD.right) / given.length;
      const wide = Math.min(46, Math.max(1, slot - 2));
      yAxis(svg, width, low, high, y, format);
      const every = Math.ceil(given.length / Math.max(1, (width - PAD.left) / 34));
      const positions = given.map((bar, i) => {
        const middle = PAD.left + slot * (i + 0.5);
        const base = HEIGHT - PAD.bottom, top = bar.value === null ? base : y(bar.value), r = Math.min(4, wide / 2, Math.max(0, base - top));
        if (top < base) svg.append(shape("path", { fill: options.color || "var(--series-1)", d: `M${middle - wide / 2},${base}V${top + r}q0,${-r} ${r},${-r}h${wide - 2 * r}q${r},0 ${r},${r}V${base}z` }));
        if (i % every === 0) svg.append(shape("text", { x: middle, y: base + 16, "text-anchor": "middle" }, bar.label));
        return { x: middle, at: `${options.xName || ""} ${bar.label}`, lines: [{ name: "", text: bar.note || format(bar.value) }] };
      });
      xLabel(svg, width, options.xName || "");
      readout(figure, svg, width, positions);
    });
  }

  /* Draw shares by column and row as shades of one colour. columns: [{x, shares: {row: share}}]; rows: sorted row keys. */
  function heat(root, options) {
    const figure = frame(root, options);
    const { columns, rows } = options;
    if (!columns.length || !rows.length) return empty(figure, options.emptyText);
    responsive(figure, options.title, (svg, width) => {
      const w = (width - PAD.left - PAD.right) / columns.length;
      const h = (HEIGHT - PAD.top - PAD.bottom) / rows.length;
      const top = (i) => HEIGHT - PAD.bottom - (i + 1) * h;
      columns.forEach((column, c) => rows.forEach((row, r) => {
        const share = column.shares[row];
        if (!share) return;
        const mix = Math.round(100 * Math.min(1, Math.sqrt(share)));
        svg.append(shape("rect", { x: PAD.left + c * w, y: top(r), width: w + 0.4, height: Math.max(1, h - 1), fill: `color-mix(in oklab, var(--heat-1) ${mix}%, var(--heat-0))` }));
      }));
      const every = Math.ceil(rows.length / 8);
      rows.forEach((row, r) => { if (r % every === 0) svg.append(shape("text", { x: PAD.left - 8, y: top(r) + h / 2 + 4, "text-anchor": "end" }, row)); });
      baseLine(svg, width);
      const xs = columns.map((column) => column.x);
      let labelled = -1;
      for (const value of across(xs, width).marks) {
        const c = xs.findLastIndex((x) => x <= value);
        if (c > labelled) svg.append(shape("text", { x: PAD.left + (c + 0.5) * w, y: HEIGHT - PAD.bottom + 16, "text-anchor": "middle" }, placeText(value)));
        labelled = Math.max(labelled, c);
      }
      xLabel(svg, width, options.xName || "");
      readout(figure, svg, width, columns.map((column, c) => ({
        x: PAD.left + (c + 0.5) * w, at: `${options.xName || ""} ${placeText(column.x)}`,
        lines: Object.entries(column.shares).filter((e) => e[1] > 0.005).map(([row, share]) => ({ name: `${options.rowName || ""} ${row}:`, text: `${Math.round(100 * share)}%` })),
      })));
    });
  }

  return { isKnown, node, shape, number, frame, empty, responsive, lines, bars, heat, keyStyle, scales: { ticks, extent, across, spreadEnds, held } };
})();
