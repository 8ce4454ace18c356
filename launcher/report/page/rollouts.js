"use strict";
/* Rollouts: problems, filter and list of groups. */
mrl.rollouts = (() => {
  const PAGE = 25;

  function unpack(data) {
    return data.steps.map((step, at) => {
      const rewards = data.rewards[at];
      const lengths = data.lengths[at];
      const sum = (values) => values.reduce((total, value) => total + value, 0);
      return {
        step, rewards, lengths,
        ordinal: data.ordinals[at],
        problem: data.problem[at],
        environment: data.environment[at],
        reasons: data.reasons[at],
        lost: data.lost[at],
        versions: data.versions[at],
        passed: data.names[data.passed_over[at]],
        sample: data.sample[at],
        mean: rewards.length ? sum(rewards) / rewards.length : null,
        length: lengths.length ? sum(lengths) / lengths.length : 0,
        signal: new Set(rewards).size > 1,
      };
    });
  }

  function show(place, data) {
    const groups = unpack(data);
    const list = mrl.element("ol", { class: "groups" });
    const count = mrl.element("p", { class: "hint", role: "status" });
    const more = mrl.element("button", { type: "button", class: "more" });
    const history = mrl.element("div", { class: "history" });
    const modes = mrl.element("select", { name: "mode" });
    for (const name of Object.keys(mrl.tokens.modes)) modes.append(mrl.element("option", { value: name }, name === "difference" ? "difference of log-probs" : name));
    const legend = mrl.element("p", { class: "hint" }, mrl.tokens.modes.advantage);
    const all = groups.flatMap((group) => group.rewards);
    const bound = (pick, start) => all.reduce((best, value) => pick(best, value), start);
    const context = {
      command: place.dataset.command, names: data.names, problems: data.problems, samples: data.samples,
      range: { low: bound(Math.min, Infinity), high: bound(Math.max, -Infinity) },
      prompt: (group) => (group.sample < 0 ? data.problems[group.problem][1] : data.samples[group.sample].prompt),
      mode: () => modes.value,
      follow,
    };
    const form = mrl.filter.form(groups, data.names, draw);
    const cache = new Map();
    let fitting = [];
    let shown = 0;

    function texts(group) {
      if (!cache.has(group)) {
        const sample = group.sample < 0 ? null : data.samples[group.sample];
        const answers = sample ? sample.answers.flatMap((answer) => answer.sequences.flatMap((one) => one.parts.map((part) => part.pieces.join("")))) : [];
        cache.set(group, [context.prompt(group), ...answers].join("\n"));
      }
      return cache.get(group);
    }

    function draw() {
      fitting = mrl.filter.fitting(form, groups, texts);
      shown = 0;
      list.replaceChildren();
      const kept = fitting.length === 1 ? "1 group" : `${fitting.length.toLocaleString("en")} groups`;
      count.textContent = `${kept} of ${groups.length.toLocaleString("en")} in the page`;
      draw_history();
      extend();
    }

    function extend() {
      for (const group of fitting.slice(shown, shown + PAGE)) list.append(mrl.group.row(group, context));
      shown = Math.min(fitting.length, shown + PAGE);
      more.hidden = shown >= fitting.length;
      more.textContent = `Show ${Math.min(PAGE, fitting.length - shown)} more`;
    }

    function follow(problem) {
      form.reset();
      setTimeout(() => {
        form.dataset.problem = problem;
        form.elements.order.value = "oldest first";
        draw();
        history.scrollIntoView({ block: "nearest" });
      });
    }

    /* Mean reward of one problem over the steps. */
    function draw_history() {
      history.replaceChildren();
      if (form.dataset.problem === undefined) return;
      const problem = Number(form.dataset.problem);
      const its = groups.filter((group) => group.problem === problem && group.mean !== null);
      const everything = mrl.element("button", { type: "button", class: "link" }, "Show all problems");
      everything.addEventListener("click", () => form.reset());
      history.append(mrl.put(mrl.element("h3"), `Problem ${data.problems[problem][0]}: ${mrl.line(data.problems[problem][1], 90)}`), everything);
      if (its.length < 2) return;
      const curve = { label: "mean reward", values: its.map((group) => group.mean) };
      const meaning = "Mean reward of the groups of this problem that are in the page.";
      history.append(mrl.charts.grid([{ title: "Reward of this problem", unit: "", meaning, steps: its.map((group) => group.step), curves: [curve], smooth: [], band: null, markers: true }], { apart: true }));
    }

    modes.addEventListener("change", () => {
      legend.textContent = mrl.tokens.modes[modes.value];
      for (const button of list.querySelectorAll('button[aria-expanded="true"]')) { button.click(); button.click(); }
    });
    more.addEventListener("click", extend);
    const coloured = mrl.element("div", { class: "coloured" }, mrl.element("label", {}, "Colour tokens by ", modes), legend);
    const filter = mrl.element("details", { class: "filter-box" }, mrl.element("summary", {}, "Filter"), form);
    filter.open = matchMedia("(min-width: 48rem)").matches;
    place.replaceChildren(problems(data, context), filter, history, coloured, count, list, more);
    draw();
  }

  /* Table of the problems: those without any signal first. */
  function problems(data, context) {
    const never = data.history.filter((row) => row.with_signal === 0);
    const wrong = never.filter((row) => row.last !== null && row.last <= context.range.low);
    const count = (value) => value.toLocaleString("en");
    const found = never.length ? `${count(never.length)} never had signal, ${count(wrong.length)} of them with the lowest reward` : "all had signal at least once";
    const summary = mrl.element("summary", {}, `Problems: ${count(data.all_problems)}; ${found}`);
    const box = mrl.element("details", { class: "more" }, summary);
    box.addEventListener("toggle", () => {
      if (!box.open || box.childElementCount > 1) return;
      const names = ["Problem", "Groups", "With signal", "First reward", "Last reward", "Prompt"];
      const head = names.map((name, at) => mrl.element("th", { scope: "col", class: at > 0 && at < 5 ? "figure" : "" }, name));
      const rows = data.history.slice(0, 500).map((row) => {
        const [digest, prompt] = data.problems[row.problem];
        const open = mrl.element("button", { type: "button", class: "link" }, digest);
        open.addEventListener("click", () => context.follow(row.problem));
        const numbers = [row.groups, row.with_signal, mrl.number(row.first), mrl.number(row.last)];
        return mrl.element("tr", {}, mrl.element("td", {}, open), ...numbers.map((value) => mrl.element("td", { class: "figure" }, String(value))), mrl.put(mrl.element("td", { class: "wide", dir: "auto" }), mrl.line(prompt, 90)));
      });
      const table = mrl.element("table", {}, mrl.element("thead", {}, mrl.element("tr", {}, ...head)), mrl.element("tbody", {}, ...rows));
      box.append(mrl.element("div", { class: "scroll tall", tabindex: 0, role: "region", "aria-label": "Problems" }, table));
    });
    return box;
  }

  return { show };
})();
