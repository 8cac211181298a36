"use strict";
// One page for `make ui` (fetches), `make report` and `make inspect HTML=1` (data embedded). Everything that a run wrote is put in as text, never as HTML.
const COLOURS = ["#2563eb", "#e4572e", "#17a673", "#b5359c", "#c99700", "#0fa3b1", "#7a5af8", "#8c564b", "#6b7280", "#d6336c"];
const page = document.getElementById("page");
const embedded = document.getElementById("data");
const css = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();

function el(tag, attributes, ...children) {
  const node = document.createElement(tag);
  for (const [key, value] of Object.entries(attributes || {})) {
    if (key.startsWith("on")) node.addEventListener(key.slice(2), value);
    else if (key === "style") Object.assign(node.style, value);
    else if (value !== null && value !== undefined && value !== false) node.setAttribute(key, value === true ? "" : value);
  }
  node.append(...children.flat(Infinity).filter((child) => child !== null && child !== undefined && child !== false).map((child) => child instanceof Node ? child : String(child)));
  return node;
}

// ---- Figures as people read them
const known = (value) => value !== null && value !== undefined;
function number(value, digits = 4) {
  if (!known(value) || typeof value !== "number") return "–";
  if (Number.isInteger(value) || Math.abs(value) >= 1000) return Math.round(value).toLocaleString("en");
  return Math.abs(value) < 0.001 && value ? (+value.toPrecision(3)).toExponential() : String(+value.toPrecision(digits));
}
const SHORT = new Intl.NumberFormat("en", { notation: "compact", maximumSignificantDigits: 3 });
function bytes(value) { return known(value) ? (value >= 2 ** 30 ? (value / 2 ** 30).toFixed(2) + " GiB" : (value / 2 ** 20).toFixed(0) + " MiB") : "–"; }
function duration(seconds) {
  if (!known(seconds)) return "–";
  const s = Math.round(seconds), d = Math.floor(s / 86400), h = Math.floor(s / 3600) % 24, m = Math.floor(s / 60) % 60;
  return d ? `${d} d ${h} h` : h ? `${h} h ${m} min` : m ? `${m} min ${s % 60} s` : `${seconds < 10 ? +seconds.toFixed(1) : s} s`;
}
function energy(kwh) {
  if (!known(kwh)) return "–";
  const [size, unit] = kwh >= 0.1 ? [1, "kWh"] : kwh >= 1e-4 ? [1e3, "Wh"] : [3.6e6, "J"];
  return `${number(kwh * size)} ${unit}`;
}
const share = (value) => known(value) ? (100 * value).toFixed(1) + " %" : "–";
const fixed = (value) => typeof value !== "number" ? "–" : Math.abs(value) < 1e6 ? value.toFixed(4) : value.toExponential(2);
const clock = (time) => known(time) ? new Date(1000 * time).toLocaleString() : "–";
const score = (value) => value ? value.mean.toFixed(4) + (value.low < value.high ? ` [${value.low.toFixed(4)}, ${value.high.toFixed(4)}]` : "") : "–";
const signed = (value) => (value < 0 ? "−" : "+") + Math.abs(value).toFixed(4);
const difference = (d) => d ? `${signed(d.mean)} [${signed(d.low)}, ${signed(d.high)}] ${d.verdict}, n = ${d.n}` : "";
const setting = (value) => !known(value) || JSON.stringify(value) === "{}" ? "–" : Array.isArray(value) ? value.map(setting).join(", ") || "none" : typeof value === "object" ? Object.entries(value).map(([key, one]) => `${key}: ${setting(one)}`).join(", ") : String(value);
const card = (name, value, small, wide) => el("div", { class: wide ? "card wide" : "card" }, el("span", {}, name), el("b", {}, value), small ? el("small", {}, small) : null);
const state = (summary) => el("span", { class: "badge " + (summary.risen ?? summary.state.split(" ")[0]), title: summary.problem ?? "" }, summary.state + (summary.code && summary.state === "failed" ? ` (${summary.code})` : "") + (summary.risen ? ` (${summary.risen})` : ""));
// Long names break after a point or a dash below, not within a word.
const breakable = (cell) => typeof cell === "string" ? cell.split(/(?<=[._/])/).flatMap((part, i) => i ? [el("wbr"), part] : part) : cell;
// On a phone each row is a panel of its own; a `matrix` stays one.
function tableOf(headings, rows, matrix) {
  return el("div", { class: "scroll" }, el("table", { class: matrix ? null : "rows" }, el("thead", {}, el("tr", {}, headings.map((h) => el("th", { class: h.n ? "n" : null }, h.name)))),
    el("tbody", {}, rows.map((row) => el("tr", {}, row.map((cell, i) => el("td", { class: headings[i].n ? "n" : "wrap", "data-heading": i || headings[i].n ? headings[i].name : null }, headings[i].n ? cell : breakable(cell))))))));
}

