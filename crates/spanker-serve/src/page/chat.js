// SPDX-License-Identifier: Apache-2.0
// The chat: messages go out, answers come piece by piece and can be stopped. And what both views share: the key, and
// asking the server how it is.

import { lose, show } from "./cards.js";

const one = (id) => document.getElementById(id);
let turns = [];
let key = sessionStorage.getItem("key") || "";
let running = null;

/** Asks for the key, once at a time. */
let asking = null;
const askKey = () => {
  asking ??= new Promise((resolve) => {
    one("key").value = "";
    one("locked").showModal();
    one("locked").addEventListener("close", () => {
      key = one("key").value.trim();
      sessionStorage.setItem("key", key);
      asking = null;
      resolve();
    }, { once: true });
  });
  return asking;
};

/** Asks the server, with the key where there is one. */
const ask = async (path, options = {}) => {
  for (;;) {
    const headers = { ...options.headers, ...(key ? { authorization: `Bearer ${key}` } : {}) };
    const response = await fetch(path, { ...options, headers });
    if (response.status !== 401) return response;
    await askKey();
  }
};

/** What an answer that is an error says. */
const wrong = async (response) => {
  try {
    return (await response.json()).error.message;
  } catch {
    return `the server answers with ${response.status}`;
  }
};

/** The data of events, as they come. */
async function* events(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let held = "";
  for (;;) {
    const { done, value } = await reader.read();
    if (done) return;
    held += value;
    for (let end = held.indexOf("\n\n"); end >= 0; end = held.indexOf("\n\n")) {
      const event = held.slice(0, end);
      held = held.slice(end + 2);
      if (event.startsWith("data: ")) yield event.slice(6);
    }
  }
}

const part = (kind, text = "") => {
  const element = document.createElement("span");
  element.className = kind;
  element.textContent = text;
  return element;
};

/** A turn in the conversation. */
const turn = (role, text) => {
  one("empty")?.remove();
  const element = document.createElement("p");
  element.className = `turn ${role}`;
  const said = part("said", text);
  element.append(part("who", role === "user" ? "You" : "Model"), said);
  one("log").append(element);
  element.scrollIntoView({ block: "end" });
  return { element, said };
};

/** Whether the reader is at the end of the conversation, and not reading something above it. */
const atEnd = () => one("log").scrollHeight - one("log").scrollTop - one("log").clientHeight < 48;

const body = () => {
  const system = one("system").value.trim();
  const messages = system ? [{ role: "system", content: system }, ...turns] : turns;
  const wanted = { messages, stream: true };
  const [temperature, tokens] = [one("temperature").valueAsNumber, one("tokens").valueAsNumber];
  if (Number.isFinite(temperature)) wanted.temperature = temperature;
  if (Number.isFinite(tokens)) wanted.max_tokens = tokens;
  return JSON.stringify(wanted);
};

/** Takes an answer piece by piece. Says how fast it was, if that is known. */
const listen = async (response, said) => {
  let timings = null;
  let isComplete = false;
  for await (const data of events(response)) {
    if (data === "[DONE]") {
      isComplete = true;
      continue;
    }
    const chunk = JSON.parse(data);
    if (chunk.error) throw new Error(chunk.error.message);
    timings = chunk.timings || timings;
    const text = chunk.choices[0]?.delta?.content;
    if (text) {
      const follow = atEnd();
      said.append(text);
      if (follow) said.parentElement.scrollIntoView({ block: "end" });
    }
  }
  if (!isComplete) throw new Error("the answer breaks off");
  return timings;
};

const busy = (is) => {
  one("send").disabled = is;
  one("stop").disabled = !is;
};

const send = async () => {
  const text = one("text").value.trim();
  if (!text || running) return;
  one("text").value = "";
  // Another conversation may have begun before the answer is complete.
  const own = turns;
  own.push({ role: "user", content: text });
  turn("user", text);
  const { element, said } = turn("assistant", "");
  element.classList.add("busy");
  running = new AbortController();
  busy(true);
  try {
    const headers = { "content-type": "application/json" };
    const { signal } = running;
    const response = await ask("v1/chat/completions", { method: "POST", headers, body: body(), signal });
    if (!response.ok) throw new Error(await wrong(response));
    const timings = await listen(response, said);
    if (timings) {
      const speed = timings.predicted_per_second.toFixed(1);
      element.append(part("speed", `${timings.predicted_n} tokens, ${speed} in a second; prompt ${Math.round(timings.prompt_ms)} ms`));
    }
  } catch (error) {
    const stopped = error.name === "AbortError";
    element.append(stopped ? part("speed", "stopped") : part("wrong", error.message));
  }
  element.classList.remove("busy");
  // What was said is part of the conversation, also if it was cut off; what was not answered is not.
  if (said.textContent) own.push({ role: "assistant", content: said.textContent });
  else own.pop();
  running = null;
  busy(false);
  one("text").focus();
};

one("ask").addEventListener("submit", (event) => {
  event.preventDefault();
  send();
});
one("text").addEventListener("keydown", (event) => {
  if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
    event.preventDefault();
    send();
  }
});
document.addEventListener("keydown", (event) => {
  if (event.key === "Escape") running?.abort();
});
one("stop").addEventListener("click", () => running?.abort());
one("clear").addEventListener("click", () => {
  running?.abort();
  turns = [];
  one("log").replaceChildren();
  one("text").focus();
});

/** Which view there is room for on a small screen. */
const view = (name) => {
  document.body.className = name;
  one("show-chat").setAttribute("aria-pressed", name === "chat");
  one("show-cards").setAttribute("aria-pressed", name === "cards");
};
one("show-chat").addEventListener("click", () => view("chat"));
one("show-cards").addEventListener("click", () => view("cards"));
view("chat");

/** Asks how the server is, again and again while somebody looks. */
const watch = async () => {
  let pause = 1000;
  try {
    if (document.visibilityState === "visible") {
      const response = await ask("status");
      if (!response.ok) throw new Error(await wrong(response));
      show(await response.json());
    }
  } catch (error) {
    lose(error instanceof TypeError ? "the server does not answer" : error.message);
    pause = 3000;
  }
  setTimeout(watch, pause);
};
watch();
