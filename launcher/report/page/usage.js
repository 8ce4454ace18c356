"use strict";
/* Timeline: share of each kind of work in the time of the GPUs. */
mrl.usage = (() => {
  function show(place, timeline, categories) {
    const used = new Set();
    for (const lane of timeline.lanes) {
      const picture = draw(lane, categories, used);
      place.append(mrl.element("p", { class: "lane-name" }, picture.getAttribute("aria-label")), picture);
    }
    place.append(axis(timeline));
    const list = mrl.element("ul", { class: "legend" });
    categories.forEach((name, at) => {
      if (used.has(at)) list.append(mrl.element("li", {}, mrl.swatch(mrl.color(name)), name));
    });
    place.append(list);
  }

  /* One path a category, stacked from the bottom. */
  function draw(lane, categories, used) {
    const count = lane.shares.length;
    const totals = categories.map((name, at) => lane.shares.reduce((sum, slice) => sum + slice[at], 0) / count);
    const said = categories.map((name, at) => [name, totals[at]]).filter((pair) => pair[1] >= 0.005)
      .map(([name, share]) => `${name} ${mrl.number(share, "share")}`);
    const picture = mrl.svg("svg", {
      class: "lane", viewBox: `0 0 ${count} 1`, preserveAspectRatio: "none", role: "img",
      "aria-label": `${lane.role}: ${said.join(", ")}`,
    });
    const heights = new Float64Array(count);
    categories.forEach((name, at) => {
      let path = "";
      lane.shares.forEach((slice, place) => {
        const share = slice[at];
        if (share <= 0) return;
        const bottom = 1 - heights[place];
        heights[place] += share;
        path += `M${place} ${bottom.toFixed(4)}v${(-share).toFixed(4)}h1.02v${share.toFixed(4)}z`;
      });
      if (!path) return;
      if (totals[at] > 0.0005) used.add(at);
      const shape = mrl.svg("path", { d: path });
      shape.style.fill = mrl.color(name);
      shape.append(mrl.svg("title", {}, `${name}, ${mrl.number(totals[at], "share")}`));
      picture.append(shape);
    });
    return picture;
  }

  function axis(timeline) {
    const line = mrl.element("div", { class: "lane-axis" });
    const put = (share, text, kind, top) => {
      const label = mrl.element("span", { class: kind }, text);
      label.style.left = `${share * 100}%`;
      if (top) label.style.top = "1.25em";
      line.append(label);
    };
    for (const share of [0, 0.25, 0.5, 0.75, 1]) {
      put(share, mrl.duration(share * timeline.seconds), share === 0 ? "first" : share === 1 ? "last" : "", false);
    }
    let last = -1;
    for (const mark of timeline.marks) {
      const share = mark.at / timeline.seconds;
      if (timeline.marks.length > 1 && mark.attempt !== null && share - last > 0.08) {
        put(share, `attempt ${mark.attempt}`, share > 0.9 ? "last" : "first", true);
        last = share;
      }
    }
    return line;
  }

  return { show };
})();
