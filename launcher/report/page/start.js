"use strict";
/* Fills the page, and renews it while `mrl report --follow` serves it. */
(() => {
  const ASKED_MS = 5000;
  const OTHERS = "Other numbers";

  /* Charts of a group; those of earlier data are kept, so that zoom and place on the page stay. */
  function fill_group(group, place) {
    const before = [...place.querySelectorAll("[data-group]")].find((one) => one.dataset.group === group.title);
    if (before && mrl.charts.update(before, group.charts)) return;
    const box = mrl.element("div", { "data-group": group.title });
    const charts = mrl.charts.grid(group.charts);
    if (group.title === OTHERS) {
      const summary = mrl.element("summary", {}, `${group.charts.length} other numbers of the record`);
      box.append(mrl.element("details", { class: "more" }, summary, charts));
    } else {
      box.append(mrl.element("h3", {}, group.title), charts);
    }
    if (before) before.replaceWith(box);
    else place.append(box);
  }

  function fill() {
    const data = mrl.data("curves");
    const groups = document.getElementById("groups");
    for (const group of groups ? data.groups : []) fill_group(group, groups);
    const evaluations = document.getElementById("evaluation-charts");
    if (evaluations && !mrl.charts.update(evaluations, data.evaluations)) {
      evaluations.replaceChildren(...data.evaluations.map((one) => mrl.charts.chart(one, { apart: true })));
    }
    const timeline = document.getElementById("timeline");
    if (timeline) {
      timeline.replaceChildren();
      mrl.usage.show(timeline, data.timeline, data.categories);
    }
  }

  function fill_rollouts() {
    const place = document.getElementById("groups-of-answers");
    if (place) mrl.rollouts.show(place, mrl.data("rollouts"));
  }

  /* Take over a newer page. The list of rollouts stays as it is until the reader asks for the new ones. */
  function take(text) {
    const page = new DOMParser().parseFromString(text, "text/html");
    const parts = (root) => new Set([...root.querySelectorAll("section[id]")].map((one) => one.id));
    const [here, there] = [parts(document), parts(page)];
    if ([...there].some((id) => !here.has(id))) return location.reload(); // such as the first evaluation
    for (const part of document.querySelectorAll("[data-part]")) {
      const newer = page.querySelector(`[data-part="${part.dataset.part}"]`);
      if (newer && newer.textContent !== part.textContent) part.replaceWith(document.adoptNode(newer));
    }
    const blocks = ["curves", "rollouts"].map((name) => [`data-${name}`, page.getElementById(`data-${name}`)]);
    const changed = blocks.filter(([id, block]) => {
      const old = document.getElementById(id);
      if (!block || block.textContent === old.textContent) return false;
      old.textContent = block.textContent;
      return true;
    });
    const names = changed.map(([id]) => id);
    if (names.includes("data-curves")) fill();
    if (names.includes("data-rollouts")) offer();
  }

  function offer() {
    const place = document.getElementById("groups-of-answers");
    if (!place || document.getElementById("newer")) return;
    const button = mrl.element("button", { type: "button", id: "newer" }, "Show the newest groups");
    button.addEventListener("click", () => { button.remove(); fill_rollouts(); });
    place.before(button);
  }

  async function renew(tag) {
    let next = tag;
    try {
      const answer = await fetch("./", { headers: tag ? { "If-None-Match": tag } : {}, cache: "no-store" });
      if (answer.status === 200) {
        next = answer.headers.get("ETag");
        if (tag) take(await answer.text());
      }
      said(answer.ok || answer.status === 304 ? "live" : answer.status === 503 ? "not renewed" : "no longer served");
    } catch {
      said("no longer served");
    }
    setTimeout(() => renew(next), ASKED_MS);
  }

  function said(text) {
    const place = document.getElementById("live");
    if (place && place.textContent !== text) place.textContent = text;
  }

  /* The headline is on the screen before the curves, and these before the rollouts are parsed. */
  const after_paint = (work) => requestAnimationFrame(() => setTimeout(work));
  after_paint(() => { fill(); after_paint(fill_rollouts); });
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => location.reload());
  if (document.body.dataset.live) renew(null);
})();
