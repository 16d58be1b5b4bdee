"""The script of the live page: asks for the page once a second and exchanges the parts of it that have changed.

What the reader has done stays: scroll positions, opened details, keyboard focus. It runs under a content security
policy that allows this text alone, by its hash, and no address but the page's own.
"""

SCRIPT = """
"use strict";
const pause = 1000;
let tag = "";

// The same name before and after: the heading it stands under, and its number there.
function placeOf(element) {
  const card = element.closest("section,details");
  const heading = card ? card.querySelector("h2,summary") : null;
  const same = card ? [...card.querySelectorAll(element.localName)] : [];
  return [element.localName, heading ? heading.textContent : "", same.indexOf(element)].join("|");
}
function movable(root) { return [...root.querySelectorAll("summary,div.scroll")]; }

function show(text) {
  const fresh = new DOMParser().parseFromString(text, "text/html");
  const before = document.querySelector("main"), after = fresh.querySelector("main");
  const opened = new Set([...before.querySelectorAll("details[open]>summary")].map(placeOf));
  const across = new Map(movable(before).map((element) => [placeOf(element), element.scrollLeft]));
  const focused = before.contains(document.activeElement) ? placeOf(document.activeElement) : null;
  const place = [window.scrollX, window.scrollY];
  for (const summary of after.querySelectorAll("details>summary")) {
    summary.parentElement.open = opened.has(placeOf(summary));
  }
  const old = [...before.children], young = [...after.children];
  if (old.length === young.length) {
    old.forEach((element, at) => { if (!element.isEqualNode(young[at])) element.replaceWith(young[at]); });
  } else {
    before.replaceChildren(...young);
  }
  for (const element of movable(before)) {
    const name = placeOf(element);
    if (across.get(name)) element.scrollLeft = across.get(name);
    if (name === focused && document.activeElement !== element) element.focus({preventScroll: true});
  }
  const bar = document.getElementById("live"), next = fresh.getElementById("live");
  bar.className = next.className;
  bar.dataset.changed = next.dataset.changed || "";
  const said = bar.querySelector("[role=status]"), saying = next.querySelector("[role=status]").textContent;
  if (said.textContent !== saying) said.textContent = saying;
  document.title = fresh.title;
  window.scrollTo(...place);
}

function tellAge() {
  const bar = document.getElementById("live"), since = Number(bar.dataset.changed);
  const seconds = Math.max(0, Math.round(Date.now() / 1000 - since));
  const age = seconds < 120 ? seconds + " s" : Math.round(seconds / 60) + " min";
  const waiting = since && bar.classList.contains("running");
  bar.querySelector(".age").textContent = waiting ? "Last news " + age + " ago." : "";
}

async function look() {
  let lost = false;
  try {
    const answer = await fetch("/", {cache: "no-store", headers: tag ? {"If-None-Match": tag} : {}});
    if (answer.status === 200) {
      show(await answer.text());
      tag = answer.headers.get("ETag") || "";
    }
  } catch (error) {
    lost = true;
  }
  const bar = document.getElementById("live");
  bar.querySelector(".lost").hidden = !lost || bar.classList.contains("ended");  // then nothing is missed
  tellAge();
  setTimeout(look, pause);
}
look();
"""
