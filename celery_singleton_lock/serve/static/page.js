// Shows the state of the locks, and asks for it again a second after each answer. All text is set as
// text, never parsed as HTML. The operator's token is kept in its input field only.
"use strict";

const PAUSE = 1000; // ms between an answer and the next question
const get = (id) => document.getElementById(id);
const shown = new Map(); // the row of each key
let show = "";
let asked = new AbortController();
let timer = 0;
let chosen = null; // the key in the dialog

function make(tag, className, text) {
  const element = document.createElement(tag);
  if (className) element.className = className;
  if (text !== undefined) element.textContent = text;
  return element;
}

function setText(element, text) {
  if (element.textContent !== text) element.textContent = text;
}

function duration(seconds) {
  if (seconds === null) return "";
  if (seconds < 10) return `${seconds.toFixed(1)} s`;
  const total = Math.round(seconds);
  if (total < 60) return `${total} s`;
  const [days, hours, minutes] = [Math.floor(total / 86400), Math.floor(total / 3600) % 24, Math.floor(total / 60) % 60];
  if (days) return `${days} d ${hours} h`;
  if (hours) return `${hours} h ${minutes} min`;
  return `${minutes} min ${total % 60} s`;
}

function setStatus(id, level, name, text, title) {
  const item = get(id);
  item.className = level;
  item.title = title || "";
  setText(item, `${name}: ${text}`);
}

function setTrouble(text) {
  get("trouble").hidden = !text;
  setText(get("trouble"), text);
}

function newRow() {
  const row = make("tr");
  const cells = {};
  for (const [name, label] of [["key", "Key"], ["state", "State"], ["holder", "Held by"], ["age", "For"], ["ttl", "Expires in"], ["waiting", "Waiting"], ["action", ""]]) {
    cells[name] = make("td", ["age", "ttl", "waiting"].includes(name) ? "number" : name);
    cells[name].dataset.label = label;
    row.append(cells[name]);
  }
  cells.name = make("code");
  cells.badge = make("span", "badge");
  cells.task = make("span", "task");
  cells.id = make("code", "id");
  cells.where = make("span", "where");
  cells.key.append(cells.name);
  cells.state.append(cells.badge);
  cells.holder.append(cells.task, cells.id, cells.where);
  const button = make("button", "release", "Release …");
  button.type = "button";
  button.addEventListener("click", () => openDialog(row.held));
  cells.action.append(button);
  return Object.assign(row, { parts: cells, button });
}

function fillRow(row, held, canRelease) {
  const { parts: cells } = row;
  row.held = held;
  setText(cells.name, held.name);
  cells.name.title = held.key;
  setText(cells.badge, held.state);
  cells.badge.className = `badge ${held.is_claim ? "claim" : held.state === "running" ? "running" : "other"}`;
  setText(cells.task, held.is_beat ? "Beat leader" : held.task || (held.is_free ? "" : "hold()"));
  setText(cells.id, held.task_id);
  if (held.is_free) setText(cells.where, "is next");
  else setText(cells.where, held.worker ? `${held.is_claim ? "published by " : ""}${held.worker}, pid ${held.pid}` : "");
  setText(cells.age, duration(held.age));
  setText(cells.ttl, held.is_free ? "" : duration(held.ttl));
  const waiting = (held.waiting || 0) + (held.calls || 0);
  setText(cells.waiting, waiting ? String(waiting) : held.waiting === null && !held.is_free ? "?" : "");
  cells.waiting.title = held.calls ? `${held.calls} in the queue of the key` : "";
  row.button.hidden = !canRelease || held.is_free;
  row.button.setAttribute("aria-label", `Release ${held.name}`);
}

function showKeys(state) {
  const body = get("keys");
  const present = new Set(state.keys.map((held) => held.key));
  for (const [key, row] of shown) {
    if (!present.has(key)) {
      row.remove();
      shown.delete(key);
    }
  }
  state.keys.forEach((held, place) => {
    const row = shown.get(held.key) || newRow();
    shown.set(held.key, row);
    fillRow(row, held, state.can_release);
    if (body.children[place] !== row) body.insertBefore(row, body.children[place] || null);
  });
  const { matching, keys } = state;
  const isSearch = get("search").value.trim() || show;
  let text = `${matching} ${matching === 1 ? "key" : "keys"}${isSearch ? " found" : ""}.`;
  if (keys.length < matching) text = `The first ${keys.length} of ${matching} keys. Search to see others.`;
  if (!matching) {
    text = isSearch
      ? "No key matches. If you look for a task, ask below why it ran or did not run."
      : "No key is held.";
  }
  setText(get("summary"), state.store.error ? "" : text);
}

