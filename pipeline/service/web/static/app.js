"use strict";

// Everything reads without this file; it makes pages follow what happens, and sends what a form or a button asks for.

const byId = (id) => document.getElementById(id);

async function post(path, body) {
  const options = { method: "POST" };
  if (body !== undefined) {
    options.headers = { "Content-Type": "application/json" };
    options.body = JSON.stringify(body);
  }
  const response = await fetch(path, options);
  if (response.ok) return response.status === 204 ? null : response.json();
  const said = await response.json().catch(() => ({ detail: `status ${response.status}` }));
  throw new Error(said.detail);
}

function refuse(error) {
  const place = byId("refused");
  place.textContent = error.message;
  place.hidden = false;
}

for (const time of document.querySelectorAll("time[datetime]")) {
  if (time.dateTime) time.textContent = new Date(time.dateTime).toLocaleString();
}

for (const button of document.querySelectorAll("button[data-post]")) {
  button.addEventListener("click", () => {
    button.disabled = true;
    post(button.dataset.post).then(() => location.reload(), (error) => { button.disabled = false; refuse(error); });
  });
}

const job = document.querySelector("article[data-job]");
if (job && job.dataset.over === "no") {
  const seen = new Set([...document.querySelectorAll("#log li")].map((line) => line.dataset.number));
  const events = new EventSource(`/v1/jobs/${job.dataset.job}/events`);
  const note = (event) => {
    const said = JSON.parse(event.data);
    if (seen.has(String(said.number))) return;
    seen.add(String(said.number));
    const line = document.createElement("li");
    const time = document.createElement("time");
    time.textContent = new Date(1000 * said.at).toLocaleString();
    line.append(time, ` ${said.message}`);
    byId("log").append(line);
  };
  events.addEventListener("state", note);
  events.addEventListener("log", note);
  events.addEventListener("progress", (event) => {
    const said = JSON.parse(event.data);
    byId("state").textContent = said.state;
    byId("state").className = `state ${said.state}`;
    byId("chunks").textContent = `${said.chunks_done} of ${said.chunks ?? "?"} chunks`;
    if (said.chunks) byId("progress").value = said.chunks_done / said.chunks;
    if (["succeeded", "failed", "cancelled"].includes(said.state)) {
      events.close();
      setTimeout(() => location.reload(), 500); // the picture is drawn last
    }
  });
}

const submit = byId("submit");
if (submit) {
  submit.addEventListener("submit", (event) => {
    event.preventDefault();
    const parameters = {};
    for (const field of submit.querySelectorAll("[data-parameter]")) {
      if (field.type === "checkbox" ? field.checked : field.value !== "") {
        parameters[field.dataset.parameter] = field.type === "checkbox" ? true : field.value;
      }
    }
    const body = {
      workload: submit.dataset.workload,
      input: submit.elements.input.value,
      output: submit.elements.output.value,
      priority: Number(submit.elements.priority.value || 0),
      parameters,
    };
    post("/v1/jobs", body).then((found) => { location.href = `/jobs/${found.jobs[0].id}`; }, refuse);
  });
}

const login = byId("login");
if (login) {
  login.addEventListener("submit", (event) => {
    event.preventDefault();
    post("/login", { token: login.elements.token.value.trim() }).then(() => { location.href = login.dataset.next; }, refuse);
  });
}
