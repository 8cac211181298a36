// The page of `make inspect HTML=1`: statistics of the prepared rows, and rows with their mask, searched and filtered here.
const ROWS_AT_ONCE = 100;
let rowsView = { split: 0, words: "", source: "", order: "as prepared", most: ROWS_AT_ONCE };
const ORDERS = { "as prepared": () => 0, "longest first": (a, b) => b.tokens - a.tokens, "least trained first": (a, b) => a.trained - b.trained, "most trained first": (a, b) => b.trained - a.trained };

function choice(name, options, value, change) {
  return el("label", {}, name + " ", el("select", { "aria-label": name, onchange: (event) => { change(event.target.value); redraw(); } },
    options.map(([key, text]) => el("option", { value: key, selected: String(key) === String(value) }, text))));
}
// The found words are marked in a piece's text; a match may begin in one piece and end in the next.
function pieces(sample, words) {
  const text = sample.pieces.map((one) => one.text).join("").toLowerCase(), spans = [];
  for (let at = words ? text.indexOf(words) : -1; at >= 0; at = text.indexOf(words, at + words.length)) spans.push([at, at + words.length]);
  let start = 0, before = 1;
  return sample.pieces.map((one) => {
    const weight = one.trained && one.weight !== before ? el("small", {}, `[${+one.weight.toPrecision(3)}] `) : null;
    before = one.trained ? one.weight : 1;
    const end = start + one.text.length, parts = []; let at = start;
    for (const [from, to] of spans) {
      if (to <= start || from >= end) continue;
      parts.push(one.text.slice(at - start, Math.max(from, start) - start), el("mark", {}, one.text.slice(Math.max(from, start) - start, Math.min(to, end) - start)));
      at = Math.min(to, end);
    }
    parts.push(one.text.slice(at - start)); start = end;
    return [weight, el("span", { class: (one.trained ? "trained " : "") + (one.special ? "special" : ""), title: one.trained ? `weight ${one.weight}` : "read only" }, parts.flatMap((part) => typeof part === "string" && one.trained ? part.replaceAll("\n", "↵\n") : part))];
  });
}
function histogram(title, bins, extra) {
  return chart(title, [{ name: "rows", x: bins.counts.map((_, i) => i * bins.width), y: bins.counts, bars: true }], { x: "tokens", wide: extra.wide, unit: `${bins.width === 1 ? "" : `in steps of ${number(bins.width)} `}tokens`, marks: extra.marks, end: bins.width });
}
function dataView(record) {
  const split = record.splits[rowsView.split], of = (part, all) => all ? share(part / all) : "–";
  const words = rowsView.words.toLowerCase();
  const found = split.samples.filter((one) => (!rowsView.source || one.source === rowsView.source) && (!words || one.pieces.map((part) => part.text).join("").toLowerCase().includes(words))).sort(ORDERS[rowsView.order]);
  const reset = (key) => (value) => { rowsView = { ...rowsView, most: ROWS_AT_ONCE, source: key === "split" ? "" : rowsView.source, [key]: value }; };
  document.title = `${record.name}: rows – SFT-Play`;
  const search = el("input", { type: "search", placeholder: "search the rows", value: rowsView.words, "aria-label": "search", oninput: (event) => { reset("words")(event.target.value); redraw(); const box = page.querySelector("input[type=search]"); box.focus(); box.setSelectionRange(box.value.length, box.value.length); } });
  return [
    el("h1", {}, record.name), el("p", { class: "lead" }, `rows as training sees them · ${record.model}`),
    record.splits.length > 1 ? el("div", { class: "tools" }, record.splits.map((one, i) => el("button", { class: "plain", "aria-pressed": String(i === rowsView.split), onclick: () => { reset("split")(i); redraw(); } }, `${one.name}: ${number(one.rows)} rows`))) : null,
    el("div", { class: "cards" }, card("rows", number(split.rows)), card("tokens", number(split.tokens)), card(`${split.counted} tokens`, number(split.label_tokens), `${of(split.label_tokens, split.tokens)} of all`),
      card("median row", number(split.median) + " tokens"), card("95 % of rows", "≤ " + number(split.at_most_95) + " tokens"), card("longest row", number(split.longest) + " tokens", `limit ${number(record.limit)}`)),
    split.warnings.map((one) => el("p", { class: "warning" }, one)),
    el("div", { class: "charts" }, [histogram("Length of rows", split.lengths, { marks: [{ x: record.limit, name: "model.max_seq_len", colour: css("--warn") }] }), histogram(`${split.counted[0].toUpperCase() + split.counted.slice(1)} tokens of a row`, split.labels, {})]),
    el("h2", {}, "Sources"), tableOf([{ name: "source" }, ...["read", "skipped", "kept", "cut", "rows made", "tokens", split.counted, `share ${split.counted}`].map((name) => ({ name, n: true }))],
      split.sources.map((one) => [one.name, ...[one.rows_read, one.skipped, one.kept, one.cut, one.rows, one.tokens, one.trained_tokens].map((value) => number(value)), of(one.trained_tokens, one.tokens)])),
    el("ul", { class: "note" }, [...split.mixture.map((line) => "mixture: " + line), ...split.skipped].map((line) => el("li", {}, line))),
    el("h2", {}, "Rows"), el("p", { class: "note" }, el("span", { class: "trained" }, split.counted), " · read only · ", el("span", { class: "special" }, "special token"), " · ↵ line end", split.weighted_rows ? " · [0.3] weight of what follows" : ""),
    el("div", { class: "tools" }, search, split.sources.length > 1 ? choice("source", [["", "all"], ...split.sources.map((one) => [one.name, one.name])], rowsView.source, reset("source")) : null,
      choice("order", Object.keys(ORDERS).map((name) => [name, name]), rowsView.order, reset("order"))),
    el("p", { class: "note" }, `${number(found.length)} of ${number(split.samples.length)} rows on this page` + (split.samples.length < split.rows ? `; the split has ${number(split.rows)}: ROWS= puts more here, SEARCH= looks in all of them` : "")),
    found.slice(0, rowsView.most).map((one) => el("div", { class: "sample" }, el("div", {}, el("small", {}, `row ${one.place}: ${number(one.tokens)} tokens, ${number(one.trained)} ${split.counted} (${of(one.trained, one.tokens)})`)), el("div", { class: "row" }, pieces(one, words)))),
    found.length > rowsView.most ? el("button", { class: "plain", onclick: () => { rowsView.most += ROWS_AT_ONCE; redraw(); } }, `show ${Math.min(ROWS_AT_ONCE, found.length - rowsView.most)} more`) : null,
    el("p", { class: "note" }, "Made by SFT-Play."),
  ];
}
