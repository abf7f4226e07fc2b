"use strict";

// The pages are readable without this file; it updates them live and sends the requests of forms and buttons.

const byId = (id) => document.getElementById(id);
const OVER = ["succeeded", "failed", "cancelled"];

async function post(path, body, headers = {}) {
  const options = { method: "POST", headers };
  if (body !== undefined) {
    options.headers = { ...headers, "Content-Type": "application/json" };
    options.body = JSON.stringify(body);
  }
  const response = await fetch(path, options);
  if (response.ok) return response.status === 204 ? null : response.json();
  const said = await response.json().catch(() => ({ detail: `status ${response.status}` }));
  throw new Error(said.detail);
}

function refuse(error) {
  const place = byId("refused");
  const silent = error instanceof TypeError;
  place.textContent = silent ? "The service does not answer; try again in a moment." : printable(error.message);
  place.hidden = false;
  place.scrollIntoView({ block: "nearest" });
}

// Values for people

function printable(text) {  // as commands and pages write it: control characters in file names are escaped
  return text.replace(/[\p{C}\p{Zl}\p{Zp}]|(?! )\p{Zs}/gu, (each) => {
    const known = { "\t": "\\t", "\n": "\\n", "\r": "\\r" }[each], code = each.codePointAt(0);
    const [letter, digits] = code < 0x100 ? ["x", 2] : code < 0x10000 ? ["u", 4] : ["U", 8];
    return known ?? `\\${letter}${code.toString(16).padStart(digits, "0")}`;
  });
}

function bytes(count) {
  for (const unit of ["B", "KiB", "MiB", "GiB"]) {
    if (count < 1024) return `${count.toFixed(unit === "B" || count >= 100 ? 0 : 1)} ${unit}`;
    count /= 1024;
  }
  return `${count.toFixed(1)} TiB`;
}

function duration(seconds) {
  if (seconds < 120) return `${seconds.toFixed(seconds < 10 ? 1 : 0)} s`;
  return seconds < 7200 ? `${Math.round(seconds / 60)} min` : `${(seconds / 3600).toFixed(1)} h`;
}

function ago(then) {
  const seconds = (Date.now() - then) / 1000;
  if (seconds < 60) return "just now";
  if (seconds < 3600) return `${Math.floor(seconds / 60)} min ago`;
  if (seconds < 86400) return `${Math.floor(seconds / 3600)} h ago`;
  return then.toLocaleDateString();
}

function showTimes(within) {
  for (const time of within.querySelectorAll("time[datetime]")) {
    const then = new Date(time.dateTime);
    time.title = then.toLocaleString();
    time.textContent = "ago" in time.dataset ? ago(then) : then.toLocaleString();
  }
}
showTimes(document);

// Live lists: fetch the page again and replace the part that changes.

for (const part of document.querySelectorAll("[data-refresh]")) {
  let shown = part.innerHTML;
  setInterval(async () => {
    if (document.hidden || part.contains(document.activeElement)) return;
    const response = await fetch(location.href).catch(() => null);
    if (response === null || !response.ok || response.redirected) return;
    const fresh = new DOMParser().parseFromString(await response.text(), "text/html").getElementById(part.id);
    if (fresh === null) return;
    showTimes(fresh);
    if (fresh.innerHTML !== shown) part.innerHTML = shown = fresh.innerHTML;
  }, Number(part.dataset.refresh));
  shown = part.innerHTML;
}

// One job

for (const button of document.querySelectorAll("button[data-post]")) {
  button.addEventListener("click", () => {
    button.disabled = true;
    post(button.dataset.post).then(() => location.reload(), (error) => { button.disabled = false; refuse(error); });
  });
}

function note(event) {
  const said = JSON.parse(event.data);
  const log = byId("log");
  if (log.querySelector(`[data-number="${Number(said.number)}"]`)) return;
  const line = document.createElement("li");
  const time = document.createElement("time");
  const message = document.createElement("span");
  line.dataset.number = said.number;
  time.dateTime = new Date(1000 * said.at).toISOString();
  message.textContent = printable(said.message);
  line.append(time, message);
  showTimes(line);
  log.append(line);
  log.scrollTop = log.scrollHeight;
}

