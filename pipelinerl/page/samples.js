/* Sample completions. The text shows each token's policy version and importance weight. Model output is set as text, never as HTML.
 *
 * sample: {step, version, task, prompt, completion, reward, terms: {name: value}, metrics, reference, answer, reason,
 * spans: [[version, start, end]], heldout, tokens: [text] | null, weights: [w | null] | null, num_tokens}; see docs/run-directory.md.
 * pipelinerl/page/data.py clips long completions with their tokens; num_tokens is the number before clipping. An episode has
 * branches: [{prompt, spans, parts, num_parts}]. A part is a turn or an observation: {role, start, end, text, finish_reason, tokens,
 * weights}. Special tokens in its text tell the roles of observed messages and a turn's tool calls. */
"use strict";

const PrlSamples = (() => {
  const { isKnown, node, number } = PrlCharts;
  const COLORS = 6;
  const FAR = 2;

  /* Return the CSS class with a version's colour. Neighbouring versions have different colours. */
  const shade = (version) => `v${((version % COLORS) + COLORS) % COLORS}`;

  function versionAt(spans, index) {
    const span = (spans || []).find(([, start, end]) => index >= start && index < end);
    return span ? span[0] : null;
  }

  const lagText = (sample, version) => {
    const lag = isKnown(sample.version) ? sample.version - version : 0;
    return lag > 0 ? `, lag ${lag}` : "";
  };

  const size = (sample) => sample.num_tokens || sample.tokens.length;

  /* Return whether a token is the last one of the completion. The shown text may end earlier. */
  const isLast = (sample, index) => index === size(sample) - 1;

  function describe(sample, index, version) {
    const piece = sample.tokens[index];
    const w = sample.weights ? sample.weights[index] : undefined;
    const text = piece === "" ? (isLast(sample, index) ? "end of the text" : "part of the next character") : `“${piece}”`;
    const weight = w === undefined ? "" : w === null ? ", weight not finite" : `, weight w = ${number(w)}`;
    return `Token ${index + 1}: ${text}, version ${version ?? "unknown"}${version === null ? "" : lagText(sample, version)}${weight}`;
  }

  const HINT = "Point at a token, or move over the tokens with the arrow keys";
  const LEGEND = "Colours and marks show which policy version sampled each token: where they change, new weights arrived in the middle of the completion. A dotted line marks a token with an importance weight above 2 or below 1/2. Point at a token, or move over the tokens with the arrow keys, to read its version and weight.";

  function token(sample, index, before, version) {
    const piece = sample.tokens[index], w = sample.weights ? sample.weights[index] : null;
    const span = node("span", { class: `token ${version === null ? "" : shade(version)}`, "data-index": index }, piece);
    if (version !== null && version !== before) {
      span.classList.add("change");
      span.dataset.version = `v${version}`;
    }
    if (isKnown(w) && (w > FAR || w < 1 / FAR)) span.classList.add("far");
    if (piece === "" && isLast(sample, index)) span.classList.add("end");
    return span;
  }

  /* Return the completion with coloured tokens. It is one tab stop, and arrow keys move from token to token. */
  function colored(sample, label = "Completion") {
    const text = node("div", { class: "text scroll tokens", tabindex: 0, role: "group", "aria-label": `${label}, ${size(sample)} tokens`, title: HINT });
    const readout = node("div", { class: "readout", "aria-live": "polite" });
    let before = null, length = 0;
    sample.tokens.forEach((piece, index) => {
      const version = versionAt(sample.spans, index);
      text.append(token(sample, index, before, version));
      before = version;
      length += piece.length;
    });
    text.append(sample.completion.slice(length)); // text beyond the tokens, or a note about clipped text
    let current = null;
    const show = (span) => {
      if (current) current.classList.remove("current");
      current = span;
      if (!span) { readout.textContent = ""; return; }
      span.classList.add("current");
      const index = Number(span.dataset.index);
      readout.textContent = describe(sample, index, versionAt(sample.spans, index));
    };
    const under = (event) => { const span = event.target.closest(".token"); if (span) show(span); };
    text.onpointerover = under;
    text.onpointerdown = under;
    text.onpointerleave = (event) => { if (event.pointerType === "mouse" && document.activeElement !== text) show(null); };
    text.onblur = () => show(null);
    text.onkeydown = (event) => {
      const spans = text.querySelectorAll(".token");
      const moves = { ArrowLeft: -1, ArrowRight: 1, ArrowUp: -10, ArrowDown: 10, Home: -Infinity, End: Infinity };
      if (event.key === "Escape") return show(null);
      if (!(event.key in moves) || !spans.length) return;
      event.preventDefault();
      const first = ["End", "ArrowLeft", "ArrowUp"].includes(event.key) ? Infinity : 0;
      const at = current ? Number(current.dataset.index) + moves[event.key] : first;
      show(spans[Math.max(0, Math.min(spans.length - 1, at))]);
      current.scrollIntoView({ block: "nearest" });
    };
    return node("div", {}, text, readout);
  }

  const tokensText = (count) => `${count} ${count === 1 ? "token" : "tokens"}`;

  /* Return the versions that sampled a completion, as a list with numbers of tokens and as a strip with a piece for each span. */
  function versions(sample) {
    const spans = sample.branches ? sample.branches.flatMap((branch) => branch.spans) : sample.spans || [];
    if (!spans.length) return node("div");
    const totals = new Map();
    for (const [version, start, end] of spans) totals.set(version, (totals.get(version) || 0) + end - start);
    const entries = [...totals].map(([version, tokens]) =>
      node("li", {}, node("span", { class: `swatch ${shade(version)}` }), `v${version}: ${tokensText(tokens)}${lagText(sample, version)}`));
    const told = spans.map(([version, start, end]) => `tokens ${start} to ${end}: version ${version}`).join(", ");
    const pieces = spans.map(([version, start, end]) => node("span", { class: shade(version), style: `flex:${Math.max(1, end - start)}` }));
    return node("div", {}, node("ul", { class: "versions" }, ...entries), node("div", { class: "strip", role: "img", "aria-label": told }, ...pieces));
  }

  const plain = (label, kind, ...texts) => node("div", { class: `text scroll ${kind}`, tabindex: 0, role: "group", "aria-label": label }, ...texts);

  function completion(sample) {
    if (sample.branches) return episode(sample);
    return sample.tokens && sample.tokens.length ? colored(sample) : plain("Completion", "", sample.completion);
  }

  /* HEADER: beginning of a message in the chat formats of common model families, with its role. RESULT: beginning of a tool's result,
   * which some formats write into a user's message. */
  const HEADER = "(?:<\\|im_start\\|>|<\\|start_header_id\\|>|<start_of_turn>|<\\|turn>|\\]~b\\])(\\w{1,32})(?:<\\|end_header_id\\|>)?"
    + "|<[|｜](?:im_|message_|hy_)?(system|developer|user|assistant|model|tool|observation)(?::\\w+)?[|｜]>|\\[(INST|SYSTEM_PROMPT)\\]";
  const RESULT = "<\\|?tool_(?:response|result)s?\\b[^>]*>|<｜tool▁outputs▁begin｜>|\\[TOOL_RESULTS\\]|## Return of";
  const MESSAGE = new RegExp(`(?:(?:${HEADER})(?:\\w*<\\|im_middle\\|>)?\\s*)?(?<=^|[>\\]\\n]\\s*)(${RESULT})|${HEADER}`, "giu");
  const ROLES = { model: "assistant", ai: "assistant", ipython: "tool", observation: "tool", inst: "user", system_prompt: "system", developer: "system" };
  const ONLY_MARKS = /^(?:\s|<[^<>\s]*>|\[[^[\]\s]*\])*$/;

  /* Split an observed text into messages: [{role, text}]. An unknown role is "". A header without a message, which begins the next
   * turn, belongs to the message before it. */
  function messages(text) {
    const begins = [...text.matchAll(MESSAGE)].map((found) => {
      const result = found[4], role = result ? "tool" : found.slice(5).find((name) => name).toLowerCase();
      return { role: Object.hasOwn(ROLES, role) ? ROLES[role] : role, at: found.index };
    });
    if (begins.length && begins[begins.length - 1].role === "assistant") begins.pop();
    if (!begins.length || !ONLY_MARKS.test(text.slice(0, begins[0].at))) begins.unshift({ role: "", at: 0 });
    begins[0].at = 0;
    return begins.map(({ role, at }, i) => ({ role, text: text.slice(at, begins[i + 1] ? begins[i + 1].at : text.length) }));
  }

  /* Forms of tool calls in common model families. AS_JSON: one JSON object; NAMED: a name and JSON; TAGGED: tags. */
  const CALL = /<tool_call|<\|tool_call|<\|python_tag\|>|\[TOOL_CALLS\]|<function=|<｜tool▁call|<[^<>]*invoke name=/;
  const AS_JSON = /(<tool_call>|<\|python_tag\|>|\[TOOL_CALLS\]|^)\s*([[{][^]*?[\]}])\s*(?=<\/tool_call>|<\|e\w+_id\|>|<\/s>|$)/g;
  const NAMED = /(?:<｜tool▁sep｜>|<\|tool_call_begin\|>(?:functions\.)?|\[TOOL_CALLS\])([\w.-]+)(?::\d+)?(?:\s*```json|<\|tool_call_argument_begin\|>|\[ARGS\])?\s*(\{[^]*?\})\s*(?=```|<\|tool_call_end\|>|\[TOOL_CALLS\]|<\/s>|$)/g;
  const TAGGED = /<(?:function=|[^<>]*invoke name="|tool_call[^<>]*>)\s*([\w.-]+)"?>?\s*((?:<[^]*?)?)<\/(?:function|[^<>]*invoke|tool_call[^<>]*)>/g;
  const ARGUMENT = /(?:<[^<>]*parameter(?:=|\sname=")|<arg_key[^<>]*>)([^<>"]+)(?:"[^<>]*>|>|<\/arg_key[^<>]*>\s*<arg_value[^<>]*>)([^]*?)<\/(?:[^<>]*parameter|arg_value[^<>]*)>/g;

  function parsed(json) {
    try { return JSON.parse(json); } catch { return null; }
  }

  /* Return the tool calls of a turn that can be read: [[name, arguments]]. */
  function calls(text) {
    const objects = [...text.matchAll(AS_JSON)].flatMap(([, mark, json]) =>
      [parsed(json)].flat().map((call) => [call?.name, call?.parameters ?? (mark && call?.arguments)])); // without a mark: Llama's form
    const named = [...text.matchAll(NAMED)].map(([, name, json]) => [name, parsed(json)]);
    const tagged = [...text.matchAll(TAGGED)].map(([, name, inside]) =>
      [name, Object.fromEntries([...inside.matchAll(ARGUMENT)].map(([, key, value]) => [key.trim(), value.trim()]))]);
    return [...objects, ...named, ...tagged].filter(([name, given]) => typeof name === "string" && given && typeof given === "object");
  }

  const MOST_OF_A_CALL = 120;

  function callsText(text) {
    const read = calls(text).map(([name, given]) => `calls ${name} ${JSON.stringify(given)}`);
    const short = (call) => (call.length > MOST_OF_A_CALL ? `${call.slice(0, MOST_OF_A_CALL)}…` : call);
    return read.length ? read.map(short).join(", ") : CALL.test(text) ? "calls a tool" : "";
  }

  const rolesText = (parts) => [...new Set(parts.map((part) => part.role).filter((role) => role))].join(", ");

  /* Return the box of an observed text. Several messages are marked with their roles. */
  function observed(parts, label) {
    const message = ({ role, text }) => node("div", role ? { class: "message", "data-role": role } : { class: "message" }, text);
    return plain(label, "observed", ...parts.map((part) => (parts.length > 1 ? message(part) : part.text)));
  }

  function episode(sample) {
    const box = node("div", { class: "episode" }), many = sample.branches.length > 1;
    sample.branches.forEach((branch, index) => {
      const name = many ? `Branch ${index + 1} of ${sample.branches.length}` : "Episode", saw = messages(branch.prompt);
      const title = [`${name}: context of its first turn`, rolesText(saw)].filter(Boolean).join(" · ");
      box.append(node("details", {}, node("summary", {}, title), observed(saw, "Prompt")));
      let turns = 0;
      for (const part of branch.parts) box.append(...turnOrObservation(sample, branch, part, part.role === "observation" ? 0 : ++turns));
      const left = branch.num_parts - branch.parts.length;
      if (left > 0) box.append(node("div", { class: "head" }, `… and ${left} more turns and observations`));
    });
    return box;
  }

  /* Return heading and text of a part. `turn` counts from 1; an observation has 0. */
  function turnOrObservation(sample, branch, part, turn) {
    const tokens = part.end - part.start, saw = turn ? [] : messages(part.text), roles = rolesText(saw);
    const name = turn ? `Turn ${turn}` : roles ? roles[0].toUpperCase() + roles.slice(1) : "Observation";
    const more = [turn ? callsText(part.text) : "", part.finish_reason === "length" ? "cut at its length limit" : ""];
    const head = node("div", { class: "head" }, [name, tokensText(tokens), ...more].filter(Boolean).join(" · "));
    if (!turn) return [head, observed(saw, name)];
    if (!part.tokens || !part.tokens.length) return [head, plain(name, "", part.text)];
    const spans = branch.spans.map(([version, start, end]) => [version, start - part.start, end - part.start]);
    return [head, colored({ ...part, spans, version: sample.version, completion: part.text, num_tokens: tokens }, name)];
  }

  /* Return the notes below a reward: its terms, the environment's metrics, the answer, the reference and the reason. */
  function earned(sample) {
    const values = (of) => Object.entries(of || {}).map(([name, value]) => `${name} ${number(value)}`).join(", ");
    const known = [["", values(sample.terms)], ["", values(sample.metrics)], ["answer: ", sample.answer], ["reference: ", sample.reference], ["", sample.reason]];
    return known.filter(([, text]) => text).map(([label, text]) => node("div", { class: "note" }, label + text));
  }

  function sampleRow(sample, names, ofSeveral) {
    const contents = [
      [`${sample.step ?? "–"}${sample.heldout ? " held-out" : ""}${ofSeveral ? ` ${sample.task}` : ""}`],
      [plain("Prompt", "", sample.prompt)],
      [completion(sample)],
      [number(sample.reward), ...earned(sample)],
      [versions(sample)],
    ];
    return node("tr", {}, ...contents.map((content, i) =>
      node("td", i === 3 ? { class: "num", "data-label": names[i] } : { "data-label": names[i] }, ...content)));
  }

  /* Replace the content of `root` by a titled table of samples. */
  function samples(root, title, rows) {
    root.replaceChildren(node("h3", {}, title));
    if (!rows.length) return root.append(node("p", { class: "lead" }, "None recorded yet."));
    const names = ["Step", "Prompt", "Completion", "Reward", "Sampled by"];
    const head = names.map((name, i) => node("th", i === 3 ? { class: "num", scope: "col" } : { scope: "col" }, name));
    const ofSeveral = new Set(rows.map((one) => one.task)).size > 1;
    const body = rows.map((one) => sampleRow(one, names, ofSeveral));
    const table = node("table", { class: "samples" }, node("thead", {}, node("tr", {}, ...head)), node("tbody", {}, ...body));
    root.append(node("div", { class: "table" }, table));
  }

  return { samples, completion, earned, plain, LEGEND, parts: { messages, calls } };
})();
