/* The live page. It fetches the data of the run so far, and then the news about once a second. views.js draws the data.
 *
 * data: the object that views.js describes, with total_steps, max_lag, run_dir, changes (of the recipe) and state: {phase, message,
 * ended, findings, version, served_version, incarnation, epoch, members, sequences, reasons, actors_held_back}
 * (services/trainer/reporting: page.py and recorder.py).
 * position: position of the newest step that this page has. */
"use strict";

const PrlLive = (() => {
  const { isKnown, node, number } = PrlCharts;
  const { percent, seconds, duration, heldoutNote, plots, tiles, findings, section, fold } = PrlViews;
  const ASK_EVERY_MS = 1000;
  const ANSWER_WITHIN_MS = 10000;
  const SAMPLES_EVERY_MS = 5000;
  const MOST_RETRY_MS = 10000;
  const MOST_RECORDS = 3000;
  const NEWEST = 20;
  const NEAR_BOUND = 0.9; // share of the lag bound
  const MOST_STALE = 0.01; // share of the sequences, as in pipelinerl/rl/throughput.py
  const OF_A_KIND = 4;
  const EARLY = 8;

  // --- updates of the data

  function addStep(data, news) {
    const { records } = data, { record, heldout, samples, ...totals } = news;
    if (records.length && records[records.length - 1].step >= record.step) return;
    records.push(record);
    if (records.length > MOST_RECORDS) data.records = records.filter((_, i) => i % 2 === 0 || i >= records.length - NEWEST);
    if (heldout) data.heldout.push(heldout);
    Object.assign(data, totals);
    for (const sample of samples) addSample(data.samples, sample);
  }

  /* Keep the first samples, and as many of the newest ones: half of them held-out, half of them trained. */
  function addSample(samples, sample) {
    const { early } = samples;
    if (early.length < EARLY && (!early.length || sample.step <= early[0].step + 1)) { early.push(sample); return; }
    const kinds = [true, false].map((kind) => [...samples.late, sample].filter((one) => Boolean(one.heldout) === kind).slice(-OF_A_KIND));
    samples.late = kinds.flat();
  }

  // --- drawing

  /* Draw the header, and return a function that updates it. */
  function header(root, data, link) {
    const badge = node("span", { class: "badge" }), message = node("p", { class: "message" });
    const bar = node("progress", { max: data.total_steps || 1, "aria-label": "Optimizer steps taken" });
    const line = node("p", {}, `${data.description || ""} `, badge);
    root.append(node("header", {}, node("h1", {}, data.run), line, bar, message, link));
    return () => {
      const { state } = data;
      badge.textContent = state.ended || state.phase.replaceAll("_", " ");
      badge.className = `badge ${state.ended === "stopped" ? "bad" : "good"}`;
      bar.value = versionOf(data);
      message.textContent = state.message || "";
    };
  }

  /* Return the trainer's newest known version. The state and a step's record arrive one after the other, so either may be newer. */
  const versionOf = ({ state, records }) => Math.max(state.version ?? 0, records.length ? records[records.length - 1].step : 0);

  /* Return [note, mark] of the lag's tile. A lag at its bound is normal. The tile is marked if the bound is too small, or if many
   * sequences were dropped. */
  function lagNote(last, bound, counts) {
    const lag = last.lag || {}, formula = last.largest_lag;
    const seen = `p95 ${number(lag.p95)}, max ${number(lag.max)}, predicted max ${number(formula)}`;
    if (!isKnown(bound)) return [`${seen}; no bound`, ""];
    if (last.max_lag_too_small) return [`${seen}; bound ${bound} is too small for that: generation is throttled, or long sequences are dropped`, "warn"];
    if (!(bound > 0 && lag.mean >= NEAR_BOUND * bound)) return [`${seen}; bound ${bound}`, ""];
    const dropped = counts.issued ? (counts.dropped_stale || 0) / counts.issued : 0;
    return dropped > MOST_STALE ? [`${seen}; at its bound ${bound}: ${percent(dropped)} of the sequences were dropped as too old`, "warn"] : [`${seen}; at its bound ${bound}`, ""];
  }

  function tileEntries(data) {
    const { state, records } = data, last = records[records.length - 1] || {}, lag = last.lag || {};
    const counts = state.sequences || {}, members = state.members || [], serving = members.filter((one) => one.state === "serving");
    const update = [...records].reverse().find((one) => one.weight_update) || {}, heldout = data.heldout;
    const newest = heldout[heldout.length - 1], best = heldout.length ? Math.max(...heldout.map((one) => one.accuracy)) : null;
    const recent = records.slice(-20).map((one) => one.reward_mean).filter(isKnown);
    const mean = recent.length ? recent.reduce((a, b) => a + b, 0) / recent.length : null;
    return [
      ["version", "Policy version", String(versionOf(data)), `of ${number(data.total_steps)} steps; ${serving.length ? `served by all actors: ${state.served_version ?? "none yet"}` : "no actor serves"}`],
      ["reward", "Train reward", number(last.reward_mean), `step ${last.step ?? "–"}; mean of the last ${recent.length}: ${number(mean)}`],
      ["heldout", "Held-out accuracy", newest ? percent(newest.accuracy) : "–", newest ? `version ${newest.step}; first ${percent(heldout[0].accuracy)}, best ${percent(best)}${heldoutNote(newest)}` : "no evaluation yet"],
      ["lag", "Token lag", number(lag.mean), ...lagNote(last, data.max_lag, counts)],
      ["ess", "ESS", number(last.ess), "1 = on-policy; below 0.5, check the lag", last.ess !== null && last.ess < 0.5 ? "warn" : ""],
      ["parity", "Parity", number(data.parity.mismatch), data.parity.failures ? `${number(data.parity.failures)} PROBES FAILED: actors serve another policy` : "nats, largest difference of the last probe", data.parity.failures ? "warn" : ""],
      ["throughput", "Tokens per second", number(last.tokens_trained_per_s), `trained; ${number(last.tokens_generated_per_s)} generated`],
      ["busy", "Trainer at work", percent(last.trainer_busy_fraction), `of the time; the actors ${percent(last.actor_busy_fraction)}${state.actors_held_back ? ": they wait, since they generate more than the trainer can use" : ""}`],
      ["stall", "Actor stall", seconds(update.stall_s), update.weight_update ? `update to version ${update.weight_update.version}, sent in ${seconds(update.weight_update.transfer_s)}` : "no update yet"],
      ["actors", "Actors serving", `${serving.length}`, `of ${members.length} registered; epoch ${number(state.epoch)}`, members.length && !serving.length ? "warn" : ""],
      ["time", "Trained for", duration(last.time_s), `trainer number ${number(state.incarnation)} of this run`],
    ];
  }

  const stateText = { serving: "serving", joining: "joining: receives the weights", waiting: "waiting to join", leaving: "leaving: is stopping" };

  function memberRow(member, newest) {
    const behind = Math.max(0, newest - member.version);
    const seen = member.version === null ? "–" : `v${member.version}${behind ? `, ${behind} behind` : ""}`;
    const numbers = [seen, number(member.in_progress)].map((text) => node("td", { class: "num" }, text));
    return node("tr", { "data-member": member.name }, node("th", { scope: "row" }, member.name), node("td", {}, stateText[member.state] || member.state), ...numbers);
  }

  function members(root, state, version) {
    const rows = state.members || [];
    if (!rows.length) return root.replaceChildren(node("p", { class: "note" }, "No actor is registered."));
    const names = [["Actor", ""], ["State", ""], ["Serves", "num"], ["In progress", "num"]];
    const head = node("tr", {}, ...names.map(([name, kind]) => node("th", { scope: "col", class: kind }, name)));
    const body = node("tbody", {}, ...rows.map((one) => memberRow(one, version)));
    const table = node("div", { class: "table" }, node("table", { class: "narrow" }, node("thead", {}, head), body));
    root.replaceChildren(table, node("p", { class: "note" }, `The trainer's policy is version ${version}. An actor one or two versions behind is normal: a version is sent while the next one is computed.`));
  }

  /* Return whether the reader uses a box, by pointer or keyboard. It is then not redrawn. */
  const inUse = (box) => box.matches(":hover, :focus-within");

  function view(root, data, link) {
    root.replaceChildren();
    const drawHeader = header(root, data, link), advice = root.appendChild(node("div")), figures = root.appendChild(node("div"));
    const navigation = root.appendChild(node("nav", { "aria-label": "Parts of this page" }));
    const drawPlots = plots(root, data);
    const actors = section(root, "Actors").appendChild(node("div"));
    const ledger = section(root, "The ledger").appendChild(node("div"));
    const read = section(root, "Sample completions", `${PrlSamples.LEGEND} Updated every few seconds, except while you point here.`);
    const late = read.appendChild(node("div")), early = read.appendChild(node("div"));
    const recipe = section(root, "Recipe");
    for (const change of data.changes || []) recipe.append(node("p", {}, `Changed at ${change}`));
    fold(recipe, "recipe.yaml (resolved)", data.recipe);
    root.append(node("a", { class: "top", href: "#live" }, "Back to the top"));
    for (const heading of root.querySelectorAll("h2")) navigation.append(node("a", { href: `#${heading.id}` }, heading.textContent));
    let samplesAt = -Infinity, ledgerText = "";
    const draw = () => {
      drawHeader();
      if (!inUse(advice)) findings(advice, data.state.findings);
      tiles(figures, tileEntries(data));
      members(actors, data.state, versionOf(data));
      const text = JSON.stringify([data.state.sequences, data.state.reasons]);
      if (text !== ledgerText) PrlFlow.flow(ledger, data.state.sequences, data.state.reasons, data.meanings);
      ledgerText = text;
      const now = performance.now();
      if (now - samplesAt >= SAMPLES_EVERY_MS && !inUse(read)) {
        samplesAt = now;
        PrlSamples.samples(late, "Newest", [...data.samples.late].reverse());
        PrlSamples.samples(early, "First", data.samples.early);
      }
      document.title = `${versionOf(data)} of ${data.total_steps} · ${data.run}`;
    };
    draw();
    return () => { draw(); drawPlots(); };
  }

  // --- the connection

  const where = (data) => `Its report is ${data.run_dir}/report.html.`;

  function lostText(data) {
    if (!data) return "No answer yet; trying again.";
    if (data.state.ended === "finished") return `The run has ended, and its page with it. ${where(data)}`;
    return `Connection lost: the trainer is restarting, or the run has ended. Trying again. If it has ended: ${where(data).replace("Its", "its")}`;
  }

  async function asked(path) {
    const answer = await fetch(path, { cache: "no-store", signal: AbortSignal.timeout(ANSWER_WITHIN_MS) });
    if (!answer.ok) throw new Error(String(answer.status));
    return answer.json();
  }

  function start(root) {
    const link = node("p", { class: "link", role: "status" });
    let data = null, position = null, redraw = null, timer = 0, asking = false, failures = 0;

    function say(kind, text) {
      link.className = `link ${kind}`;
      if (link.textContent !== text) link.textContent = text;
      root.dataset.link = kind;
      root.toggleAttribute("data-old", kind === "lost" && !(data && data.state.ended)); // the shown data may be outdated
    }

    /* Schedule the next request, unless the tab is hidden. After each failure, the interval doubles, up to MOST_RETRY_MS. */
    function askSoon() {
      clearTimeout(timer);
      const over = data && data.state.ended === "finished";
      if (!document.hidden && !over) timer = setTimeout(ask, Math.min(MOST_RETRY_MS, ASK_EVERY_MS * 2 ** failures));
    }

    async function ask() {
      clearTimeout(timer);
      if (asking || document.hidden) return;
      asking = true;
      try {
        if (position === null) await load();
        else await follow();
        failures = 0;
      } catch {
        failures += 1;
        say("lost", lostText(data));
      }
      asking = false;
      askSoon();
    }

    async function load() {
      const found = await asked("page/history");
      position = found.position;
      if (!found.run) return say("live", "The trainer is starting");
      data = found;
      redraw = view(root, data, link);
      told();
    }

    /* Fetch the news after `position`. The answer `reset` means that the trainer no longer keeps all steps since then. */
    async function follow() {
      const news = await asked(`page/news?after=${encodeURIComponent(position)}`);
      if (news.reset) return load();
      position = news.position;
      if (!data || news.state.phase === "starting") return say("live", "The trainer is starting");
      for (const step of news.steps) addStep(data, step);
      data.state = news.state;
      told();
      redraw();
    }

    const told = () => say("live", data.state.ended === "finished" ? `The run is finished. ${where(data)}` : "Live");

    root.replaceChildren(link);
    document.addEventListener("visibilitychange", ask);
    say("wait", "Loading the run");
    ask();
  }

  return { start };
})();

PrlLive.start(document.getElementById("live"));
