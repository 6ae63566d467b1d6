// The page's own script: shows what the server sends without disturbing who reads, and talks to the model.
"use strict";

window.pyengine = (() => {
  // Makes `old` what `fresh` is, and touches only what differs: a focus, a selection, a scrolled table stay.
  function become(old, fresh) {
    if (old.nodeType !== fresh.nodeType || old.nodeName !== fresh.nodeName) {
      old.replaceWith(fresh);
      return;
    }
    if (old.nodeType === Node.TEXT_NODE) {
      if (old.data !== fresh.data) old.data = fresh.data;
      return;
    }
    if (old.nodeType !== Node.ELEMENT_NODE) return;
    for (const { name } of [...old.attributes]) if (!fresh.hasAttribute(name)) old.removeAttribute(name);
    for (const { name, value } of fresh.attributes) if (old.getAttribute(name) !== value) old.setAttribute(name, value);
    within(old, fresh);
  }

  function within(old, fresh) {
    const had = [...old.childNodes], has = [...fresh.childNodes];
    has.forEach((child, at) => (at < had.length ? become(had[at], child) : old.append(child)));
    had.slice(has.length).forEach((child) => child.remove());
  }

  function show(sections) {
    for (const [name, html] of Object.entries(sections)) {
      const place = document.getElementById(name);
      if (!place) continue;
      const made = document.createElement("template");
      made.innerHTML = html;
      within(place, made.content);
    }
  }

  // -- playground ----------------------------------------------------------------------------------------------------

  let conversation = [];
  let asking = null;
  const at = (id) => document.getElementById(id);

  function say(kind, text) {
    const turn = document.createElement("div");
    turn.className = `turn ${kind}`;
    turn.textContent = text;
    at("talk").append(turn);
    return turn;
  }

  function busy(is) {
    at("send").disabled = is;
    at("stop").disabled = !is;
  }

  async function* events(response) {
    const decoder = new TextDecoder();
    const reader = response.body.getReader();
    let left = "";
    for (;;) {
      const { done, value } = await reader.read();
      if (done) return;
      const lines = (left + decoder.decode(value, { stream: true })).split("\n");
      left = lines.pop();
      for (const line of lines) if (line.startsWith("data: ") && line !== "data: [DONE]") yield JSON.parse(line.slice(6));
    }
  }

  function told(error, status) {
    if (status === 401 || status === 403) {
      at("key-label").hidden = false;
      at("key").focus();
    }
    return error?.message ?? `the server answered ${status}`;
  }

  async function ask(text) {
    conversation.push({ role: "user", content: text });
    say("user", text);
    const turn = say("assistant", "");
    const note = say("note", "…");
    asking = new AbortController();
    busy(true);
    const began = performance.now();
    let answer = "", first = null, tokens = 0, number = null, failed = null;
    try {
      const headers = { "Content-Type": "application/json" };
      if (at("key").value) headers.Authorization = `Bearer ${at("key").value}`;
      const response = await fetch("/v1/chat/completions", {
        method: "POST", headers, credentials: "omit", signal: asking.signal,
        body: JSON.stringify({
          model: at("model").value || undefined, messages: conversation, stream: true,
          stream_options: { include_usage: true },
          max_tokens: Number(at("most").value) || undefined, temperature: Number(at("temperature").value),
        }),
      });
      number = response.headers.get("X-Request-Id");
      if (!response.ok) {
        let error = null;
        try { error = (await response.json()).error; } catch { /* no JSON: the status says it */ }
        throw new Error(told(error, response.status));
      }
      for await (const event of events(response)) {
        if (event.error) throw new Error(event.error.message);
        if (event.usage) tokens = event.usage.completion_tokens;
        const delta = event.choices?.[0]?.delta ?? {};
        const piece = (delta.reasoning_content ?? "") + (delta.content ?? "");
        if (!piece) continue;
        first ??= performance.now();
        answer += piece;
        turn.textContent = answer;
      }
    } catch (error) {
      failed = error.name === "AbortError" ? "stopped" : error.message;
    }
    asking = null;
    busy(false);
    if (answer) conversation.push({ role: "assistant", content: answer });
    else {
      conversation.pop();
      turn.remove();
    }
    note.textContent = "";
    note.classList.toggle("bad", Boolean(failed) && failed !== "stopped");
    const said = [];
    if (failed) said.push(failed);
    if (tokens) said.push(`${tokens} tokens`);
    if (first !== null) said.push(`first after ${((first - began) / 1000).toFixed(2)} s`);
    note.append(said.join(", ") || "no text came");
    if (number) {
      const link = document.createElement("a");
      link.href = `/dashboard/requests/${encodeURIComponent(number)}`;
      link.textContent = "its timeline";
      note.append(" · ", link);
    }
    note.scrollIntoView({ block: "nearest" });
  }

  document.addEventListener("submit", (event) => {
    if (event.target.id !== "ask") return;
    event.preventDefault();
    const text = at("text").value.trim();
    if (!text || asking) return;
    at("text").value = "";
    ask(text);
  });
  document.addEventListener("click", (event) => {
    if (event.target.id === "stop") asking?.abort();
    if (event.target.id === "anew") {
      asking?.abort();
      conversation = [];
      at("talk").replaceChildren();
      at("text").focus();
    }
  });
  document.addEventListener("keydown", (event) => {
    if (event.target.id === "text" && event.key === "Enter" && (event.ctrlKey || event.metaKey)) at("ask").requestSubmit();
  });

  return { show };
})();
