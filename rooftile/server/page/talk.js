// The conversation: what was said, as elements and as messages in OpenAI's form.

import { show } from "./markdown.js";

function element(name, kind, text) {
  const made = document.createElement(name);
  if (kind) made.className = kind;
  if (text !== undefined) made.textContent = text;
  return made;
}

function folded(kind, title) {
  const made = element("details", kind);
  made.append(element("summary", "", title), element("pre"));
  return made;
}

function isJson(text) {
  try {
    JSON.parse(text);
    return true;
  } catch {
    return false;
  }
}

// An answer that grows.
export class Answer {
  constructor(list) {
    this.content = "";
    this.thought = "";
    this.calls = [];
    this.element = element("li", "assistant");
    this.text = element("div", "text");
    this.element.append(this.text);
    list.append(this.element);
    this.due = false;
  }

  take(delta) {
    const thought = delta.reasoning_content ?? delta.reasoning;
    if (thought) this.think(thought);
    if (delta.content) {
      // the thought is over
      if (!this.content && this.thinking) this.thinking.open = false;
      this.content += delta.content;
      this.draw();
    }
    for (const call of delta.tool_calls ?? []) this.call(call);
  }

  think(text) {
    if (!this.thinking) {
      this.thinking = folded("thought", "Thinking");
      this.thinking.open = true;
      this.element.prepend(this.thinking);
    }
    this.thought += text;
    this.thinking.querySelector("pre").append(text);
  }

  call({ index, id, function: called }) {
    let kept = this.calls[index];
    if (!kept) {
      const shown = folded("call", `Calls ${called.name}`);
      this.element.append(shown);
      kept = { id, name: called.name, text: "", shown: shown.querySelector("pre") };
      this.calls[index] = kept;
    }
    kept.text += called?.arguments ?? "";
    kept.shown.textContent = kept.text;
  }

  // at most once in a frame, however many tokens come
  draw() {
    if (this.due) return;
    this.due = true;
    requestAnimationFrame(() => this.finish());
  }

  finish() {
    this.due = false;
    show(this.text, this.content);
  }

  get empty() { return !this.content && !this.thought && !this.calls.length; }

  // calls that were not broken off: a server takes no others back
  get whole() { return this.calls.filter(({ text }) => isJson(text)); }

  message() {
    const found = { role: "assistant", content: this.content };
    if (!this.whole.length) return found;
    const calls = this.whole.map(({ id, name, text }) => ({ id, type: "function", function: { name, arguments: text } }));
    return { ...found, content: this.content || null, tool_calls: calls };
  }
}

export class Talk {
  constructor(list) {
    this.list = list;
    this.messages = [];
  }

  clear() {
    this.messages = [];
    this.list.replaceChildren();
  }

  ask(text) {
    this.messages.push({ role: "user", content: text });
    const made = element("li", "user");
    made.append(element("div", "text", text));
    this.list.append(made);
  }

  // Keeps an answer; where it has called tools, asks for their results and then calls `given`.
  keep(answer, given) {
    // a new conversation may have begun meanwhile
    if (!answer.element.isConnected) return;
    answer.finish();
    if (answer.empty) {
      answer.element.remove();
      return;
    }
    this.messages.push(answer.message());
    if (answer.whole.length) this.list.append(this.results(answer.whole, given));
  }

  // Takes a question back that was not answered; returns its text.
  takeBack() {
    if (this.messages.at(-1)?.role !== "user") return "";
    this.list.lastElementChild.remove();
    return this.messages.pop().content;
  }

  results(calls, given) {
    const made = element("li", "tool");
    const form = element("form");
    const fields = calls.map((call) => {
      const label = element("label", "", `Result of ${call.name}`);
      const field = element("textarea");
      field.required = true;
      field.rows = 2;
      label.append(field);
      form.append(label);
      return field;
    });
    form.append(element("button", "", "Give results"));
    form.addEventListener("submit", (event) => {
      event.preventDefault();
      made.replaceChildren();
      calls.forEach(({ id, name }, n) => {
        this.messages.push({ role: "tool", tool_call_id: id, content: fields[n].value });
        const shown = folded("call", `Result of ${name}`);
        shown.querySelector("pre").textContent = fields[n].value;
        made.append(shown);
      });
      given();
    });
    made.append(form);
    return made;
  }

  // A question takes the place of results that were asked for: a conversation needs a result for each call.
  withdraw() {
    const open = this.list.querySelector("li.tool form");
    if (!open) return;
    for (const { id } of this.messages.at(-1).tool_calls) {
      this.messages.push({ role: "tool", tool_call_id: id, content: "no result" });
    }
    open.closest("li").remove();
  }
}
