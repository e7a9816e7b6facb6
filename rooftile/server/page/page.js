"use strict";
// What a model writes goes to the page as text only: nothing here reads markup.

const SVG = "http://www.w3.org/2000/svg";
const PERIOD_MS = 1000;
const SHOWN = 120;
const COLUMNS = 40;
const ROWS = 8;

const at = (id) => document.getElementById(id);
const say = (id, text) => { at(id).textContent = text; };
const numbers = new Intl.NumberFormat("en", { maximumFractionDigits: 1 });
let running = null;
let model = null;

function headers() {
  const key = at("key").value.trim();
  const found = { "Content-Type": "application/json" };
  return key ? { ...found, Authorization: `Bearer ${key}` } : found;
}

function body() {
  const number = (id) => (at(id).value === "" ? null : Number(at(id).value));
  const fields = {
    stream: true, stream_options: { include_usage: true }, max_tokens: number("max_tokens"), temperature: number("temperature"),
    top_p: number("top_p"), top_k: number("top_k"), seed: number("seed"),
  };
  const prompt = at("prompt").value;
  return at("chat").checked ? { ...fields, messages: [{ role: "user", content: prompt }] } : { ...fields, prompt };
}

function showError(message) {
  at("error").hidden = !message;
  say("error", message || "");
}

function take(event, seconds) {
  if (event.error) { showError(event.error.message); return; }
  for (const choice of event.choices) {
    const text = choice.delta ? choice.delta.content : choice.text;
    if (text) at("answer").append(document.createTextNode(text));
  }
  if (event.usage) {
    const { prompt_tokens: prompt, completion_tokens: answer, prompt_tokens_details: details } = event.usage;
    const rate = numbers.format(answer / Math.max(seconds, 0.001));
    say("usage", `${prompt} tokens of prompt, ${details.cached_tokens} of them cached; ${answer} of answer, ${rate} per second`);
  }
}

async function read(answer, began) {
  const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  let complete = false;
  for (;;) {
    const { value, done } = await reader.read();
    if (done) {
      if (!complete) showError("the connection has ended before the answer");
      return;
    }
    const parts = (rest + value).split("\n\n");
    rest = parts.pop();
    for (const part of parts) {
      const data = part.replace(/^data: /, "");
      complete = data === "[DONE]";
      if (!complete) take(JSON.parse(data), (performance.now() - began) / 1000);
    }
  }
}

async function send() {
  if (running) return;
  running = new AbortController();
  at("send").disabled = true;
  at("stop").disabled = false;
  at("answer").replaceChildren();
  say("usage", "");
  showError("");
  const path = at("chat").checked ? "v1/chat/completions" : "v1/completions";
  try {
    const began = performance.now();
    const answer = await fetch(path, {
      method: "POST", headers: headers(), body: JSON.stringify(body()), signal: running.signal,
    });
    if (answer.ok) await read(answer, began);
    else showError((await answer.json()).error.message);
  } catch (error) {
    if (error.name !== "AbortError") showError("the server does not answer");
  }
  running = null;
  at("send").disabled = false;
  at("stop").disabled = true;
}

// the live pictures, from the same series that Prometheus reads

function series(text) {
  const found = {};
  for (const line of text.split("\n")) {
    const match = /^\w+:(\w+)\{model_name=".*?(?:",state="(\w+))?"\} (\S+)$/.exec(line);
    if (match) found[match[2] ? `${match[1]}.${match[2]}` : match[1]] = Number(match[3]);
  }
  return found;
}

function draw(name, attributes, text) {
  const made = document.createElementNS(SVG, name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  if (text !== undefined) made.textContent = text;
  return made;
}

function drawPool(used, cached, free) {
  const total = Math.max(1, used + cached + free);
  const tiles = Math.min(total, COLUMNS * ROWS);
  const count = (blocks) => (blocks ? Math.max(1, Math.round((blocks / total) * tiles)) : 0);
  const usedTiles = count(used);
  const cachedTiles = count(cached);
  const made = [];
  for (let n = 0; n < tiles; n += 1) {
    const state = n < usedTiles ? "used" : n < usedTiles + cachedTiles ? "cached" : "free";
    made.push(draw("rect", {
      class: `tile ${state}`, x: (n % COLUMNS) * 12 + 1, y: Math.floor(n / COLUMNS) * 12 + 1, width: 10, height: 10, rx: 2,
    }));
  }
  at("pool").replaceChildren(...made);
}

function drawChart(rates) {
  const most = Math.max(1, ...rates);
  const points = rates.map((rate, n) => `${(480 * (SHOWN - rates.length + n)) / (SHOWN - 1)},${112 - (100 * rate) / most}`);
  at("chart").replaceChildren(
    draw("line", { class: "axis", x1: 0, x2: 480, y1: 112, y2: 112 }),
    draw("line", { class: "axis", x1: 0, x2: 480, y1: 12, y2: 12 }),
    draw("polyline", { class: "line", points: points.join(" ") }),
    draw("text", { x: 0, y: 9 }, numbers.format(most)),
  );
}

const rates = [];
let last = null;
// the key that the server has refused: asked again with it, it would only write another line into its log
let refused = null;

function showState(found) {
  const now = performance.now();
  const tokens = found.generation_tokens_total;
  say("running", numbers.format(found.num_requests_running));
  say("waiting", numbers.format(found.num_requests_waiting));
  const asked = found.prefix_cache_queries_total;
  say("hits", asked ? `${numbers.format((100 * found.prefix_cache_hits_total) / asked)} %` : "–");
  for (const state of ["used", "cached", "free"]) say(state, numbers.format(found[`kv_blocks.${state}`] ?? 0));
  drawPool(found["kv_blocks.used"] ?? 0, found["kv_blocks.cached"] ?? 0, found["kv_blocks.free"] ?? 0);
  if (last) {
    rates.push(Math.max(0, (1000 * (tokens - last.tokens)) / (now - last.now)));
    if (rates.length > SHOWN) rates.shift();
    say("rate", numbers.format(rates[rates.length - 1]));
    drawChart(rates);
  }
  last = { tokens, now };
}

async function watch() {
  try {
    const health = await fetch("health");
    if (!health.ok) {
      say("status", (await health.json()).error.message);
    } else {
      const key = at("key").value;
      const answer = key === refused ? null : await fetch("metrics", { headers: headers() });
      if (!answer || answer.status === 401) {
        refused = key;
        say("status", "the server asks for an API key");
      } else {
        refused = null;
        showState(series(await answer.text()));
        if (!model) model = (await (await fetch("v1/models", { headers: headers() })).json()).data[0];
        say("status", `${model.id}, at most ${numbers.format(model.max_model_len)} tokens per sequence`);
      }
    }
  } catch {
    say("status", "the server does not answer");
  }
  setTimeout(watch, PERIOD_MS);
}

at("form").addEventListener("submit", (event) => { event.preventDefault(); send(); });
at("stop").addEventListener("click", () => running?.abort());
document.addEventListener("keydown", (event) => {
  if (event.key === "Escape") running?.abort();
  if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) at("form").requestSubmit();
});
watch();