// ---- Charts
const charts = new Set();
// Until somebody chooses: none where a curve has few points.
const SMOOTHED_FROM = 100;
let chosen = null;
const smoothingOf = (points) => chosen ?? (points < SMOOTHED_FROM ? 0 : 0.6);
function smoothed(values) {
  const smoothing = smoothingOf(values.length);
  let last = null, weight = 0;
  return values.map((value) => {
    if (!known(value)) return null;
    last = smoothing * (last || 0) + (1 - smoothing) * value; weight = smoothing * weight + (1 - smoothing);
    return last / weight;
  });
}
const WHOLE = Array.from({ length: 13 }, (_, power) => [1, 2, 5].map((step) => step * 10 ** power)).flat();
// A curve that never changes lies in the middle; one of zeros (a score) at the bottom.
function yRange(low, high, bars) {
  if (low === null || low === undefined) return [null, null];
  if (bars) return [0, 1.05 * high || 1];
  return low === high ? (low ? [low - Math.abs(low) / 10, low + Math.abs(low) / 10] : [0, 1]) : uPlot.rangeNum(low, high, 0.1, true);
}
// series: {name, x, y, smooth, dashed, points, bars}; marks: {x, colour, name}. Curves of different steps are joined on one axis.
function chart(title, series, options = {}) {
  series = series.filter((one) => one.y.some(known));
  if (!series.length) return null;
  const lines = [];
  series.forEach((one, index) => {
    const colour = one.colour || COLOURS[index % COLOURS.length];
    const smooth = one.smooth && smoothingOf(one.y.length) > 0;
    lines.push({ ...one, colour, faint: smooth });
    if (smooth) lines.push({ ...one, y: smoothed(one.y), colour });
  });
  const data = uPlot.join(lines.map((one) => [one.x, one.y.map((v) => known(v) ? v : null)]));
  const box = el("div", { class: "chart" + (options.wide ? " wide" : "") }, el("header", {}, el("b", {}, title), el("span", {}, options.unit || "")));
  const space = el("div", {}); box.append(space);
  const marks = options.marks || [];
  const data_end = Math.max(...data[0]) + (options.end || 0);
  const axis = () => ({ stroke: css("--soft"), grid: { stroke: css("--line"), width: 1 }, ticks: { stroke: css("--line"), width: 1 } });
  const plot = {
    width: 400, height: options.wide ? 300 : 210, cursor: { sync: { key: options.sync || "step" } },
    scales: { x: { time: false, range: options.end ? [0, data_end] : undefined }, y: { range: (u, low, high) => yRange(low, high, Boolean(options.end)) } },
    axes: [{ ...axis(), incrs: WHOLE }, { ...axis(), size: 62, values: (u, ticks) => ticks.map((v) => !known(v) ? "" : Math.abs(v) < 1e5 ? number(v, 3) : SHORT.format(v)) }],
    series: [{ label: options.x || "step", value: (u, v) => options.end > 1 && known(v) ? `${number(v)} to ${number(v + options.end - 1)}` : legend(v) }, ...lines.map((one) => ({
      label: one.name, class: one.faint ? "faint" : undefined, stroke: one.colour, fill: one.bars ? one.colour + "66" : undefined, paths: one.bars ? uPlot.paths.bars({ size: [1, Infinity], align: 1 }) : undefined, width: one.bars || one.faint ? 1 : 2, alpha: one.faint ? +css("--faint") : 1, spanGaps: true, dash: one.dashed ? [5, 4] : undefined,
      points: { show: !one.bars && (one.points || one.y.length < 25), size: one.points ? 8 : 5, fill: one.colour }, value: (u, v) => legend(v, 5) }))],
    hooks: { draw: [(u) => {
      for (const mark of marks) {
        const x = u.valToPos(mark.x, "x", true);
        if (x < u.bbox.left || x > u.bbox.left + u.bbox.width) continue;
        u.ctx.save(); u.ctx.strokeStyle = mark.colour; u.ctx.setLineDash([4, 4]); u.ctx.beginPath(); u.ctx.moveTo(x, u.bbox.top); u.ctx.lineTo(x, u.bbox.top + u.bbox.height); u.ctx.stroke();
        u.ctx.fillStyle = mark.colour; u.ctx.font = `${11 * devicePixelRatio}px system-ui`; const late = x > u.bbox.left + 0.7 * u.bbox.width; u.ctx.textAlign = late ? "right" : "left"; u.ctx.fillText(mark.name, late ? x - 4 : x + 4, u.bbox.top + 12 * devicePixelRatio); u.ctx.restore();
      } }] },
  };
  charts.add({ space, make: () => { return new uPlot({ ...plot, width: space.clientWidth }, data, space); }, drawn: null });
  return box;
}
// Empty until the pointer is over a point.
const legend = (value, digits) => known(value) ? number(value, digits) : "";
function draw() {
  for (const one of charts) if (!one.drawn && one.space.isConnected && !one.space.closest("details:not([open])")) one.drawn = one.make();
}
// The list of runs is a table, or where that is wider than the window, a panel for each run.
function fit() {
  for (const list of page.querySelectorAll(".list")) { list.classList.remove("panels"); list.classList.toggle("panels", list.scrollWidth > list.parentNode.clientWidth); }
}
addEventListener("resize", () => { fit(); for (const one of charts) if (one.drawn) one.drawn.setSize({ width: one.space.clientWidth, height: one.drawn.height }); });
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => redraw());
addEventListener("beforeprint", () => { document.querySelectorAll("details").forEach((d) => { d.open = true; }); draw(); });
let redraw = () => {};
function show(...nodes) {
  const open = new Set([...page.querySelectorAll("details[open]")].map((d) => d.dataset.name)), top = scrollY;
  for (const one of charts) if (one.drawn) one.drawn.destroy();
  charts.clear(); return (make) => {
    page.classList.remove("wide");
    page.replaceChildren(...make().flat(Infinity).filter(Boolean));
    page.querySelectorAll("details").forEach((d) => { if (open.has(d.dataset.name)) d.open = true; });
    fit(); draw(); scrollTo(0, top);
  };
}
// `open`: until somebody closes it.
const closed = new Set();
function fold(name, ...content) {
  const open = Boolean(content[0] && content[0].open === true && !(content[0] instanceof Node)) && !closed.has(name);
  return el("details", { "data-name": name, open, ontoggle: (event) => { event.target.open ? closed.delete(name) : closed.add(name); draw(); } }, el("summary", {}, name), content.filter((one) => one instanceof Node || Array.isArray(one)));
}
function smoother(...records) {
  const points = Math.max(...records.map((record) => record.curves.train.step.length));
  return el("label", {}, "smoothing ", el("input", { type: "range", min: 0, max: 0.98, step: 0.02, value: smoothingOf(points), onchange: (event) => { chosen = +event.target.value; redraw(); } }));
}

