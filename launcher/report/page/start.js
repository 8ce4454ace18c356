"use strict";
/* Fills the page. */
(() => {
  function fill() {
    const data = mrl.data("curves");
    const groups = document.getElementById("groups");
    for (const [at, group] of (data.groups || []).entries()) {
      const charts = mrl.charts.grid(group.charts);
      if (group.title === "Other numbers") {
        const summary = mrl.element("summary", {}, `${group.charts.length} other numbers of the record`);
        groups.append(mrl.element("details", { class: "more" }, summary, charts));
      } else {
        groups.append(mrl.element("h3", {}, group.title), charts);
      }
    }
    const evaluations = document.getElementById("evaluation-charts");
    if (evaluations) evaluations.append(...(data.evaluations || []).map((one) => mrl.charts.chart(one, { apart: true })));
    if (data.timeline) mrl.usage.show(document.getElementById("timeline"), data.timeline, data.categories);
  }

  /* The rollouts are parsed once the curves are on the screen. */
  function fill_rollouts() {
    const place = document.getElementById("groups-of-answers");
    if (place) mrl.rollouts.show(place, mrl.data("rollouts"), mrl.data("curves").run);
  }

  fill();
  requestAnimationFrame(() => setTimeout(fill_rollouts));
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => location.reload());
})();
