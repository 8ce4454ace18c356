"use strict";
/* Fills the page. */
(() => {
  const OTHERS = "Other numbers";

  function fill_group(group, place) {
    const box = mrl.element("div", { "data-group": group.title });
    const charts = mrl.charts.grid(group.charts);
    if (group.title === OTHERS) {
      const summary = mrl.element("summary", {}, `${group.charts.length} other numbers of the record`);
      box.append(mrl.element("details", { class: "more" }, summary, charts));
    } else {
      box.append(mrl.element("h3", {}, group.title), charts);
    }
    place.append(box);
  }

  function fill() {
    const data = mrl.data("curves");
    const groups = document.getElementById("groups");
    for (const group of groups ? data.groups : []) fill_group(group, groups);
    const evaluations = document.getElementById("evaluation-charts");
    if (evaluations) evaluations.append(...data.evaluations.map((one) => mrl.charts.chart(one, { apart: true })));
  }

  function fill_rollouts() {
    const place = document.getElementById("groups-of-answers");
    if (place) mrl.rollouts.show(place, mrl.data("rollouts"));
  }

  /* The headline is on the screen before the curves, and these before the rollouts are parsed. */
  const after_paint = (work) => requestAnimationFrame(() => setTimeout(work));
  after_paint(() => { fill(); after_paint(fill_rollouts); });
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => location.reload());
})();