// ---- A run
const LABELS = { loss: "loss", rank_tokens: "trained tokens", rank_rows: "rows", grad_norm: "gradient norm", learning_rate: "learning rate", tokens_per_second: "tokens/s", mfu: "MFU", rank_tokens_per_second: "tokens/s while computing", step_seconds: "seconds of a step", rank_throttled: "percent of time throttled" };
const UNITS = { gib: "GiB", seconds: "s", percent: "%", mb_s: "MB/s", watts: "W" };
const UNIT = new RegExp(`_(${Object.keys(UNITS).join("|")})$`);
let metrics = {}; // name of a score -> what people call it
const unitOf = (key) => LABELS[key] ? "" : UNITS[(UNIT.exec(key) || [])[1]] || "";
const label = (key) => LABELS[key] || metrics[key.replace(/^eval_/, "")] || key.replace(/^(rank|node|eval)_/, "").replace(UNIT, "").replace(/^cpu/, "CPU").replaceAll("_", " ");
const NOT_SCORES = /^eval_(loss|perplexity|label_tokens|answers|answers_asked|answer_tokens|stopped|seconds|.*_per_second|.*_seconds)$/;

function marksOf(record) {
  const steps = record.curves.train.step, at = (event) => known(event.step) ? event.step : null;
  const marks = record.events.filter((e) => ["resumed", "restarted", "recovered"].includes(e.event)).map((e) => {
    const named = /step-0*(\d+)/.exec(e.checkpoint || ""); const x = known(at(e)) ? at(e) : named ? +named[1] : null;
    return known(x) ? { x, name: e.event, colour: css("--warn") } : null; }).filter(Boolean);
  return steps.length ? marks.slice(0, 200) : [];
}
// Charts of the whole run, and those of each rank and machine.
function curves(record) {
  const { train, eval: evaluated } = record.curves, marks = marksOf(record), found = [], each = [];
  const line = (key, extra) => ({ name: label(key), x: train.step, y: train[key] || [], ...extra });
  found.push(chart("Loss", [line("loss", { name: "training", smooth: true }), { name: "held out", x: evaluated.step, y: evaluated.eval_loss || [], points: true }], { wide: true, unit: "nats per trained token", marks }));
  const scores = Object.keys(evaluated).filter((key) => key !== "step" && !NOT_SCORES.test(key) && !Array.isArray(evaluated[key][0]));
  if (scores.length) found.push(chart("Scores of answers", scores.map((key) => ({ name: label(key), x: evaluated.step, y: evaluated[key], points: true })), { marks }));
  for (const key of ["grad_norm", "learning_rate", "tokens_per_second"]) found.push(chart(label(key)[0].toUpperCase() + label(key).slice(1), [line(key, { smooth: key !== "learning_rate" })], { marks }));
  const single = Object.keys(train).filter((key) => !["step", "loss", "grad_norm", "learning_rate", "tokens_per_second", "rank_memory_limit_gib", "rank_memory_plan_gib"].includes(key));
  for (const key of single) {
    const ranks = Array.isArray(train[key][0]) ? train[key] : null;
    if (ranks && ranks.length < 2 && key === "rank_loss") continue;
    const of = key.startsWith("node") ? "node" : "rank";
    const beside = key === "rank_memory_gib" ? ["plan", "limit"].flatMap((name) => train[`rank_memory_${name}_gib`] ? [{ name: `${name} of rank 0`, x: train.step, y: train[`rank_memory_${name}_gib`][0], dashed: true }] : []) : [];
    each.push(chart(label(key)[0].toUpperCase() + label(key).slice(1) + (ranks && ranks.length > 1 ? ` of each ${of}` : of === "node" ? " of the machine" : ""), ranks ? [...ranks.map((y, i) => ({ name: `${of} ${i}`, x: train.step, y })), ...beside] : [line(key)], { unit: unitOf(key) }));
  }
  return [found, each].map((part) => part.filter(Boolean));
}
function memory(record) {
  const ranks = (record.plan.ranks || []).slice(0, 16);
  if (!ranks.length) return null;
  const parts = [...new Set(ranks.flatMap((rank) => Object.keys(rank.memory_bytes || {})))].filter((part) => part !== "free" && ranks.some((rank) => rank.memory_bytes[part] > 0));
  const total = (rank) => parts.reduce((sum, part) => sum + (rank.memory_bytes[part] || 0), 0);
  const limit = (rank) => total(rank) + (rank.memory_bytes.free || 0);
  return [el("h3", {}, "Planned memory of each rank"), ranks.map((rank) => el("div", {}, el("div", { class: "note" }, `rank ${rank.rank}, ${rank.device_name || rank.device}: ${bytes(total(rank))} of ${bytes(limit(rank))}`),
    el("div", { class: "stack" }, parts.map((part, i) => el("i", { title: `${part.replaceAll("_", " ")}: ${bytes(rank.memory_bytes[part])}`, style: { width: 100 * rank.memory_bytes[part] / limit(rank) + "%", background: COLOURS[i % COLOURS.length] } }))))),
  el("div", { class: "keys" }, parts.map((part, i) => el("span", {}, el("i", { style: { background: COLOURS[i % COLOURS.length] } }), part.replaceAll("_", " "))))];
}
function planBesideFigures(record) {
  const final = record.final, forecast = final.forecast || {}, plan = record.plan;
  const ratio = (a, b) => known(a) && known(b) && b ? (a / b >= 1 ? "+" : "") + (100 * (a / b - 1)).toFixed(0) + " %" : "";
  const rows = [["tokens/s", number(forecast.tokens_per_second ?? plan.tokens_per_second), number(final.tokens_per_second), ratio(final.tokens_per_second, forecast.tokens_per_second)],
    ["time of steps", duration(forecast.training_seconds ?? plan.total_seconds), duration(final.training_seconds), ratio(final.training_seconds, forecast.training_seconds)],
    ["peak memory", bytes(forecast.peak_memory_bytes), bytes(final.peak_memory_bytes), ratio(final.peak_memory_bytes, forecast.peak_memory_bytes)],
    ["MFU", share(forecast.mfu ?? plan.mfu), share(final.mfu), ""], ["energy", "–", energy(final.energy_kwh), ""]].filter((row) => row[1] !== "–" || row[2] !== "–");
  return tableOf([{ name: "" }, { name: "planned", n: true }, { name: "measured", n: true }, { name: "difference", n: true }], rows);
}
function event(one) {
  const rest = Object.entries(one).filter(([key, value]) => !["event", "time", "node", "launch", "batches"].includes(key) && value !== null).map(([key, value]) => `${key.replaceAll("_", " ")}: ${setting(value)}`);
  return [clock(one.time), one.event + (one.node ? ` (node ${one.node})` : ""), rest.join("; ")];
}
// Tokens by which chat templates part turns.
const SPECIAL = /<\|[^|<>\n]{1,40}\|>|<\/?s>|\[\/?INST\]|<(?:bos|eos|(?:start|end)_of_turn)>/g;
function samples(record, count = 4) {
  return record.samples.slice(0, count).map((one) => el("div", { class: "sample" }, el("div", {}, el("small", {}, `row ${one.row}: prompt`), one.prompt.replace(SPECIAL, "").trim()), one.reference ? el("div", {}, el("small", {}, "reference"), one.reference) : null,
    Object.entries(one.answers).map(([step, text]) => [
      one.thoughts?.[step] ? el("div", {}, el("small", {}, +step ? `thought after step ${step}` : "thought before training"), one.thoughts[step]) : null,
      el("div", {}, el("small", {}, +step ? `answer after step ${step}` : "answer before training"), text || "(nothing)")])));
}
// Rows are the references' labels, columns what was answered.
function labelsTable(evaluation) {
  if (!evaluation) return null;
  const found = Object.entries(evaluation.labels), shares = ["precision", "recall", "f1"], answered = [...new Set([...found.map(([name]) => name), ...found.flatMap(([, one]) => Object.keys(one.answered))])];
  const columns = [...shares, "n"].map((name) => ({ name: name === "f1" ? "F1" : name, n: true }));
  const matrix = tableOf([{ name: "label" }, ...answered.map((name) => ({ name, n: true }))], found.map(([name, one]) => [name, ...answered.map((other) => one.answered[other] ? (other === name ? el("b", {}, one.answered[other]) : one.answered[other]) : "·")]), true);
  return [el("h3", {}, `Labels after step ${evaluation.step}`), tableOf([{ name: "label" }, ...columns], found.map(([name, one]) => [name, ...shares.map((key) => one[key].toFixed(3)), number(one.n)]), true),
    answered.length <= 30 ? [el("h3", {}, "Confusion: rows are the references, columns the answers"), matrix] : null];
}
function otherRows(record) {
  return record.other_rows.map((one) => [el("h3", {}, `Other rows, at step ${number(one.step)}: ${one.data}`), one.warning && el("p", { class: "note" }, one.warning), evaluationsTable([one])]);
}
// What training changed on held-out rows: before and after, or the first, the best and the last.
function outcome({ name, points }, inModel) {
  const values = points.map(([, value]) => fixed(value)).join(" → "), at = points.map(([step]) => step + (step === inModel ? " (model/)" : ""));
  const when = at.length < 2 ? `step ${at[0]}` : points[0][0] === 0 ? `before → after step ${at[1]}` : `step ${at.join(" → ")}`;
  return [name === "loss" ? "held-out loss" : label(name), values, when + (at.length === 3 ? ": first, best, last" : "")];
}
function scoresTable(record) {
  if (!record.evaluations.length) return el("p", { class: "note" }, record.use.eval ? ["No answers have been scored: ", el("code", {}, record.use.eval)] : "No rows are held out for scores.");
  const warnings = new Map(record.evaluations.filter((one) => one.warning).map((one) => [one.warning, one.step]));
  return [[...warnings].map(([text, step]) => el("p", { class: "warning" }, `step ${step}: ${text}`)), evaluationsTable(record.evaluations, record.model_step)];
}
function evaluationsTable(evaluations, inModel) {
  const names = [...new Set(evaluations.flatMap((one) => Object.keys(one.scores)))];
  const columns = [{ name: "step", n: true }, { name: "loss", n: true }, ...names.map((name) => ({ name, n: true })), ...(names.length ? [{ name: "answers", n: true }] : [])];
  const rows = evaluations.map((one) => [one.step === inModel ? `model/ = ${number(one.step)}` : number(one.step), fixed(one.loss), ...names.map((name) => score(one.scores[name])), ...(names.length ? [number(Object.values(one.scores)[0]?.n)] : [])]);
  return [tableOf(columns, rows.slice(-12)), rows.length > 12 ? fold(`All ${rows.length} evaluations`, tableOf(columns, rows)) : null, labelsTable(evaluations.filter((one) => one.labels).slice(-1)[0])];
}
const leftOut = (source) => Object.entries({ ...source.dropped, ...(source.duplicates ? { duplicate: source.duplicates } : {}) }).map(([why, rows]) => `${number(rows)} (${why})`).join(", ") || "–";
function answersThatAreLabels(splits) {
  const names = Object.keys(splits), counts = names.map((name) => splits[name].labels || {}), all = [...new Set(counts.flatMap(Object.keys))];
  return all.length ? fold(`Answers are labels, ${all.length} in all`, { open: all.length <= 20 }, tableOf([{ name: "label" }, ...names.map((name) => ({ name, n: true }))], all.map((label) => [label, ...counts.map((of) => number(of[label] ?? 0))]), true)) : null;
}
function runView(record, home) {
  metrics = record.labels;
  const s = record.summary, final = record.final, plan = record.plan, prepared = record.prepared.splits, train = prepared.train || {};
  const [whole, each] = curves(record);
  const weighted = Object.values(prepared).some((split) => split.sources.some((source) => known(source.weight)));
  const left = s.state === "running" ? record.seconds_left : null;
  const mode = record.config.find((one) => one.key === "tuning.mode");
  const failed = record.events.filter((one) => one.event === "failed").slice(-1)[0];
  document.title = `${s.name} – SFT-Play`;
  return [
    home ? el("nav", {}, el("a", { href: "#" }, "all runs")) : null,
    el("div", { class: "top" }, el("h1", {}, s.name), state(s)),
    el("p", { class: "lead" }, [record.prepared.model, mode && String(mode.value), plan.strategy && `${plan.strategy} on ${plan.world_size} × ${(plan.ranks && plan.ranks[0] && (plan.ranks[0].device_name || plan.ranks[0].device)) || plan.device}`, plan.precision].filter(Boolean).join(" · ")),
    s.steps ? el("div", { class: "bar", title: `${s.step} of ${s.steps} steps` }, el("i", { style: { width: Math.min(100, 100 * s.step / s.steps) + "%" } })) : null,
    failed && s.state === "failed" ? el("p", { class: "error" }, failed.error || "it failed") : null,
    (record.findings || []).map((one) => el("p", { class: "warning" }, `${one.text} – ${one.remedy}`)),
    record.model ? el("p", { class: "note" }, `model/ is ${record.model}`) : null,
    el("div", { class: "cards" }, record.outcomes.slice(0, 4).map((one) => card(...outcome(one, record.model_step), one.points.length > 1)), card("step", s.steps ? `${number(s.step)} / ${number(s.steps)}` : number(s.step), left ? "about " + duration(left) + " left" : null), card("training loss", fixed(s.loss), "of the last step"),
      card("tokens/s", number(s.tokens_per_second)), card("peak memory", bytes(s.peak_memory_bytes), known(final.forecast && final.forecast.peak_memory_bytes) ? "planned " + bytes(final.forecast.peak_memory_bytes) : null),
      card("time", duration(s.seconds), [known(final.training_seconds) && `${duration(final.training_seconds)} of steps`, final.restarts && final.restarts.length && `${final.restarts.length} restarts`].filter(Boolean).join(", ")), card("global batch", number(plan.global_batch_size) + " rows"), card("training data", number(train.rows) + " rows", train.tokens ? `${number(train.tokens)} tokens, ${number(train.label_tokens)} trained` : null)),
    el("h2", {}, "Scores"), scoresTable(record), otherRows(record),
    record.samples.length ? [el("h2", {}, "Answers"), samples(record), record.samples.length > 4 ? fold("More answers", samples({ samples: record.samples.slice(4) }, 99)) : null] : null,
    whole.length || each.length ? [el("h2", {}, "Curves"), el("div", { class: "tools" }, smoother(record)), el("div", { class: "charts" }, whole)] : null,
    each.length ? fold(`${each.length} more: time, memory and load of each rank and machine`, { open: (plan.world_size || 1) > 1 }, el("div", { class: "charts" }, each)) : null,
    el("h2", {}, "Planned and measured"), planBesideFigures(record), memory(record), plan.reasons ? fold("Why: every choice of the plan", el("pre", {}, Object.values(plan.reasons).join("\n"))) : null,
    el("h2", {}, "Data"), tableOf([{ name: "split" }, { name: "source" }, ...["read", "kept"].map((name) => ({ name, n: true })), { name: "left out" }, ...["cut", "tokens", "trained", ...(weighted ? ["weight"] : [])].map((name) => ({ name, n: true }))],
      Object.entries(prepared).flatMap(([name, split]) => (split.sources.length ? split.sources : [{ name: "all", kept: split.rows, tokens: split.tokens, trained_tokens: split.label_tokens }]).map((source) => [name, source.name, number(source.rows_read), number(source.kept), leftOut(source), number(source.cut), number(source.tokens), number(source.trained_tokens), ...(weighted ? [number(source.weight)] : [])]))),
    answersThatAreLabels(prepared),
    el("h2", {}, "Events"), tableOf([{ name: "time" }, { name: "what" }, { name: "" }], record.events.slice(-100).map(event)),
    record.checkpoints.length ? el("p", { class: "note" }, "Checkpoints: " + record.checkpoints.join(", ")) : null,
    el("h2", {}, "Use it"), el("pre", {}, Object.values(record.use).join("\n")),
    el("h2", {}, "Details"),
    fold("Configuration, with the origin of each value", tableOf([{ name: "key" }, { name: "value" }, { name: "from" }], record.config.map((one) => [one.key, setting(one.value), one.origin]))),
    fold("Stamp: versions and hashes", el("pre", {}, JSON.stringify(record.stamp, null, 1))),
    Object.entries(record.logs).map(([name, text]) => fold("Log: " + name, el("pre", {}, text || "(empty)"))),
    el("p", { class: "note" }, "Made by SFT-Play."),
  ];
}

