/* What a run's pages show, as functions from the run's data to elements. Drawing is charts.js's business.
 *
 * data: {run, description, summary, records, lag_totals, ess_by_lag, heldout, samples: {early, late}, recipe}; see
 * pipelinerl/local/report_data.py. Any number may be missing: it is shown as a dash, or its chart says so. */
"use strict";

const PrlViews = (() => {
  const { node, number, lines, bars, heat } = PrlCharts;
  const percent = (v) => (v === null || v === undefined ? "–" : `${Number((100 * v).toFixed(1))}%`);
  const milliseconds = (v) => (v === null || v === undefined ? "–" : `${number(1000 * v)} ms`);
  const COLOR = ["var(--series-1)", "var(--series-2)", "var(--series-3)", "var(--series-4)"];

  function duration(seconds) {
    if (seconds === null || seconds === undefined) return "–";
    const s = Math.round(seconds);
    if (s < 60) return `${s} s`;
    return s < 3600 ? `${Math.floor(s / 60)} min ${s % 60} s` : `${Math.floor(s / 3600)} h ${Math.floor((s % 3600) / 60)} min`;
  }

  function header(root, data) {
    const s = data.summary;
    const state = s.interrupted ? ["bad", "interrupted"] : s.error ? ["bad", "failed"] : s.wall_s === undefined ? ["good", "in progress"] : ["good", "finished"];
    const line = node("p", {}, `${data.description || s.recipe || ""} `);
    line.append(node("span", { class: `badge ${state[0]}` }, state[1]));
    root.append(node("h1", {}, data.run), line);
    if (s.error) root.append(node("p", { class: "problem" }, s.error));
  }

  function tiles(root, data) {
    const s = data.summary, lag = s.lag || {}, ess = s.ess || {}, updates = s.weight_updates || {}, rate = s.tokens_per_s || {};
    const entries = [
      ["Held-out accuracy", percent(s.heldout_accuracy_last), `from ${percent(s.heldout_accuracy_first)}`],
      ["Optimizer steps", number(s.steps), `policy version ${number(s.policy_version)}, ${s.mode || ""} mode`],
      ["Wall clock", duration(s.wall_s), `trainer busy ${percent(s.trainer_busy_fraction)}, actors ${percent(s.actor_busy_fraction)}`],
      ["Tokens trained", number(s.tokens_trained), `${number(s.tokens_generated)} generated`],
      ["Trainer", `${number(rate.computed)} tokens/s`, `while it computes${s.mfu_mean === null || s.mfu_mean === undefined ? "" : `, MFU ${percent(s.mfu_mean)}`}; memory ${number(s.memory_peak_gib)} GiB at most`],
      ["Token lag", number(lag.mean), `p95 ${number(lag.p95)}, max ${number(lag.max)} steps`],
      ["ESS", number(ess.mean), `lowest ${number(ess.min)}`],
      ["In flight", percent(s.sequences_multi_version_fraction), "of sequences span two or more versions"],
      ["Actor stall", milliseconds(updates.stall_s_p50), `p99 ${milliseconds(updates.stall_s_p99)}, ${number(updates.count)} updates`],
      ["Parity", number(s.logprob_mismatch_max), s.parity_failures ? `${number(s.parity_failures)} PROBES FAILED` : "largest probe difference, nats"],
    ];
    const box = node("div", { class: "tiles" });
    for (const [label, value, note] of entries) {
      const tile = node("div", { class: "tile" });
      tile.append(node("div", { class: "label" }, label), node("div", { class: "value" }, value), node("div", { class: "note" }, note));
      box.append(tile);
    }
    root.append(box);
  }

  /* The x axis: optimizer steps or minutes since the start. */
  function axisOf(byTime) {
    return byTime
      ? { name: "minute", of: (r) => (r.time_s === null || r.time_s === undefined ? null : r.time_s / 60) }
      : { name: "step", of: (r) => r.step };
  }

  function pick(records, axis, value) {
    return records.map((r) => [axis.of(r), value(r)]).filter((p) => p[0] !== null && p[0] !== undefined).map((p) => [p[0], p[1] ?? null]);
  }

  /* Moving mean over about one thirtieth of the run, for curves that are noisy by nature. */
  function smooth(points) {
    const known = points.filter((p) => p[1] !== null);
    const half = Math.floor(known.length / 60);
    if (half < 1) return known;
    return known.map((p, i) => {
      const near = known.slice(Math.max(0, i - half), i + half + 1);
      return [p[0], near.reduce((sum, q) => sum + q[1], 0) / near.length];
    });
  }

  function noisy(name, color, points) {
    const even = smooth(points);
    const each = { name: `${name}, each step`, color, points, faint: true };
    return even.length === points.length && even.every((p, i) => p[1] === points[i][1]) ? [{ ...each, name, faint: false }] : [each, { name: `${name}, mean`, color, points: even }];
  }

  function learning(data, axis) {
    const r = data.records;
    const accuracy = pick(data.heldout, axis, (one) => one.accuracy);
    return [
      (root) => lines(root, { title: "Held-out accuracy", sub: "Problems never trained on", series: [{ name: "accuracy", color: COLOR[0], points: accuracy, dots: accuracy.length < 40 }], xName: axis.name, format: percent, yLow: 0, yHigh: 1, emptyText: "No evaluation yet" }),
      (root) => lines(root, { title: "Train reward", sub: "Mean over the batch", series: noisy("reward", COLOR[0], pick(r, axis, (one) => one.reward_mean)), xName: axis.name }),
      (root) => lines(root, { title: "Entropy", sub: "Of the policy's next token, nats; near zero means it has stopped exploring", series: noisy("entropy", COLOR[0], pick(r, axis, (one) => one.entropy)), xName: axis.name, yLow: 0 }),
      (root) => lines(root, { title: "Gradient norm", sub: "Before clipping", series: noisy("norm", COLOR[0], pick(r, axis, (one) => one.grad_norm)), xName: axis.name, yLow: 0 }),
    ];
  }

  function freshness(data, axis) {
    const r = data.records;
    const total = Object.values(data.lag_totals).reduce((a, b) => a + b, 0) || 1;
    const lagBars = Object.entries(data.lag_totals).map(([lag, n]) => ({ label: lag, value: n / total, note: `${percent(n / total)} (${number(n)} tokens)` }));
    const essBars = Object.entries(data.ess_by_lag).map(([label, value]) => ({ label, value }));
    return [
      (root) => bars(root, { title: "Token lag, whole run", sub: "Optimizer steps between sampling a token and training on it", bars: lagBars, xName: "lag", format: percent }),
      (root) => heat(root, { title: "Token lag over time", sub: "Share of each step's tokens; darker (by night: brighter) is more", ...lagColumns(r, axis), xName: axis.name, rowName: "lag" }),
      (root) => lines(root, { title: "Lag by step", sub: "Steady is good; growing means the actors fall behind", xName: axis.name, yLow: 0, series: [
        { name: "mean", color: COLOR[0], points: pick(r, axis, (one) => one.lag && one.lag.mean) },
        { name: "p95", color: COLOR[1], points: pick(r, axis, (one) => one.lag && one.lag.p95) },
        { name: "max", color: COLOR[2], points: pick(r, axis, (one) => one.lag && one.lag.max) }] }),
      (root) => lines(root, { title: "Effective sample size", sub: "1 = on-policy; unclamped importance weights", series: noisy("ESS", COLOR[0], pick(r, axis, (one) => one.ess)), xName: axis.name, yHigh: 1 }),
      (root) => bars(root, { title: "Effective sample size by lag", sub: "Mean over the run: how much an older token is still worth", bars: essBars, xName: "lag", yLow: 0, yHigh: 1 }),
      (root) => lines(root, { title: "Mismatch KL", sub: "Actor against trainer on tokens of lag 0, nats", series: noisy("KL", COLOR[0], pick(r, axis, (one) => one.mismatch_kl)), xName: axis.name }),
    ];
  }

  function lagColumns(records, axis) {
    const usable = records.filter((r) => r.lag_histogram && axis.of(r) !== null && axis.of(r) !== undefined);
    const size = Math.max(1, Math.ceil(usable.length / 60));
    const columns = [], rows = new Set();
    for (let i = 0; i < usable.length; i += size) {
      const sums = {};
      let all = 0;
      for (const record of usable.slice(i, i + size))
        for (const [lag, n] of Object.entries(record.lag_histogram)) { sums[lag] = (sums[lag] || 0) + n; all += n; rows.add(Number(lag)); }
      for (const lag of Object.keys(sums)) sums[lag] /= all || 1;
      columns.push({ x: axis.of(usable[i]), shares: sums });
    }
    const most = rows.size ? Math.max(...rows) : -1;
    return { columns, rows: Array.from({ length: most + 1 }, (_, lag) => lag) };
  }

  function pipeline(data, axis) {
    const r = data.records;
    return [
      (root) => lines(root, { title: "Throughput", sub: "Tokens per second", xName: axis.name, yLow: 0, series: [
        { name: "generated", color: COLOR[0], points: smooth(pick(r, axis, (one) => one.tokens_generated_per_s)) },
        { name: "trained", color: COLOR[1], points: smooth(pick(r, axis, (one) => one.tokens_trained_per_s)) }] }),
      (root) => lines(root, { title: "Actor stall per weight update", sub: "Time in which an actor generates nothing", series: noisy("stall", COLOR[0], pick(r, axis, (one) => (one.weight_update && one.weight_update.stall_s !== undefined ? one.weight_update.stall_s : one.stall_s))), xName: axis.name, format: milliseconds, yLow: 0 }),
      (root) => lines(root, { title: "Who waits for whom", sub: "Share of time at work; low = waiting for the other side", xName: axis.name, format: percent, yLow: 0, yHigh: 1, series: [
        { name: "actors", color: COLOR[0], points: smooth(pick(r, axis, (one) => one.actor_busy_fraction)) },
        { name: "trainer", color: COLOR[1], points: smooth(pick(r, axis, (one) => one.trainer_busy_fraction)) }] }),
      (root) => lines(root, { title: "Completion length", sub: "Mean tokens of the batch's completions", series: noisy("tokens", COLOR[0], pick(r, axis, (one) => one.completion_tokens_mean)), xName: axis.name, yLow: 0 }),
    ];
  }

  function charts(root, drawings) {
    const box = node("div", { class: "charts" });
    root.append(box);
    for (const draw of drawings) { const cell = node("div"); box.append(cell); draw(cell); }
  }

  function section(root, title, lead) {
    const box = node("section");
    box.append(node("h2", {}, title));
    if (lead) box.append(node("p", { class: "lead" }, lead));
    root.append(box);
    return box;
  }

  function outcomes(root, data) {
    const counts = data.summary.sequences || {};
    const names = [["issued", "issued"], ["trained", "trained"], ["dropped_stale", "dropped: stale"], ["dropped_filtered", "dropped: filtered"], ["failed", "failed"], ["in_flight", "in flight at the end"]];
    const table = node("table"), body = node("tbody");
    for (const [key, label] of names) {
      const row = node("tr");
      row.append(node("td", {}, label), node("td", { class: "num" }, counts[key] === undefined ? "–" : String(counts[key])), node("td", { class: "num" }, counts.issued ? percent((counts[key] || 0) / counts.issued) : "–"));
      body.append(row);
    }
    table.append(body);
    const box = node("div", { class: "table" });
    box.append(table);
    root.append(box);
  }

  /* Which policy versions sampled a completion: one piece for each, as long as its share of the tokens. */
  function versionStrip(spans) {
    const box = node("div");
    if (!spans || !spans.length) return box;
    const versions = [...new Set(spans.map((span) => span[0]))];
    const first = versions[0], last = versions[versions.length - 1];
    box.append(node("div", { class: "versions" }, first === last ? `version ${first}` : `versions ${first} to ${last}`));
    const strip = node("div", { class: "strip", role: "img", "aria-label": spans.map((span) => `tokens ${span[1]} to ${span[2]}: version ${span[0]}`).join(", ") });
    spans.forEach((span) => {
      const shade = versions.length < 2 ? 100 : 35 + (65 * versions.indexOf(span[0])) / (versions.length - 1);
      strip.append(node("span", { style: `flex:${Math.max(1, span[2] - span[1])};background:color-mix(in oklab, var(--series-1) ${shade}%, var(--line))`, title: `version ${span[0]}: tokens ${span[1]} to ${span[2]}` }));
    });
    box.append(strip);
    return box;
  }

  function samples(root, title, rows) {
    root.append(node("h3", {}, title));
    if (!rows.length) return root.append(node("p", { class: "lead" }, "None recorded."));
    const table = node("table", { class: "samples" }), head = node("tr"), body = node("tbody");
    const names = ["Step", "Prompt", "Completion", "Reward", "Sampled by"];
    names.forEach((name, i) => head.append(node("th", i === 3 ? { class: "num" } : {}, name)));
    const top = node("thead");
    top.append(head);
    for (const one of rows) {
      const cells = [node("td", {}, `${one.step ?? "–"}${one.heldout ? " held-out" : ""}`), node("td"), node("td"), node("td", { class: "num" }, number(one.reward)), node("td")];
      cells[1].append(node("div", { class: "text scroll", tabindex: 0 }, one.prompt));
      cells[2].append(node("div", { class: "text scroll", tabindex: 0 }, one.completion));
      cells[4].append(versionStrip(one.spans));
      const row = node("tr");
      cells.forEach((cell, i) => { cell.dataset.label = names[i]; row.append(cell); });
      body.append(row);
    }
    table.append(top, body);
    const box = node("div", { class: "table" });
    box.append(table);
    root.append(box);
  }

  function fold(root, title, text) {
    const box = node("details");
    box.append(node("summary", {}, title), node("pre", { class: "scroll", tabindex: 0 }, text));
    root.append(box);
  }

  function axisChoice(root, changed) {
    const field = node("fieldset", { class: "controls" });
    field.append(node("legend", {}, "Horizontal axis"));
    [["step", "optimizer step"], ["time", "minutes"]].forEach(([value, text], i) => {
      const label = node("label"), input = node("input", { type: "radio", name: "axis", value });
      input.checked = i === 0;
      input.onchange = () => changed(value === "time");
      label.append(input, ` ${text}`);
      field.append(label);
    });
    root.append(field);
  }

  function report(root, data) {
    const top = node("header");
    header(top, data);
    root.append(top);
    tiles(root, data);
    const plots = node("div");
    const draw = (byTime) => {
      const axis = axisOf(byTime);
      plots.replaceChildren();
      charts(section(plots, "Is it learning?"), learning(data, axis));
      charts(section(plots, "How fresh is the data?", "In-flight weight updates keep sequences near on-policy: small lag, effective sample size near 1."), freshness(data, axis));
      charts(section(plots, "What does it cost?"), pipeline(data, axis));
    };
    axisChoice(root, draw);
    root.append(plots);
    draw(false);
    outcomes(section(root, "Sequences by outcome"), data);
    const box = section(root, "Sample completions", "The same policy early and late in the run. The strip shows which policy versions sampled the tokens, first to last.");
    samples(box, "Early", data.samples.early);
    samples(box, "Late", data.samples.late);
    const rest = section(root, "Everything else");
    fold(rest, "summary.json", JSON.stringify(data.summary, null, 2));
    fold(rest, "recipe.yaml (resolved)", data.recipe);
  }

  return { report, learning, freshness, pipeline, tiles, samples, outcomes };
})();
