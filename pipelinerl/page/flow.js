/* The ledger, which counts sequences by outcome: a flow diagram whose bands are as wide as their shares, and a table. */
"use strict";

const PrlFlow = (() => {
  const { node, shape, frame, empty, responsive } = PrlCharts;
  const HEIGHT = 230;
  const BAR = 12;
  const OUTCOMES = [
    ["trained", "trained", "var(--series-3)"],
    ["in_flight", "in flight", "var(--series-1)"],
    ["dropped_stale", "dropped: stale", "var(--series-2)"],
    ["dropped_filtered", "dropped: filtered", "var(--series-4)"],
    ["failed", "failed", "var(--bad)"],
  ];
  const whole = (count) => count.toLocaleString("en-US");
  const share = (count, all) => (all ? `${Number(((100 * count) / all).toFixed(1))}%` : "–");

  /* Return the issued sequences minus all outcomes. In a correct ledger this is 0. */
  function discrepancy(counts) {
    return (counts.issued || 0) - OUTCOMES.reduce((sum, [key]) => sum + (counts[key] || 0), 0);
  }

  /* Return the heights of bands that share `height` pixels, with gaps between them. No band is lower than `least` pixels. */
  function heights(values, height, gap, least = 3) {
    const room = height - gap * (values.length - 1), total = values.reduce((a, b) => a + b, 0) || 1;
    const small = values.map((value) => (value / total) * room < least);
    const taken = least * small.filter(Boolean).length;
    const rest = values.reduce((sum, value, i) => sum + (small[i] ? 0 : value), 0) || 1;
    return values.map((value, i) => (small[i] ? least : (value / rest) * (room - taken)));
  }

  /* Return positions of labels between `low` and `high`. They are near to the ascending `wanted`, and at least `apart` from each other. */
  function spread(wanted, apart, low, high) {
    const places = [];
    wanted.forEach((y, i) => places.push(Math.max(y, i ? places[i - 1] + apart : low)));
    for (let i = places.length - 1; i >= 0; i--) places[i] = Math.min(places[i], i === places.length - 1 ? high : places[i + 1] - apart);
    return places;
  }

  function draw(svg, width, bands, issued) {
    const top = 24, bottom = HEIGHT - 8, gap = 12, left = 4, right = width - Math.min(180, width * 0.5);
    const tall = heights(bands.map((band) => band.count), bottom - top, gap);
    const sum = tall.reduce((a, b) => a + b, 0);
    svg.append(shape("text", { class: "strong", x: left, y: 14 }, `issued ${whole(issued)}`));
    const begin = top + (bottom - top - sum) / 2;
    svg.append(shape("rect", { x: left, y: begin, width: BAR, height: sum, rx: 2, fill: "var(--ink-3)" }));
    const middles = tall.map((h, i) => top + tall.slice(0, i).reduce((a, b) => a + b + gap, 0) + h / 2);
    const labels = spread(middles, 32, top + 6, bottom - 10);
    let from = begin, to = top;
    bands.forEach((band, i) => {
      const h = tall[i], x1 = left + BAR, middle = (x1 + right) / 2;
      const d = `M${x1},${from}C${middle},${from} ${middle},${to} ${right},${to}v${h}C${middle},${to + h} ${middle},${from + h} ${x1},${from + h}z`;
      svg.append(shape("path", { d, fill: band.color, "fill-opacity": 0.35 }));
      svg.append(shape("rect", { x: right, y: to, width: BAR, height: h, rx: 2, fill: band.color }));
      svg.append(shape("text", { class: "strong", x: right + BAR + 6, y: labels[i] - 2 }, band.label));
      svg.append(shape("text", { x: right + BAR + 6, y: labels[i] + 12 }, `${whole(band.count)} · ${share(band.count, issued)}`));
      from += h;
      to += h + gap;
    });
  }

  /* Draw the diagram. counts: {issued, trained, dropped_stale, dropped_filtered, failed, in_flight}. Outcomes with 0 get no band. */
  function diagram(root, counts, title = "What became of the sequences") {
    const figure = frame(root, { title, sub: "Every issued sequence is counted in exactly one of these" });
    if (!counts || !counts.issued) return empty(figure, "Nothing issued yet");
    const bands = OUTCOMES.map(([key, label, color]) => ({ key, label, color, count: counts[key] || 0 })).filter((band) => band.count);
    const label = `${whole(counts.issued)} sequences issued: ${bands.map((band) => `${whole(band.count)} ${band.label}`).join(", ")}`;
    responsive(figure, label, (svg, width) => draw(svg, width, bands, counts.issued), HEIGHT);
  }

  function row(label, count, issued, key) {
    const texts = count === undefined ? ["–", "–"] : [whole(count), share(count, issued)];
    const cells = texts.map((text) => node("td", { class: "num" }, text));
    return node("tr", key ? { "data-ledger": key } : {}, node("th", { scope: "row" }, label), ...cells);
  }

  /* Fill in the table of counts. reasons: {outcome: {reason: count}}; meanings: {reason: sentence}. */
  function table(root, counts, reasons, meanings) {
    const body = node("tbody"), given = counts || {}, off = discrepancy(given);
    body.append(row("issued", given.issued, given.issued, "issued"));
    for (const [key, label] of OUTCOMES) {
      body.append(row(label, given[key], given.issued, key));
      for (const [reason, count] of Object.entries((reasons || {})[key] || {})) {
        const of = row(reason, count, given.issued);
        of.className = "part";
        if (meanings && meanings[reason]) of.firstChild.append(node("div", { class: "note" }, meanings[reason]));
        body.append(of);
      }
    }
    const caption = node("caption", { class: "hidden" }, "The ledger: sequences by outcome");
    root.replaceChildren(node("div", { class: "table" }, node("table", { class: "narrow" }, caption, body)));
    if (given.issued !== undefined)
      root.append(node("p", off ? { class: "problem" } : { class: "note" }, off ? `The ledger does not add up: ${whole(off)} sequences are unaccounted for.` : "The ledger adds up: issued = trained + in flight + dropped + failed."));
  }

  /* Show diagram and table side by side. The same `root` may be filled again. */
  function flow(root, counts, reasons, meanings) {
    if (!root.firstChild) root.append(node("div"), node("div"));
    root.classList.add("pair");
    diagram(root.children[0], counts);
    table(root.children[1], counts, reasons, meanings);
  }

  return { flow, scales: { heights, spread, discrepancy } };
})();
