/* The comparison of runs, drawn with charts.js, samples.js and views.js.
 *
 * data: {runs: [name], differences, results: [[label, [text of each run]]], notes: [text], curves: {figure: [[[step, seconds, value],
 * ...] of each run]}, problems: [[[position of the run, sample], ...]]}; see pipelinerl/commands/compare.py. A run has a letter, by
 * which lines and columns name it. Model output is set as text, never as HTML. */
"use strict";

const PrlComparison = (() => {
  const { node, number, lines, keyStyle } = PrlCharts;
  const { percent, smooth, SMOOTHED, axisChoice, cells, section } = PrlViews;
  const COLORS = 4;
  const DASHES = ["", "dashed", "dotted"];
  const CHARTS = {
    heldout_accuracy: { title: "Held-out accuracy", sub: "Problems never trained on", format: percent, yLow: 0, yHigh: 1, dots: true },
    reward_mean: { title: "Train reward", sub: "Mean over the batch" },
    completion_tokens_mean: { title: "Completion length", sub: "Mean tokens of the batch's completions", yLow: 0 },
    "lag.mean": { title: "Token lag", sub: "Mean optimizer steps between sampling a token and training on it", yLow: 0 },
    ess: { title: "Effective sample size", sub: "1 = on-policy; unclamped importance weights", yHigh: 1 },
    entropy: { title: "Entropy", sub: "Entropy of the policy's next token, nats", yLow: 0 },
    grad_norm: { title: "Gradient norm", sub: "Before clipping", yLow: 0 },
  };

  const letter = (i) => String.fromCharCode(65 + i);
  /* The colour and dash of run i; no two of twelve runs have both in common. */
  const look = (i) => ({ color: `var(--run-${(i % COLORS) + 1})`, dash: DASHES[i % DASHES.length] });
  const key = (i) => node("span", { class: "key", style: keyStyle(look(i)) });

  /* Return a dotted name in parts between which a line may break. */
  const breakable = (name) => name.split(/(?<=[._])/).flatMap((part, i) => (i ? [node("wbr"), part] : [part]));

  function table(root, label, rows, runs) {
    const head = runs.map((name, i) => node("th", { scope: "col", title: name }, key(i), letter(i)));
    const body = rows.map(([name, texts]) => node("tr", {}, node("th", { scope: "row" }, ...breakable(name)), ...texts.map((text) => node("td", {}, text))));
    const made = node("table", { class: "narrow runs" }, node("caption", { class: "hidden" }, label), node("thead", {}, node("tr", {}, node("td"), ...head)), node("tbody", {}, ...body));
    root.append(node("div", { class: "table scroll", tabindex: 0, role: "group", "aria-label": label }, made));
  }

  function caption(curves) {
    const isSmoothed = Object.keys(curves).some((figure) => !CHARTS[figure].dots && curves[figure].some((points) => points.length >= SMOOTHED));
    return `${isSmoothed ? `Lines with ${SMOOTHED} points or more show moving means, except those of the accuracy. ` : ""}Letters at the ends of the lines name the runs.`;
  }

  function plots(root, data) {
    const box = section(root, "Curves", caption(data.curves)), drawn = Object.keys(data.curves);
    let time = true;
    axisChoice(box, (value) => { time = value; draw(); }, [["time", "seconds"], ["step", "optimizer steps"]]);
    const places = cells(box, drawn.length);
    function draw() {
      const xRange = [0, Object.values(data.curves).flat(2).reduce((most, point) => Math.max(most, point[time ? 1 : 0]), 0)];
      drawn.forEach((figure, at) => {
        const { dots, ...chart } = CHARTS[figure];
        const series = data.curves[figure].map((points, i) => {
          const own = points.map(([step, seconds, value]) => [time ? seconds : step, value]);
          return { name: data.runs.length > COLORS ? letter(i) : `${letter(i)} ${data.runs[i]}`, label: letter(i), ...look(i), dots: dots && own.length < 40, points: dots ? own : smooth(own) };
        });
        lines(places[at], { ...chart, series, xName: time ? "seconds" : "step", xRange, hold: true, emptyText: "No run recorded it" });
      });
    }
    draw();
  }

  function sample(data, [run, one]) {
    const where = `${letter(run)} · version ${one.version}${one.heldout ? " · held-out" : ""} · reward ${number(one.reward)}`;
    return node("div", { class: "chart sample" }, node("div", { class: "head" }, key(run), where), PrlSamples.completion(one), ...PrlSamples.earned(one));
  }

  function draw(root, data) {
    const names = data.runs.map((name, i) => node("li", {}, key(i), node("strong", {}, letter(i)), ` ${name}`));
    root.append(node("header", {}, node("h1", {}, `Comparison of ${data.runs.length} runs`), node("ul", { class: "names" }, ...names)));
    root.append(...data.notes.map((text) => node("p", { class: "finding" }, text)));
    const differ = section(root, "What differs", data.differences.length ? "Fields of the recipes and recorded facts that are not equal." : "Nothing: the recipes are equal.");
    if (data.differences.length) table(differ, "Fields that differ", data.differences, data.runs);
    table(section(root, "Results", "The accuracy is that of the last evaluation, with its 95 % interval."), "Results", data.results, data.runs);
    plots(root, data);
    const box = section(root, "The same problems", data.problems.length ? `The newest sample of each run. ${PrlSamples.LEGEND}` : "The runs recorded no sample of the same problem.");
    for (const samples of data.problems) {
      box.append(PrlSamples.plain("Prompt", "prompt", samples[0][1].prompt), node("div", { class: "charts beside" }, ...samples.map((one) => sample(data, one))));
    }
  }

  return { draw, look, caption, charts: Object.keys(CHARTS) };
})();
