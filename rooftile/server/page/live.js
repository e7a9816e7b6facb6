// The live pictures, from the same series that Prometheus reads.

const SVG = "http://www.w3.org/2000/svg";
const PERIOD_MS = 1000;
const SHOWN = 120;
const COLUMNS = 40;
const ROWS = 8;

const at = (id) => document.getElementById(id);
const say = (id, text) => { at(id).textContent = text; };
const numbers = new Intl.NumberFormat("en", { maximumFractionDigits: 1 });

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
let model = null;
// the key that the server has refused: asked again with it, it would only write another line into its log
let refused = null;

function showState(found) {
  const now = performance.now();
  const tokens = found.generation_tokens_total;
  say("running", numbers.format(found.num_requests_running));
  say("waiting", numbers.format(found.num_requests_waiting));
  const asked = found.prefix_cache_queries_total;
  say("hits", asked ? `${numbers.format((100 * found.prefix_cache_hits_total) / asked)} %` : "–");
  const drafted = found.spec_decode_num_draft_tokens_total;
  at("accepted").parentElement.hidden = !drafted;
  if (drafted) say("accepted", `${numbers.format((100 * found.spec_decode_num_accepted_tokens_total) / drafted)} %`);
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

// Shows how the server stands, once a second; `known` gets the models when they are known.
export async function watch(headers, known) {
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
        if (!model) {
          const { data } = await (await fetch("v1/models", { headers: headers() })).json();
          [model] = data;
          known(data);
        }
        say("status", `${model.id}, at most ${numbers.format(model.max_model_len)} tokens per sequence`);
      }
    }
  } catch {
    say("status", "the server does not answer");
  }
  setTimeout(() => watch(headers, known), PERIOD_MS);
}