function showChunks(said) {
  byId("state").textContent = said.state;
  byId("state").className = `state ${said.state}`;
  byId("progress").className = said.state;
  byId("chunks").textContent = `${said.chunks_done} of ${said.chunks ?? "?"} ${said.chunks === 1 ? "chunk" : "chunks"}`;
  if (!said.chunks) return;
  const share = said.chunks_done / said.chunks;
  byId("progress").value = share;
  const known = said.seconds && share > 0 && share < 1;
  byId("left").textContent = known ? `about ${duration((said.seconds * (1 - share)) / share)} left` : "";
}

// Bytes read and written at each progress event: the line shows the rate between them.
const moments = [];
const MOST_MOMENTS = 240;

function showStages(said) {
  if (said.stages.length === 0) return;
  byId("throughput").hidden = false;
  for (const stage of said.stages) {
    const row = document.querySelector(`[data-stage="${stage.name}"]`);
    row.querySelector("progress").value = stage.busy;
    row.cells[2].textContent = `${Math.round(100 * stage.busy)} % busy`;
    row.cells[3].textContent = `${bytes(stage.rate)}/s`;
    const figure = byId(`rate-${stage.name}`);
    if (figure) figure.textContent = `${bytes(stage.rate)}/s`;
  }
  const moved = said.stages.filter((stage) => stage.name === "read" || stage.name === "write");
  moments.push([said.seconds, moved.reduce((sum, stage) => sum + stage.bytes, 0)]);
  if (moments.length > MOST_MOMENTS) moments.shift();
  drawRates();
}

function drawRates() {
  const rates = [];
  let from = moments[0];
  for (const moment of moments) {
    // Workers report twice a second: shorter steps would only show when.
    if (moment[0] - from[0] < 1) continue;
    rates.push((moment[1] - from[1]) / (moment[0] - from[0]));
    from = moment;
  }
  if (rates.length < 2) return;
  const most = Math.max(...rates, 1);
  const points = rates.map((rate, i) => `${(100 * i) / (rates.length - 1)},${29 - (27 * Math.max(rate, 0)) / most}`);
  const chart = byId("rates");
  chart.querySelector("polyline").setAttribute("points", points.join(" "));
  chart.querySelector("polygon").setAttribute("points", `0,30 ${points.join(" ")} 100,30`);
  chart.removeAttribute("hidden");
}

const job = document.querySelector("article[data-job]");
if (job && job.dataset.over === "no") {
  const events = new EventSource(`/v1/jobs/${job.dataset.job}/events`);
  events.addEventListener("state", note);
  events.addEventListener("log", note);
  events.addEventListener("progress", (event) => {
    const said = JSON.parse(event.data);
    showChunks(said);
    showStages(said);
    if (OVER.includes(said.state)) {
      events.close();
      location.reload();
    }
  });
  addEventListener("pagehide", () => events.close());
}

// The preview is drawn last: reload a page that was rendered before it until it is there.
if (job && "drawing" in job.dataset) {
  const asking = setInterval(async () => {
    const response = await fetch(location.href).catch(() => null);
    if (response === null || !response.ok) return;
    const fresh = new DOMParser().parseFromString(await response.text(), "text/html");
    if (fresh.querySelector("article[data-drawing]") !== null) return;
    clearInterval(asking);
    if (fresh.querySelector(".preview") !== null) location.reload();
  }, 1000);
}

// Forms

// Null without a text; NaN, which the service refuses, if it is neither a time nor an amount.
function parsedSeconds(text) {
  const found = /^([0-9.]+) *(s|m|min|h|d)?$/.exec(text);
  return text ? Number(found?.[1]) * { s: 1, m: 60, min: 60, h: 3600, d: 86400 }[found?.[2] ?? "s"] : null;
}

function parsedBytes(text) {
  const found = /^([0-9.]+) *([kmgt]?)(i?)b?$/i.exec(text);
  if (!text) return null;
  return Math.round(Number(found?.[1]) * (found?.[3] ? 1024 : 1000) ** " kmgt".indexOf(found?.[2].toLowerCase() || " "));
}