// ---- All runs, and runs over each other
let sort = { key: "age_seconds", down: false }, wanted = "", ticked = new Set();
const COLUMNS = [["name", "run"], ["state", "state"], ["model", "model"], ["method", "method"], ["swept", "swept"], ["data", "data"], ["step", "step"], ["loss", "loss"], ["best", "best"], ["tokens_per_second", "tokens/s"], ["peak_memory_bytes", "memory"], ["seconds", "time"], ["energy_kwh", "energy"], ["age_seconds", "last change"]];
const SHOWN = { step: (r) => r.steps ? `${r.step}/${r.steps}` : r.step, loss: (r) => fixed(r.loss), best: (r) => r.best_of || "–", tokens_per_second: (r) => number(r.tokens_per_second), peak_memory_bytes: (r) => bytes(r.peak_memory_bytes), seconds: (r) => duration(r.seconds), energy_kwh: (r) => energy(r.energy_kwh), age_seconds: (r) => known(r.age_seconds) ? duration(r.age_seconds).split(" ").slice(0, 2).join(" ") + " ago" : "–" };
function listView(runs) {
  document.title = "Runs – SFT-Play"; page.classList.add("wide");
  const same = runs.length > 1 ? ["model", "method", "data"].filter((key) => known(runs[0][key]) && runs.every((run) => run[key] === runs[0][key])) : [];
  const columns = COLUMNS.filter(([key]) => ["name", "state"].includes(key) || (!same.includes(key) && runs.some((run) => known(run[key]))));
  const value = (run) => { const v = run[sort.key]; return known(v) ? v : sort.down ? -Infinity : Infinity; };
  const shown = runs.filter((run) => JSON.stringify(run).toLowerCase().includes(wanted.toLowerCase())).sort((a, b) => (value(a) > value(b) ? 1 : value(a) < value(b) ? -1 : 0) * (sort.down ? -1 : 1));
  const search = el("input", { type: "search", placeholder: "filter: name, state, model, method", value: wanted, "aria-label": "filter", oninput: (event) => { wanted = event.target.value; redraw(); const box = page.querySelector("input[type=search]"); box.focus(); box.setSelectionRange(wanted.length, wanted.length); } });
  return [el("div", { class: "top" }, el("h1", {}, "Runs")), el("div", { class: "tools" }, search,
    el("button", { class: "plain", disabled: ticked.size < 2, onclick: () => { location.hash = "compare=" + [...ticked].map(encodeURIComponent).join(","); } }, ticked.size < 2 ? "tick two or more to compare" : `compare ${ticked.size}`)),
  same.length ? el("p", { class: "note" }, "In all runs: " + same.map((key) => `${key} ${runs[0][key]}`).join(", ")) : null,
  runs.length ? el("div", { class: "scroll" }, el("table", { class: "list" }, el("thead", {}, el("tr", {}, el("th", {}), columns.map(([key, name]) => el("th", { class: SHOWN[key] ? "n" : null }, el("button", { onclick: () => { sort = { key, down: sort.key === key && !sort.down }; redraw(); } }, name + (sort.key === key ? (sort.down ? " ↓" : " ↑") : "")))))),
    el("tbody", {}, shown.map((run) => el("tr", {}, el("td", {}, el("input", { type: "checkbox", "aria-label": "compare " + run.name, checked: ticked.has(run.name), onchange: (event) => { event.target.checked ? ticked.add(run.name) : ticked.delete(run.name); redraw(); } })),
      columns.map(([key, heading]) => el("td", { class: SHOWN[key] ? "n" : key === "name" ? "name" : null, "data-heading": ["name", "state"].includes(key) ? null : heading }, key === "name" ? el("a", { href: "#run=" + encodeURIComponent(run.name) }, run.name) : key === "state" ? state(run) : SHOWN[key] ? SHOWN[key](run) : run[key] ?? "–"))))))) : el("p", { class: "note" }, "There are no runs yet: make quickstart makes one.")];
}
// Of runs that cannot all be compared.
function outcomesTable(records) {
  const found = records.map((record) => record.outcomes.map((one) => outcome(one, record.model_step))), names = [...new Set(found.flatMap((one) => one.map(([name]) => name)))];
  const cell = (one) => one ? `${one[1]}, ${one[2]}` : "–";
  return names.length ? tableOf([{ name: "" }, ...records.map((record) => ({ name: record.summary.name, n: true }))], names.map((name) => [name, ...found.map((one) => cell(one.find(([other]) => other === name)))])) : null;
}
function compareView(found) {
  metrics = found.labels;
  const records = found.records, names = records.map((record) => record.summary.name);
  document.title = names.join(" and ") + " – SFT-Play";
  const over = (title, kind, key, options) => chart(title, records.map((record, i) => ({ name: names[i], x: record.curves[kind].step, y: record.curves[kind][key] || [], smooth: kind === "train" && key !== "learning_rate", points: kind === "eval", colour: COLOURS[i % COLOURS.length] })), options);
  const scores = [...new Set(records.flatMap((record) => Object.keys(record.curves.eval)))].filter((key) => key !== "step" && !NOT_SCORES.test(key));
  const all = new Map(); records.forEach((record, i) => record.config.forEach((one) => { if (!all.has(one.key)) all.set(one.key, records.map(() => "–")); all.get(one.key)[i] = setting(one.value); }));
  const differ = [...all].filter(([key, values]) => key !== "launch.auto_resume" && new Set(values).size > 1);
  const table = found.compared, heads = [{ name: "" }, ...names.map((name) => ({ name, n: true }))], texts = [{ name: "" }, ...names.map((name) => ({ name }))];
  const charts = [over("Training loss", "train", "loss", { wide: true }), over("Loss, held out", "eval", "eval_loss"), ...scores.map((key) => over(label(key), "eval", key)), over("Gradient norm", "train", "grad_norm"), over("Learning rate", "train", "learning_rate"), over("Tokens/s", "train", "tokens_per_second")].filter(Boolean);
  const apart = table.error ? [] : table.rows;
  const figures = table.error ? [] : Object.entries(table.losses).map(([name, values]) => [name, ...values.map(fixed)]);
  return [el("nav", {}, el("a", { href: "#" }, "all runs")), el("h1", {}, names.join(" · ")),
    el("h2", {}, "Scores"), table.error ? [table.error.split("\n\n").map((part) => el("p", { class: "note" }, part)), outcomesTable(records)] : [tableOf(heads, [...figures, ...Object.entries(table.scores).flatMap(([name, values]) => [[label(name), ...values.map((value) => value ? `${score(value)}, n = ${value.n}` : "–")], ...(table.differences[name]?.some(known) ? [["paired difference", ...table.differences[name].map(difference)]] : [])]), ...Object.entries(table.labels).map(([name, values]) => [`${name}: F1`, ...values.map((v) => v ? v.f1.toFixed(3) : "–")])]), table.notes.map((note) => el("p", { class: "note" }, note))],
    apart.length ? [el("h2", {}, "Answers that differ most"), apart.map((one) => el("div", { class: "sample" }, el("div", {}, el("small", {}, `row ${one.place || one.row}: prompt`), one.prompt.replace(SPECIAL, "").trim()), one.reference ? el("div", {}, el("small", {}, "reference"), one.reference) : null,
      one.answers.map((answer) => el("div", {}, el("small", {}, `${answer.run}: ${label(table.metric)} ${number(answer.score)}`), answer.answer || "(nothing)"))))] : null,
    el("h2", {}, "Configuration: keys that differ"), differ.length ? tableOf(texts, differ.map(([key, values]) => [key, ...values])) : el("p", { class: "note" }, "All keys are the same."),
    el("h2", {}, "Curves"), el("div", { class: "tools" }, smoother(...records)), el("div", { class: "charts" }, charts),
    table.error ? null : [el("h2", {}, "Training"), tableOf(texts, Object.entries(table.facts).map(([name, values]) => [name.replace(" (bytes)", ""), ...values.map((v) => name.endsWith("(bytes)") ? bytes(v) : typeof v === "number" ? number(v) : v ?? "–")]))]];
}

