/* The report of a run, drawn with views.js.
 *
 * data: the object that views.js describes, with `summary`, the run's summary.json; `starts`, the version from which each trainer
 * of the run began; `changes` of the recipe; and the doctor's `findings`. */
"use strict";

const PrlReport = (() => {
  const { isKnown, node, number } = PrlCharts;
  const { percent, seconds, duration, heldoutNote, tiles, findings, plots, section, fold } = PrlViews;

  function header(root, data) {
    const s = data.summary;
    const state = s.interrupted ? ["bad", "interrupted"] : s.error ? ["bad", "failed"] : s.wall_s === undefined ? ["good", "in progress"] : ["good", "finished"];
    const line = node("p", {}, `${data.description || s.recipe || ""} `, node("span", { class: `badge ${state[0]}` }, state[1]));
    root.append(node("header", {}, node("h1", {}, data.run), line, s.error ? node("p", { class: "problem" }, s.error) : null));
  }

  const restarts = (starts) => (starts.length > 1 ? `trainer started again at version ${starts.slice(1).join(", ")}; ` : "");

  const known = (value, text) => (isKnown(value) ? text(value) : "");

  function summaryTiles(root, data) {
    const s = data.summary, lag = s.lag || {}, ess = s.ess || {}, updates = s.weight_updates || {}, rate = s.tokens_per_s || {};
    const graded = s.heldout_accuracy_last === 0 && s.heldout_reward_last ? `; mean reward ${number(s.heldout_reward_last)}, from ${number(s.heldout_reward_first)}` : "";
    const entries = [
      ["Train reward", number(s.reward_last), `from ${number(s.reward_first)}; means of the last and the first 5 steps`],
      ["Held-out accuracy", percent(s.heldout_accuracy_last), `from ${percent(s.heldout_accuracy_first)}${graded}${heldoutNote(data.heldout[data.heldout.length - 1])}`],
      ["Optimizer steps", number(s.steps), `policy version ${number(s.policy_version)}, ${s.mode || ""} mode; gradient clipped in ${number(s.steps_clipped)}`],
      [s.begun ? `Wall clock since step ${number(s.begun)}` : "Wall clock", duration(s.wall_s), `${restarts(data.starts || [])}trainer busy ${percent(s.trainer_busy_fraction)}, actors ${percent(s.actor_busy_fraction)}`],
      ["Tokens trained", number(s.tokens_trained), `${number(s.tokens_generated)} generated`],
      ["Trainer", known(rate.computed, (v) => `${number(v)} tokens/s`) || "–", `while it computes${known(s.mfu_mean, (v) => `, MFU ${percent(v)}`)}${known(s.memory_peak_gib, (v) => `; memory ${number(v)} GiB at most`)}`],
      ["Token lag", number(lag.mean), `p95 ${number(lag.p95)}, max ${number(lag.max)} steps; predicted max ${number(s.largest_lag)}`],
      ["ESS", number(ess.mean), `lowest ${number(ess.min)}`],
      ["Several versions", percent(s.sequences_multi_version_fraction), "of sequences have tokens of two or more versions, due to updates in flight"],
      ["Cut short", percent(s.sequences_truncated_fraction), "of sequences at sampling.max_tokens or model.max_context"],
      ["Actor stall", seconds(updates.stall_s_p50), `p99 ${seconds(updates.stall_s_p99)}, ${number(updates.count)} updates`],
      ["Parity", number(s.logprob_mismatch_max), s.parity_failures ? `${number(s.parity_failures)} PROBES FAILED` : "largest probe difference, nats"],
    ];
    tiles(root.appendChild(node("div")), entries.map(([label, value, note]) => [label, label, value, note]));
  }

  function report(root, data) {
    header(root, data);
    findings(root.appendChild(node("div")), data.findings);
    summaryTiles(root, data);
    plots(root, data);
    const ledger = section(root, "Sequences by outcome").appendChild(node("div"));
    PrlFlow.flow(ledger, data.summary.sequences, data.summary.sequence_reasons, data.meanings);
    const box = section(root, "Sample completions", `The same policy early and late in the run. ${PrlSamples.LEGEND}`);
    PrlSamples.samples(box.appendChild(node("div")), "Early", data.samples.early);
    PrlSamples.samples(box.appendChild(node("div")), "Late", data.samples.late);
    const rest = section(root, "Everything else");
    fold(rest, "summary.json", JSON.stringify(data.summary, null, 2));
    for (const change of data.changes || []) rest.append(node("p", {}, `Recipe changed at ${change}`));
    fold(rest, "recipe.yaml (resolved)", data.recipe);
  }

  return { report };
})();