const submit = byId("submit");
if (submit) {
  // The key makes a request that is sent twice, by a double click or a broken connection, one job.
  const key = Array.from(crypto.getRandomValues(new Uint8Array(16)), (each) => each.toString(16).padStart(2, "0")).join("");
  let changes = 0;
  submit.addEventListener("input", () => { changes += 1; });
  submit.addEventListener("submit", (event) => {
    event.preventDefault();
    byId("refused").hidden = true;
    const parameters = {};
    for (const field of submit.querySelectorAll("[data-parameter]")) {
      if (field.type === "checkbox" ? field.checked : field.value.trim() !== "") {
        parameters[field.dataset.parameter] = field.type === "checkbox" ? true : field.value.trim();
      }
    }
    const value = (name) => submit.elements[name].value.trim();
    const body = {
      workload: submit.dataset.workload,
      input: value("input"),
      output: value("output"),
      priority: Number(value("priority") || 0),
      after: value("after").split(/[\s,]+/).filter(Boolean),
      after_any: value("after_any").split(/[\s,]+/).filter(Boolean),
      array: value("array") || null,
      limits: {
        time_s: parsedSeconds(value("time")),
        memory_bytes: parsedBytes(value("memory")),
        gpu_memory_bytes: parsedBytes(value("gpu_memory")),
        gpus: value("gpus") ? Number(value("gpus")) : null,
      },
      no_clobber: submit.elements.no_clobber.checked,
      group: submit.elements.group?.value ?? null,
      parameters,
    };
    const button = submit.querySelector("button");
    button.disabled = true;
    post("/v1/jobs", body, { "Idempotency-Key": `${key}-${changes}` }).then(
      (found) => { location.href = found.array ? `/?array=${found.array}` : `/jobs/${found.jobs[0].id}`; },
      (error) => { button.disabled = false; refuse(error); },
    );
  });
}

// Choosing a file of the form: the page of the data in a dialog.

const chooser = byId("chooser");
if (chooser) {
  const [shown, naming] = [chooser.querySelector(".chosen"), chooser.querySelector(".filters")];
  let field = null;

  async function show(address) {
    const response = await fetch(address).catch(() => null);
    const page = response?.ok ? new DOMParser().parseFromString(await response.text(), "text/html") : null;
    const files = page?.getElementById("files");
    if (!files && address !== "/data") return show("/data");
    shown.replaceChildren(files ?? "The service does not answer; try again in a moment.");
    naming.hidden = field.name !== "output" || !files?.dataset.path;
    for (const link of shown.querySelectorAll(".use")) link.textContent = "Choose";
    showTimes(shown);
  }

  function choose(path) {
    field.value = path;
    field.dispatchEvent(new Event("input", { bubbles: true }));
    chooser.close();
    field.focus();
  }

  for (const button of document.querySelectorAll("[data-choose]")) {
    button.addEventListener("click", () => {
      field = submit.elements[button.dataset.choose];
      const [input, output] = [submit.elements.input.value, submit.elements.output.value];
      const named = /^(.*\/)?([^/]*?)(\.[^/]*)?$/.exec(output || input);
      naming.elements.name.value = output ? named[2] + (named[3] ?? "") : `${named[2] || "result"}-${submit.dataset.workload}${named[3] ?? ".tif"}`;
      show(named[1] ? `/data?path=${encodeURIComponent(named[1])}` : "/data").then(() => chooser.showModal());
    });
  }
  shown.addEventListener("click", (event) => {
    const link = event.target.closest("[data-file], a");
    if (!link) return;
    event.preventDefault();
    if (link.dataset.file) choose(link.dataset.file);
    else show(link.getAttribute("href")).then(() => shown.querySelector("a, button")?.focus());
  });
  naming.addEventListener("submit", (event) => {
    event.preventDefault();
    choose(`${shown.querySelector("#files").dataset.path.replace(/\/$/, "")}/${naming.elements.name.value.trim()}`);
  });
}

const login = byId("login");
if (login) {
  login.addEventListener("submit", (event) => {
    event.preventDefault();
    post("/login", { token: login.elements.token.value.trim() }).then(() => { location.href = login.dataset.next; }, refuse);
  });
}