// ---- Where the data come from
async function fetched(path) {
  const answer = await fetch(path, { credentials: "same-origin" });
  if (!answer.ok) throw new Error(answer.status === 404 ? "there is no such run" : answer.status === 422 ? (await answer.json()).error : `the server answered ${answer.status}`);
  return answer.json();
}
let turn = 0;
async function route() {
  const mine = ++turn, hash = location.hash.slice(1), [what, names] = hash.split("=");
  try {
    const path = what === "run" ? "api/run/" + names : what === "compare" ? "api/compare?runs=" + names : "api/runs";
    const found = await fetched(path);
    if (mine !== turn) return;
    const view = what === "run" ? () => runView(found, true) : what === "compare" ? () => compareView(found) : () => listView(found);
    redraw = () => show()(view); redraw();
  } catch (error) { if (mine === turn) { redraw = () => show()(() => [el("nav", {}, el("a", { href: "#" }, "all runs")), el("p", { class: "error" }, error.message)]); redraw(); } }
}
if (embedded) {
  const record = JSON.parse(embedded.textContent);
  redraw = () => show()(() => record.splits ? dataView(record) : runView(record, false)); redraw();
} else {
  addEventListener("hashchange", () => { scrollTo(0, 0); route(); });
  route();
  new EventSource("api/changes").onmessage = (event) => {
    const changed = JSON.parse(event.data), [what, names] = location.hash.slice(1).split("=");
    const shown = what ? decodeURIComponent(names || "").split(",") : null;
    if (!document.hidden && (shown === null || shown.some((name) => changed.includes(name)))) route();
  };
}
