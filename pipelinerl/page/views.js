/* Charts, tiles and sections of a run's pages. charts.js draws each chart; report.js and live.js put the page together.
 *
 * data: {run, description, records, lag_totals, stale_share_by_length, ess_by_lag, parity, heldout, samples: {early, late}, recipe,
 * meanings}; see pipelinerl/page/data.py. Any number may be missing. It is then shown as a dash, or its chart says so. */
"use strict";

const PrlViews = (() => {
  const { isKnown, node, number, lines, bars, heat } = PrlCharts;
  const percent = (v) => (isKnown(v) ? `${Number((100 * v).toFixed(1))}%` : "–");
  const seconds = (v) => (!isKnown(v) ? "–" : v === 0 || v >= 1 ? `${number(v)} s` : `${number(1000 * v)} ms`);
  /* Return an evaluation's accuracy with unanswered problems counted as wrong; null if all are answered. */
  const lowerBound = (one) => (one && (one.lower_bound ?? one.accuracy) < one.accuracy ? one.lower_bound : null);
  /* Return "; 95 % interval 61% to 79%, pass@8 90%" if there is one set of problems, or else the accuracy of each set. */
  function setsNote(one) {
    const sets = Object.entries((one && one.sets) || {});
    const passed = (of) => Object.entries(of.pass_at).slice(-1).map(([k, one]) => `, pass@${k} ${percent(one.value)}`).join("");
    if (sets.length === 1) return sets.map(([, of]) => `; 95 % interval ${percent(of.accuracy.low)} to ${percent(of.accuracy.high)}${passed(of)}`).join("");
    return sets.map(([name, of]) => `; ${name} ${percent(of.accuracy.value)}${passed(of)}`).join("");
  }
  const heldoutNote = (one) => (lowerBound(one) === null ? "" : `; ${percent(one.lower_bound)} if unanswered problems count as wrong`) + setsNote(one);
  const COLOR = [1, 2, 3, 4, 5, 6].map((n) => `var(--series-${n})`);
  /* Return the colour and dash of line i of a chart with any number of lines; no two of 18 are alike. */
  const look = (i) => ({ color: COLOR[i % COLOR.length], dash: ["", "dashed", "dotted"][Math.floor(i / COLOR.length) % 3] });
  const RECENT = 20, SMOOTHED = 60;

  function duration(seconds) {
    if (!isKnown(seconds)) return "–";
    const s = Math.round(seconds);
    if (s < 60) return `${s} s`;
    return s < 3600 ? `${Math.floor(s / 60)} min ${s % 60} s` : `${Math.floor(s / 3600)} h ${Math.floor((s % 3600) / 60)} min`;
  }

  /* Return the x axis: minutes since the start, or optimizer steps. */
  function axisOf(byTime) {
    return byTime ? { name: "minute", of: (r) => (isKnown(r.time_s) ? r.time_s / 60 : null) } : { name: "step", of: (r) => r.step };
  }

  const pick = (records, axis, value) => records.map((r) => [axis.of(r), value(r) ?? null]).filter(([x]) => isKnown(x));

  /* Return the moving mean over about one thirtieth of the run; fewer than SMOOTHED points are returned as they are. */
  function smooth(points) {
    const known = points.filter((p) => p[1] !== null);
    const half = Math.floor(known.length / SMOOTHED);
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

  /* Return the note about clipped gradients. Records of old runs do not say whether a step was clipped and are ignored. */
  function clippedNote(records) {
    const known = records.filter((r) => typeof r.clipped === "boolean"), clipped = known.filter((r) => r.clipped).length;
    return known.length ? `Before clipping; ${percent(clipped / known.length)} of the steps were clipped` : "Before clipping";
  }

  function learning(data, axis) {
    const r = data.records;
    const accuracy = pick(data.heldout, axis, (one) => one.accuracy);
    const bounds = pick(data.heldout, axis, lowerBound).filter((p) => p[1] !== null);
    const evaluations = [{ name: "accuracy", color: COLOR[0], points: accuracy, dots: accuracy.length < 40 }];
    if (bounds.length) evaluations.push({ name: "if unanswered problems count as wrong", color: COLOR[1], points: bounds, dots: true });
    const names = [...new Set(data.heldout.flatMap((one) => Object.keys(one.sets)))];
    const ofSet = (name, label, value) => ({ name: label, ...look(2 + names.indexOf(name)), dots: true,
      points: pick(data.heldout, axis, (one) => (one.sets[name] ? value(one.sets[name]) : null)).filter(([, y]) => isKnown(y)) });
    if (names.length > 1) evaluations.push(...names.map((name) => ofSet(name, name, (of) => of.accuracy.value)));
    const passed = names.map((name) => ofSet(name, names.length > 1 ? `pass@k, ${name}` : "pass@k", (of) => (Object.values(of.pass_at).slice(-1)[0] || {}).value));
    evaluations.push(...passed.filter((one) => one.points.length).map((one) => (names.length > 1 ? { ...one, dash: "dotted" } : one)));
    const tasks = [...new Set(r.flatMap((one) => Object.keys(one.tasks || {})))].sort();
    const rewards = tasks.map((name, i) => ({ name, ...look(1 + i), points: smooth(pick(r, axis, (one) => ((one.tasks || {})[name] || {}).reward_mean)) }));
    const reported = (rows, of, dots) => {
      const named = rows.flatMap((one) => Object.entries(of(one)).flatMap(([task, own]) => Object.keys(own).map((name) => JSON.stringify([task, name]))));
      const keys = [...new Set(named)].sort().map((key) => JSON.parse(key)), several = new Set(keys.map(([task]) => task)).size > 1;
      return keys.map(([task, name], i) => ({ name: several ? `${task}: ${name}` : name, ...look(i), dots,
        points: smooth(pick(rows, axis, (one) => (of(one)[task] || {})[name])) }));
    };
    /* `beside` hides an empty chart, and a chart of which every series equals one in `drawn`. */
    const within = (points, at) => points.every(([x, y]) => Math.abs(y - at.get(x)) <= 1e-4 * Math.abs(y));
    const beside = (root, drawn, options) => {
      root.hidden = options.series.every((one) => drawn.some((points) => within(one.points, new Map(points))));
      if (root.hidden) root.replaceChildren(); else lines(root, options);
    };
    const earned = [smooth(pick(r, axis, (one) => one.reward_mean)), ...rewards.map((one) => one.points)];
    const ofSets = (one) => Object.fromEntries(Object.entries(one.sets).map(([name, own]) => [name, own.reported || {}]));
    return [
      (root) => lines(root, { title: "Held-out accuracy", sub: "Problems never trained on", series: evaluations, xName: axis.name, format: percent, yLow: 0, yHigh: 1, emptyText: "No evaluation yet" }),
      (root) => lines(root, { title: "Train reward", sub: "Mean over the batch", series: [...noisy("reward", COLOR[0], pick(r, axis, (one) => one.reward_mean)), ...rewards], xName: axis.name }),
      (root) => beside(root, earned, { title: "Reported in training", sub: "Terms of the reward and environments' metrics, mean over the step", series: reported(r, (one) => one.reported || {}), xName: axis.name }),
      (root) => beside(root, evaluations.map((one) => smooth(one.points)), { title: "Reported on held-out problems", sub: "Terms and metrics, mean over the answers of an evaluation", series: reported(data.heldout, ofSets, true), xName: axis.name }),
      (root) => lines(root, { title: "Entropy", sub: "Entropy of the policy's next token, nats; near zero, the policy has stopped exploring", series: noisy("entropy", COLOR[0], pick(r, axis, (one) => one.entropy)), xName: axis.name, yLow: 0 }),
      (root) => lines(root, { title: "Gradient norm", sub: clippedNote(r), series: noisy("norm", COLOR[0], pick(r, axis, (one) => one.grad_norm)), xName: axis.name, yLow: 0 }),
    ];
  }

  function freshness(data, axis) {
    const r = data.records;
    const recent = r.slice(-RECENT);
    const staleBars = Object.entries(data.stale_share_by_length).map(([longest, value]) => ({ label: `≤ ${longest}`, value }));
    const essBars = Object.entries(data.ess_by_lag).map(([label, value]) => ({ label, value }));
    return [
      (root) => bars(root, { title: recent.length ? `Token lag, last ${recent.length} steps` : "Token lag now", sub: "Optimizer steps between sampling a token and training on it", bars: lagBars(lagSums(recent)), xName: "lag", format: percent, yLow: 0, yHigh: 1 }),
      (root) => bars(root, { title: "Token lag, whole run", sub: "Optimizer steps between sampling a token and training on it", bars: lagBars(data.lag_totals), xName: "lag", format: percent, yLow: 0, yHigh: 1 }),
      (root) => heat(root, { title: "Token lag over time", sub: "Share of each step's tokens; darker is more (brighter in dark mode)", ...lagColumns(r, axis), xName: axis.name, rowName: "lag" }),
      (root) => lines(root, { title: "Lag by step", sub: "If it grows, completions take more steps, or weights arrive late", xName: axis.name, yLow: 0, series: [
        { name: "mean", color: COLOR[0], points: pick(r, axis, (one) => one.lag && one.lag.mean) },
        { name: "p95", color: COLOR[1], points: pick(r, axis, (one) => one.lag && one.lag.p95) },
        { name: "max", color: COLOR[2], points: pick(r, axis, (one) => one.lag && one.lag.max) }] }),
      (root) => lines(root, { title: "Effective sample size", sub: "1 = on-policy; unclamped importance weights", series: noisy("ESS", COLOR[0], pick(r, axis, (one) => one.ess)), xName: axis.name, yHigh: 1 }),
      (root) => bars(root, { title: "Effective sample size by lag", sub: "Mean over the run: how much tokens of each lag are still worth", bars: essBars, xName: "lag", yLow: 0, yHigh: 1 }),
      (root) => bars(root, { title: "Dropped as stale, by length", sub: "Share of the sequences of each length; if it grows with length, training sees too few long ones", bars: staleBars, xName: "completion tokens", format: percent }),
      (root) => lines(root, { title: "Mismatch KL", sub: "Between actor and trainer, nats; only for steps that trained on tokens of lag 0", series: noisy("KL", COLOR[0], pick(r, axis, (one) => one.mismatch_kl)), xName: axis.name, yLow: 0 }),
    ];
  }

  /* Return {lag: tokens}, summed over records. */
  function lagSums(records) {
    const sums = {};
    for (const record of records)
      for (const [lag, n] of Object.entries(record.lag_histogram || {})) sums[lag] = (sums[lag] || 0) + n;
    return sums;
  }

  /* Return all lags from 0 to the largest. */
  const lagsTo = (...lags) => Array.from({ length: Math.max(-1, ...lags) + 1 }, (_, lag) => lag);

  function lagBars(sums) {
    const total = sum(...Object.values(sums)) || 1;
    return lagsTo(...Object.keys(sums)).map((lag) => {
      const n = sums[lag] || 0;
      return { label: lag, value: n / total, note: `${percent(n / total)} (${number(n)} tokens)` };
    });
  }

  function lagColumns(records, axis) {
    const usable = records.filter((r) => r.lag_histogram && isKnown(axis.of(r)));
    const size = Math.max(1, Math.ceil(usable.length / 60));
    const columns = [];
    for (let i = 0; i < usable.length; i += size) {
      const sums = lagSums(usable.slice(i, i + size)), all = sum(...Object.values(sums)) || 1;
      columns.push({ x: axis.of(usable[i]), shares: Object.fromEntries(Object.entries(sums).map(([lag, n]) => [lag, n / all])) });
    }
    return { columns, rows: lagsTo(...columns.flatMap(({ shares }) => Object.keys(shares))) };
  }

  const sum = (...values) => values.reduce((total, value) => total + (value || 0), 0);

  function pipeline(data, axis) {
    const r = data.records;
    return [
      (root) => lines(root, { title: "Throughput", sub: "Tokens per second", xName: axis.name, yLow: 0, series: [
        { name: "generated", color: COLOR[0], points: smooth(pick(r, axis, (one) => one.tokens_generated_per_s)) },
        { name: "trained", color: COLOR[1], points: smooth(pick(r, axis, (one) => one.tokens_trained_per_s)) }] }),
      (root) => lines(root, { title: "Actor stall per weight update", sub: "Time in which an actor generates nothing", series: noisy("stall", COLOR[0], pick(r, axis, (one) => (one.weight_update && one.weight_update.stall_s !== undefined ? one.weight_update.stall_s : one.stall_s))), xName: axis.name, format: seconds, yLow: 0 }),
      (root) => lines(root, { title: "Who waits for whom", sub: "Share of time at work; low = waiting for the other side", xName: axis.name, format: percent, yLow: 0, yHigh: 1, series: [
        { name: "actors", color: COLOR[0], points: smooth(pick(r, axis, (one) => one.actor_busy_fraction)) },
        { name: "trainer", color: COLOR[1], points: smooth(pick(r, axis, (one) => one.trainer_busy_fraction)) }] }),
      (root) => lines(root, { title: "Where a step's time goes", sub: "Waiting for sequences, computing, and pausing to send weights", xName: axis.name, format: seconds, yLow: 0, series: [
        { name: "wait", color: COLOR[0], points: smooth(pick(r, axis, (one) => one.step_s && one.step_s.wait)) },
        { name: "compute", color: COLOR[1], points: smooth(pick(r, axis, (one) => one.step_s && one.step_s.compute)) },
        { name: "send", color: COLOR[2], points: smooth(pick(r, axis, (one) => one.step_s && sum(one.step_s.snapshot, one.step_s.send))) }] }),
      (root) => lines(root, { title: "Completion length", sub: "Mean tokens of the batch's completions", series: noisy("tokens", COLOR[0], pick(r, axis, (one) => one.completion_tokens_mean)), xName: axis.name, yLow: 0 }),
      (root) => lines(root, { title: "Cut short", sub: "Share of the batch's completions that reached sampling.max_tokens or model.max_context", series: noisy("share", COLOR[0], pick(r, axis, (one) => one.truncated_fraction)), xName: axis.name, format: percent, yLow: 0 }),
    ];
  }

  /* Add elements for `count` charts. */
  function cells(root, count) {
    const box = root.appendChild(node("div", { class: "charts" }));
    return Array.from({ length: count }, () => box.appendChild(node("div")));
  }

  function section(root, title, lead) {
    const heading = node("h2", { id: title.toLowerCase().replace(/[^a-z]+/g, "-").replace(/-$/, "") }, title);
    return root.appendChild(node("section", {}, heading, lead ? node("p", { class: "lead" }, lead) : null));
  }

  /* Draw all charts of `data`, below a choice of the horizontal axis. The returned function draws them again with the current data.
   * It draws visible charts at once, and the others when they become visible. */
  function plots(root, data) {
    const sets = [
      [learning, "Is it learning?", ""],
      [freshness, "How fresh is the data?", "Token lag counts the optimizer steps between the sampling of a token and its use; the effective sample size says how much such tokens are still worth."],
      [pipeline, "Who waits, and what does it cost?", ""],
    ];
    let axis = axisOf(false);
    axisChoice(root, (byTime) => { axis = axisOf(byTime); draw(true); });
    const places = sets.map(([make, title, lead]) => ({ make, cells: cells(section(root, title, lead), make(data, axis).length) }));
    const stale = new Set(), inSight = new Set();
    const drawOne = (place, i) => { stale.delete(place.cells[i]); place.make(data, axis)[i](place.cells[i]); };
    function draw(all) {
      for (const place of places) {
        const drawings = place.make(data, axis);
        place.cells.forEach((cell, i) => {
          if (all || cell.hidden || inSight.has(cell)) { stale.delete(cell); drawings[i](cell); } else stale.add(cell);
        });
      }
    }
    const watch = new IntersectionObserver((entries) => {
      for (const { target, isIntersecting } of entries) {
        if (!isIntersecting) { inSight.delete(target); continue; }
        inSight.add(target);
        const place = places.find((one) => one.cells.includes(target));
        if (stale.has(target)) drawOne(place, place.cells.indexOf(target));
      }
    });
    for (const place of places) place.cells.forEach((cell) => watch.observe(cell));
    draw(true);
    return () => draw(false);
  }

  /* Replace the content of `root` by tiles. entries: [key, label, value, note, class]. */
  function tiles(root, entries) {
    root.className = "tiles";
    root.replaceChildren(...entries.map(([key, label, value, note, mark]) => {
      const texts = Object.entries({ label, value, note: note || "" }).map(([name, text]) => node("div", { class: name }, text));
      return node("div", { class: `tile ${mark || ""}`, "data-tile": key }, ...texts);
    }));
  }

  /* Replace the content of `root` by the doctor's findings, the likeliest cause first. */
  function findings(root, found) {
    root.className = "findings";
    root.replaceChildren(...(found || []).map((one) => {
      const box = node("div", { class: `finding is-${one.gravity}`, "data-finding": one.id });
      box.append(node("strong", {}, `${one.gravity}: ${one.meaning}`), node("div", {}, one.evidence), node("div", { class: "note" }, `${one.field}: ${one.fix} (${one.docs})`));
      return box;
    }));
  }

  function fold(root, title, text) {
    root.append(node("details", {}, node("summary", {}, title), node("pre", { class: "scroll", tabindex: 0 }, text)));
  }

  /* Add a choice of the horizontal axis; the first one is chosen. */
  function axisChoice(root, changed, axes = [["step", "optimizer step"], ["time", "minutes"]]) {
    const choices = axes.map(([value, text], i) => {
      const input = node("input", { type: "radio", name: "axis", value });
      input.checked = i === 0;
      input.onchange = () => changed(value === "time");
      return node("label", {}, input, ` ${text}`);
    });
    root.append(node("fieldset", { class: "controls" }, node("legend", {}, "Horizontal axis"), ...choices));
  }

  return { percent, seconds, duration, heldoutNote, smooth, SMOOTHED, axisChoice, cells, plots, tiles, findings, section, fold };
})();
