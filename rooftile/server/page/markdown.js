// Shows Markdown as elements. A text becomes text nodes and elements that are made here: no markup of the model is read, and
// nothing is fetched.

const DEEPEST = 8;
const FENCE = /^ {0,3}(`{3,}|~{3,})\s*([^`\s]*)[^`]*$/;
const HEADING = /^ {0,3}(#{1,6})\s+(.*?)\s*#*\s*$/;
const RULE = /^ {0,3}([-*_])(\s*\1){2,}\s*$/;
const QUOTE = /^ {0,3}> ?/;
const ITEM = /^(\s*)([-*+]|\d{1,9}[.)])(\s+|$)/;
const BORDER = /^\s*\|?\s*:?-+:?\s*(\|\s*:?-+:?\s*)*\|?\s*$/;
// each alternative is bounded, so that a long line without an end costs no more than its length
const INLINE = new RegExp([
  /\\([\\`*_{}[\]()#+\-.!|>~$])/, /(`{1,3})([^`]{1,2000}?)\2(?!`)/, /!\[([^\]]{0,400})\]\([^)\s]{1,2000}\)/,
  /\[([^\]]{1,400})\]\((https?:\/\/[^)\s]{1,2000})(?:\s+"[^"]{0,200}")?\)/, /\*\*(?=\S)([^]{1,2000}?\S)\*\*/,
  /(?<!\w)__(?=\S)([^]{1,2000}?\S)__(?!\w)/, /\*(?=[^\s*])([^*]{1,2000}?)(?<=\S)\*/, /(?<!\w)_(?=[^\s_])([^_]{1,2000}?)(?<=\S)_(?!\w)/,
  /~~(?=\S)([^]{1,2000}?\S)~~/, /(https?:\/\/[^\s<>()[\]"'`]{1,2000}[^\s<>()[\]"'`.,;:!?*_])/,
].map((each) => each.source).join("|"), "g");

function element(name, text) {
  const made = document.createElement(name);
  if (text !== undefined) made.textContent = text;
  return made;
}

// Shows a text; what has not changed since the last call stays as it is, with what the reader has selected.
export function show(target, text, depth = 0) {
  const before = target.shown ?? [];
  const blocks = blocksOf(text);
  blocks.forEach((block, n) => {
    if (before[n]?.source === block.source && before[n].kind === block.kind) return;
    const made = block.make(depth);
    if (n < target.childNodes.length) target.childNodes[n].replaceWith(made);
    else target.append(made);
  });
  while (target.childNodes.length > blocks.length) target.lastChild.remove();
  target.shown = blocks.map(({ kind, source }) => ({ kind, source }));
}

function blocksOf(text) {
  const lines = text.split("\n");
  const found = [];
  let at = 0;
  while (at < lines.length) {
    if (!lines[at].trim()) { at += 1; continue; }
    const start = at;
    const [kind, stop, make] = blockAt(lines, at);
    at = stop;
    found.push({ kind, source: lines.slice(start, stop).join("\n"), make });
  }
  return found;
}

function blockAt(lines, at) {
  const line = lines[at];
  const fence = FENCE.exec(line);
  if (fence) return code(lines, at, fence);
  const heading = HEADING.exec(line);
  // the page has its own titles above
  if (heading) return ["heading", at + 1, () => inline(element(`h${Math.min(6, heading[1].length + 2)}`), heading[2])];
  if (RULE.test(line)) return ["rule", at + 1, () => element("hr")];
  if (QUOTE.test(line)) return quote(lines, at);
  if (line.includes("|") && at + 1 < lines.length && lines[at + 1].includes("|") && BORDER.test(lines[at + 1])) return table(lines, at);
  if (ITEM.test(line)) return list(lines, at);
  let stop = at + 1;
  while (stop < lines.length && lines[stop].trim() && !begins(lines[stop])) stop += 1;
  return ["paragraph", stop, () => inline(element("p"), lines.slice(at, stop).join("\n").trim())];
}

function begins(line) {
  return FENCE.test(line) || HEADING.test(line) || RULE.test(line) || QUOTE.test(line) || ITEM.test(line);
}

