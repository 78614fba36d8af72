// Polls every few seconds and updates what changed. Without this script the page is complete but stays as it was loaded.
"use strict";

const LIMIT_MS = 20000;
const PRESS_MS = 2000;
const news = document.getElementById("news");
const shown = new Map(parts(document).map((part) => [part.id, part.outerHTML]));
let tag = null;
let timer = null;
let seen = new Date();
let held = Promise.resolve();

function parts(page) {
  return [...page.querySelectorAll("[data-live]")];
}

async function look() {
  const answer = await fetch(location.href, {
    headers: tag === null ? {} : { "If-None-Match": tag },
    cache: "no-store",
    signal: AbortSignal.timeout(LIMIT_MS),
  });
  if (answer.redirected) {
    location.reload(); // the session is over: the browser is sent to the login page
    return;
  }
  if (answer.status !== 304) {
    if (!answer.ok) throw new Error(`the answer is ${answer.status}`);
    const page = new DOMParser().parseFromString(await answer.text(), "text/html");
    await held;
    tag = answer.headers.get("etag");
    document.title = page.title;
    document.body.dataset.everyS = page.body.dataset.everyS;
    for (const fresh of parts(page)) put(fresh);
  }
  seen = new Date();
  say("", "");
}

// Leaves unchanged parts alone. In changed parts it keeps what a person typed, opened or scrolled.
function put(fresh) {
  const html = fresh.outerHTML;
  const old = document.getElementById(fresh.id);
  if (old === null || shown.get(fresh.id) === html) return;
  shown.set(fresh.id, html);
  for (const opened of old.querySelectorAll("details[id][open]")) {
    const same = fresh.querySelector(`#${opened.id}`);
    if (same !== null) same.open = true;
  }
  for (const typed of old.querySelectorAll("input:not([type=hidden]), textarea, select")) {
    const same = counterpart(typed, fresh);
    if (same !== null) same.value = typed.value;
  }
  const scrolled = [...old.querySelectorAll(".scroll")].map((box) => box.scrollLeft);
  const focused = old.contains(document.activeElement) ? document.activeElement : null;
  const selected = focused === null ? null : [focused.selectionStart, focused.selectionEnd];
  old.replaceWith(document.adoptNode(fresh));
  fresh.querySelectorAll(".scroll").forEach((box, number) => (box.scrollLeft = scrolled[number] ?? 0));
  const again = focused === null ? null : counterpart(focused, fresh);
  if (again === null) return;
  again.focus({ preventScroll: true });
  if (typeof selected[0] === "number") again.setSelectionRange(...selected);
}

// The same field, button, link or summary in another version of a part.
function counterpart(element, part) {
  const form = element.form?.getAttribute("action");
  if (form) {
    const value = element.tagName === "BUTTON" && element.value ? `[value="${element.value}"]` : "";
    const name = element.name ? `[name="${element.name}"]` : "button";
    return part.querySelector(`form[action="${form}"] ${name}${value}`);
  }
  if (element.tagName === "SUMMARY") return part.querySelector(`#${element.parentElement.id} > summary`);
  const link = element.getAttribute("href");
  return link === null ? null : part.querySelector(`a[href="${link}"]`);
}

function say(text, kind) {
  if (news.textContent !== text) news.textContent = text;
  news.className = kind;
}

async function follow() {
  clearTimeout(timer);
  if (document.hidden) return;
  try {
    await look();
  } catch (error) {
    say(`no connection to the page's server; this is how it was at ${seen.toLocaleTimeString()}`, "lost");
  }
  timer = setTimeout(follow, 1000 * Number(document.body.dataset.everyS));
}

// While a button is held down, its part is not updated; otherwise the click would be lost.
document.addEventListener("pointerdown", () => {
  held = new Promise((done) => {
    for (const name of ["pointerup", "pointercancel"]) {
      document.addEventListener(name, () => setTimeout(done), { once: true });
    }
    setTimeout(done, PRESS_MS); // the button may be released outside the window
  });
});

// A second click on the same button does not send a second answer.
document.addEventListener("submit", (event) => {
  if (event.target.dataset.sent) event.preventDefault();
  event.target.dataset.sent = "yes";
});
window.addEventListener("pageshow", () => {
  for (const form of document.forms) delete form.dataset.sent;
});

if (document.body.dataset.everyS) {
  document.addEventListener("visibilitychange", follow);
  timer = setTimeout(follow, 1000 * Number(document.body.dataset.everyS));
}
