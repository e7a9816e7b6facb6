// What a model writes goes to the page as text nodes: nothing here reads markup.

import { watch } from "./live.js";
import { Answer, Talk } from "./talk.js";

const at = (id) => document.getElementById(id);
const say = (id, text) => { at(id).textContent = text; };
const every = (selector, act) => document.querySelectorAll(selector).forEach(act);
const numbers = new Intl.NumberFormat("en", { maximumFractionDigits: 1 });
const talk = new Talk(at("talk"));
let running = null;

function headers() {
  const key = at("key").value.trim();
  const found = { "Content-Type": "application/json" };
  return key ? { ...found, Authorization: `Bearer ${key}` } : found;
}

function settings() {
  const found = { stream: true, stream_options: { include_usage: true } };
  for (const id of ["max_tokens", "temperature", "top_p", "top_k", "seed"]) {
    if (at(id).value !== "") found[id] = Number(at(id).value);
  }
  return at("model").value ? { ...found, model: at("model").value } : found;
}

function conversation() {
  const system = at("system").value;
  const messages = system ? [{ role: "system", content: system }, ...talk.messages] : talk.messages;
  const tools = at("tools").value.trim();
  return tools ? { ...settings(), messages, tools: JSON.parse(tools) } : { ...settings(), messages };
}

function showError(message) {
  at("error").hidden = !message;
  say("error", message || "");
}

function showUsage({ prompt_tokens: prompt, completion_tokens: answer, prompt_tokens_details: details }, seconds) {
  const rate = numbers.format(answer / Math.max(seconds, 0.001));
  say("usage", `${prompt} tokens of prompt, ${details.cached_tokens} of them cached; ${answer} of answer, ${rate} per second`);
}

async function read(answer, began, take) {
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
      if (complete) continue;
      const event = JSON.parse(data);
      if (event.error) showError(event.error.message);
      else event.choices.forEach(take);
      if (event.usage) showUsage(event.usage, (performance.now() - began) / 1000);
    }
  }
}

// Sends a body and gives each choice of the stream to `take`; returns when the answer has ended, was stopped or has failed.
async function send(path, body, take) {
  running = new AbortController();
  every(".send", (each) => { each.disabled = true; });
  every(".stop", (each) => { each.disabled = false; });
  say("usage", "");
  showError("");
  try {
    const began = performance.now();
    const answer = await fetch(path, {
      method: "POST", headers: headers(), body: JSON.stringify(body()), signal: running.signal,
    });
    if (answer.ok) await read(answer, began, take);
    else showError((await answer.json()).error.message);
  } catch (error) {
    if (error instanceof SyntaxError) showError(`the tools are no JSON: ${error.message}`);
    else if (error.name !== "AbortError") showError("the server does not answer");
  }
  running = null;
  every(".send", (each) => { each.disabled = false; });
  every(".stop", (each) => { each.disabled = true; });
}

async function go() {
  if (running) return;
  const answer = new Answer(at("talk"));
  await send("v1/chat/completions", conversation, (choice) => answer.take(choice.delta));
  talk.keep(answer, go);
  if (answer.empty && !at("error").hidden && !at("message").value) at("message").value = talk.takeBack();
}

function ask() {
  if (running) return;
  talk.withdraw();
  talk.ask(at("message").value);
  at("message").value = "";
  go();
}

async function proceed() {
  if (running) return;
  at("answer").replaceChildren();
  const body = () => ({ ...settings(), prompt: at("prompt").value });
  await send("v1/completions", body, (choice) => at("answer").append(document.createTextNode(choice.text)));
}

const tabs = [["tab-chat", "chat"], ["tab-prompt", "raw"]];

function select(chosen) {
  for (const [tab, panel] of tabs) {
    at(tab).setAttribute("aria-selected", String(tab === chosen));
    at(tab).tabIndex = tab === chosen ? 0 : -1;
    at(panel).hidden = tab !== chosen;
  }
}

function known(models) {
  at("model").replaceChildren(...models.map(({ id }) => new Option(id)));
  at("model").parentElement.hidden = models.length < 2;
  if (!models[0].has_chat_template) {
    at("tab-chat").disabled = true;
    at("tab-chat").title = "the model has no chat template";
    select("tab-prompt");
  }
}

for (const [tab] of tabs) {
  at(tab).addEventListener("click", () => select(tab));
  at(tab).addEventListener("keydown", (event) => {
    const other = tabs.find(([each]) => each !== tab)[0];
    if (!["ArrowLeft", "ArrowRight"].includes(event.key) || at(other).disabled) return;
    select(other);
    at(other).focus();
  });
}
at("chat-form").addEventListener("submit", (event) => { event.preventDefault(); ask(); });
at("form").addEventListener("submit", (event) => { event.preventDefault(); proceed(); });
at("fields").addEventListener("submit", (event) => event.preventDefault());
at("new").addEventListener("click", () => { running?.abort(); talk.clear(); at("message").focus(); });
at("message").addEventListener("keydown", (event) => {
  // an input method takes Enter, too
  if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
  event.preventDefault();
  at("chat-form").requestSubmit();
});
every(".stop", (each) => each.addEventListener("click", () => running?.abort()));
document.addEventListener("keydown", (event) => {
  if (event.key === "Escape") running?.abort();
  if (event.key === "Enter" && (event.ctrlKey || event.metaKey) && !at("raw").hidden) at("form").requestSubmit();
});
watch(headers, known);