function code(lines, at, [, mark, language]) {
  let stop = at + 1;
  const isEnd = (line) => line.trim().length >= mark.length && !line.trim().replaceAll(mark[0], "");
  while (stop < lines.length && !isEnd(lines[stop])) stop += 1;
  const text = lines.slice(at + 1, stop).join("\n");
  return ["code", Math.min(stop + 1, lines.length), () => {
    const made = element("pre");
    if (language) made.dataset.language = language;
    made.tabIndex = 0;
    made.append(element("code", text));
    return made;
  }];
}

function quote(lines, at) {
  let stop = at;
  while (stop < lines.length && QUOTE.test(lines[stop])) stop += 1;
  const text = lines.slice(at, stop).map((line) => line.replace(QUOTE, "")).join("\n");
  return ["quote", stop, (depth) => within(element("blockquote"), text, depth)];
}

function within(target, text, depth) {
  if (depth >= DEEPEST) target.textContent = text;
  else show(target, text, depth + 1);
  return target;
}

function list(lines, at) {
  const [, indent, mark] = ITEM.exec(lines[at]);
  const ordered = /\d/.test(mark);
  const items = [];
  let stop = at;
  while (stop < lines.length) {
    const line = lines[stop];
    const item = ITEM.exec(line);
    if (item && item[1].length <= indent.length + 1 && !RULE.test(line)) {
      if (/\d/.test(item[2]) !== ordered) break;
      items.push([line.slice(item[0].length)]);
    } else if (!line.trim()) {
      const next = lines.slice(stop + 1).find((each) => each.trim());
      const goesOn = next !== undefined && (/^\s/.test(next) || (ITEM.test(next) && /\d/.test(ITEM.exec(next)[2]) === ordered));
      if (!goesOn) break;
      items.at(-1).push("");
    } else if (/^\s/.test(line) || !begins(line)) {
      const inner = indent.length + mark.length + 1;
      items.at(-1).push(line.slice(Math.min(inner, line.length - line.trimStart().length)));
    } else {
      break;
    }
    stop += 1;
  }
  return ["list", stop, (depth) => {
    const made = element(ordered ? "ol" : "ul");
    if (ordered) made.start = Number.parseInt(mark, 10);
    for (const each of items) made.append(within(element("li"), each.join("\n"), depth));
    return made;
  }];
}

function table(lines, at) {
  let stop = at + 2;
  while (stop < lines.length && lines[stop].includes("|")) stop += 1;
  const cells = (line) => line.trim().replace(/^\||\|$/g, "").split(/(?<!\\)\|/);
  return ["table", stop, () => {
    const made = element("table");
    for (const [n, line] of lines.slice(at, stop).entries()) {
      if (n === 1) continue;
      const row = element("tr");
      for (const cell of cells(line)) row.append(inline(element(n ? "td" : "th"), cell.trim()));
      made.append(row);
    }
    const scrolled = element("div");
    scrolled.className = "wide-table";
    scrolled.append(made);
    return scrolled;
  }];
}

function link(text, target) {
  const made = inline(element("a"), text, DEEPEST);
  made.href = target;
  made.rel = "noopener noreferrer";
  made.target = "_blank";
  return made;
}

function inline(target, text, depth = 0) {
  let before = 0;
  for (const found of depth > 3 ? [] : text.matchAll(INLINE)) {
    target.append(text.slice(before, found.index));
    before = found.index + found[0].length;
    const [, escaped, , span, picture, name, address, bold, bolder, slanted, leaning, struck, bare] = found;
    if (escaped) target.append(escaped);
    else if (span !== undefined) target.append(element("code", span.trim() || span));
    else if (picture !== undefined) target.append(picture);
    else if (name) target.append(link(name, address));
    else if (bare) target.append(link(bare, bare));
    else if (bold ?? bolder) target.append(inline(element("strong"), bold ?? bolder, depth + 1));
    else if (slanted ?? leaning) target.append(inline(element("em"), slanted ?? leaning, depth + 1));
    else target.append(inline(element("del"), struck, depth + 1));
  }
  target.append(text.slice(before));
  return target;
}