function showStatus(state) {
  const { store, broker, beat } = state;
  const said = (value) => (store.error || value === null ? "?" : String(value));
  const { all, held, claimed, waiting } = state.counts;
  setText(get("app"), state.app ? `Locks of ${state.app}` : "Locks");
  document.title = `${said(held)} held – ${get("app").textContent}`;
  setStatus("store", store.error ? "bad" : "good", "Store", store.error ? "error" : "answers", store.url);
  setStatus("broker", broker.error ? "bad" : "good", "Events", broker.error ? "no broker" : `${broker.received} received`, broker.error || "From workers that were started with -E");
  const leader = beat.leader;
  if (leader) setStatus("beat", "good", "Beat leader", leader.worker, `pid ${leader.pid}, for ${duration(leader.age)}`);
  else if (store.error) setStatus("beat", "none", "Beat leader", "unknown", "");
  else setStatus("beat", "none", "Beat leader", "none", `No Beat leads "${beat.name}"`);
  setTrouble(store.error ? `The store can't be read: ${store.error}` : "");
  setText(get("count-all"), said(all));
  setText(get("count-held"), said(held));
  setText(get("count-claimed"), said(claimed));
  setText(get("count-waiting"), said(waiting));
  setText(get("mode"), state.can_release ? "Releases need the token" : "Read-only");
  setText(get("at"), new Date(state.at).toLocaleTimeString());
}

function showFindings(findings) {
  const list = get("findings");
  const text = JSON.stringify(findings);
  if (list.dataset.text === text) return;
  list.dataset.text = text;
  const rank = { error: 0, warning: 1, note: 2 };
  const loud = findings.filter((one) => one.severity in rank).sort((a, b) => rank[a.severity] - rank[b.severity]);
  list.replaceChildren(...loud.map((one) => {
    const item = make("li", one.severity);
    item.append(make("span", `badge ${one.severity}`, one.severity), make("b", "", one.subject), make("span", "", one.text));
    if (one.remedy) item.append(make("em", "", one.remedy));
    return item;
  }));
  const sound = findings.length - loud.length;
  setText(get("sound"), findings.length ? `${sound} of ${findings.length} checks are ok.` : "The first examination is running.");
}

function showPauses(pauses) {
  const list = get("pauses");
  list.hidden = !pauses.length;
  list.replaceChildren(...pauses.map((text) => make("li", "", text)));
}

async function refresh() {
  clearTimeout(timer);
  asked.abort();
  const mine = (asked = new AbortController());
  const query = new URLSearchParams({ q: get("search").value, sort: get("sort").value, show });
  try {
    const response = await fetch(`api/state?${query}`, { signal: mine.signal });
    if (!response.ok) throw new Error(await response.text());
    const state = await response.json();
    showStatus(state);
    showKeys(state);
    showPauses(state.pauses);
    showFindings(state.findings);
  } catch (error) {
    if (mine.signal.aborted) return; // a later question replaces this one
    setTrouble(`This server does not answer: ${error.message}. Trying again.`);
  }
  if (!document.hidden) timer = setTimeout(refresh, PAUSE);
}

function openDialog(held) {
  chosen = held;
  setText(get("dialog-key"), held.key);
  setText(get("dialog-holder"), `${held.state}, ${held.task || "hold()"}[${held.task_id}] on ${held.worker} (pid ${held.pid})`);
  setText(get("dialog-risk"), held.is_claim
    ? "Its message stays where it is, and an equal call can be published as well."
    : "If its holder is alive, another run may start before the holder notices, at its next heartbeat (a third of its ttl).");
  get("reason").value = "";
  get("dialog-error").hidden = true;
  get("dialog").showModal();
}

function setDialogError(text) {
  get("dialog-error").hidden = false;
  setText(get("dialog-error"), text);
}

async function release(event) {
  event.preventDefault();
  get("confirm").disabled = true;
  try {
    const response = await fetch("api/release", {
      method: "POST",
      headers: { "Content-Type": "application/json", Authorization: `Bearer ${get("token").value}` },
      body: JSON.stringify({ key: chosen.key, token: chosen.token, user: get("user").value, reason: get("reason").value }),
    });
    if (!response.ok) throw new Error(await response.text());
    if ((await response.json()).released) get("dialog").close();
    else setDialogError("Not released: it is free, or another holder has it now.");
  } catch (error) {
    setDialogError(error.message);
  }
  get("confirm").disabled = false;
  refresh();
}

async function explain(event) {
  event.preventDefault();
  const answer = get("why-answer");
  get("why-ask").disabled = true;
  answer.replaceChildren(make("p", "", "Asking the result backend, the store and the workers …"));
  try {
    const response = await fetch(`api/explain?${new URLSearchParams({ task: get("why-id").value })}`);
    if (!response.ok) throw new Error(await response.text());
    const found = await response.json();
    answer.replaceChildren(make("p", "badge", found.fate), ...found.sentences.map((text) => make("p", "", text)));
  } catch (error) {
    answer.replaceChildren(make("p", "risk", error.message));
  }
  get("why-ask").disabled = false;
}

get("why").addEventListener("submit", explain);
get("form").addEventListener("submit", release);
get("cancel").addEventListener("click", () => get("dialog").close());
get("search").addEventListener("input", refresh);
get("sort").addEventListener("change", refresh);
for (const button of document.querySelectorAll("[data-show]")) {
  button.addEventListener("click", () => {
    show = button.dataset.show;
    for (const other of document.querySelectorAll("[data-show]")) other.setAttribute("aria-pressed", String(other === button));
    refresh();
  });
}
document.addEventListener("visibilitychange", () => { if (!document.hidden) refresh(); });
refresh();
