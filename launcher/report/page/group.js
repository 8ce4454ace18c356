"use strict";
/* One group: its row in the list, and its answers beside one another. */
mrl.group = (() => {
  /* Squares of the rewards of a group, from the lowest of the page to the highest. */
  function strip(group, range) {
    const shown = group.rewards.slice(0, 32);
    const picture = mrl.svg("svg", { class: "strip", viewBox: `0 0 ${Math.max(1, shown.length) * 10} 10`, "aria-hidden": "true" });
    picture.style.width = `${Math.max(1, shown.length) * 0.62}rem`;
    shown.forEach((reward, at) => {
      const share = range.high > range.low ? (reward - range.low) / (range.high - range.low) : 0.5;
      const square = mrl.svg("rect", { x: at * 10, width: 8.6, height: 10, rx: 2 });
      square.style.fill = `color-mix(in srgb, var(--c0) ${Math.round(8 + 92 * share)}%, var(--track))`;
      picture.append(square);
    });
    return picture;
  }

  function row(group, context) {
    const reasons = {};
    for (const at of group.reasons) reasons[context.names[at]] = (reasons[context.names[at]] || 0) + 1;
    const ended = Object.entries(reasons).map(([name, count]) => (count === group.reasons.length ? name : `${count} ${name}`));
    const notes = [];
    if (group.lost) notes.push(`${group.lost} lost`);
    if (group.passed) notes.push(group.passed);
    const cells = [
      mrl.element("span", { class: "step" }, `step ${group.step.toLocaleString("en")}`),
      mrl.put(mrl.element("span", { class: "prompt", dir: "auto" }), mrl.line(context.prompt(group), 150)),
      strip(group, context.range),
      mrl.element("span", { class: "figure mean" }, group.mean === null ? "–" : `reward ${mrl.short(group.mean)}`),
      mrl.element("span", { class: "figure tokens-mean" }, `${Math.round(group.length).toLocaleString("en")} tokens`),
      mrl.put(mrl.element("span", { class: "ended" }), ended.join(", ") + (notes.length ? `; ${notes.join("; ")}` : "")),
    ];
    const button = mrl.element("button", { type: "button", class: group.signal ? "group signal" : "group", "aria-expanded": "false" }, ...cells);
    const item = mrl.element("li", {}, button);
    button.addEventListener("click", () => {
      const open = button.getAttribute("aria-expanded") === "true";
      button.setAttribute("aria-expanded", String(!open));
      if (open) item.querySelector(".detail-box").remove();
      else item.append(detail(group, context));
    });
    return item;
  }

  function detail(group, context) {
    const box = mrl.element("div", { class: "detail-box" });
    const environment = context.names[group.environment];
    const [low, high] = group.versions;
    const facts = [`prompt ${group.ordinal}`, `problem ${context.problems[group.problem][0]}`];
    if (environment) facts.push(environment);
    if (high >= 0) facts.push(low === high ? `policy version ${high}` : `policy versions ${low} to ${high}`);
    facts.push(group.signal ? "rewards differ" : "no signal: all rewards are equal");
    const again = mrl.element("button", { type: "button", class: "link" }, "Same problem over the steps");
    again.addEventListener("click", () => context.follow(group.problem));
    box.append(mrl.put(mrl.element("p", { class: "hint" }), facts.join(", ")), again);
    const sample = group.sample < 0 ? null : context.samples[group.sample];
    const command = `${context.command} --step ${group.step} --problem ${context.problems[group.problem][0]}`;
    if (!sample) {
      box.append(mrl.put(mrl.element("p", { class: "prompt-text", dir: "auto" }), context.prompt(group)));
      box.append(numbers(group, context.names));
      box.append(mrl.element("p", { class: "hint" }, "The page has no tokens of this group. If the run sampled it: ", mrl.put(mrl.element("code"), `${command} --json`)));
      return box;
    }
    box.append(mrl.put(mrl.element("p", { class: "prompt-text", dir: "auto" }), sample.prompt));
    const largest = Math.max(1e-9, ...sample.advantages.map(Math.abs));
    const grid = mrl.element("div", { class: "answers" });
    sample.answers.forEach((answer, at) => {
      const facts_of = { advantage: sample.advantages[at], largest, versions: group.versions, reward: group.rewards[at] };
      grid.append(card(answer, at, { ...facts_of, length: group.lengths[at], reason: context.names[group.reasons[at]] }, context.mode()));
    });
    box.append(grid);
    return box;
  }

  function numbers(group, names) {
    const head = ["Answer", "Reward", "Tokens", "Ended by"].map((name) => mrl.element("th", { scope: "col", class: name === "Ended by" ? "" : "figure" }, name));
    const body = group.rewards.map((reward, at) =>
      mrl.element("tr", {}, ...[at + 1, mrl.number(reward), group.lengths[at].toLocaleString("en")].map((text) => mrl.element("td", { class: "figure" }, String(text))), mrl.put(mrl.element("td"), names[group.reasons[at]])),
    );
    const table = mrl.element("table", { class: "numbers" }, mrl.element("thead", {}, mrl.element("tr", {}, ...head)), mrl.element("tbody", {}, ...body));
    return mrl.element("div", { class: "scroll", tabindex: 0, role: "region", "aria-label": "Answers of the group" }, table);
  }

  function card(answer, at, facts, mode) {
    const sign = facts.advantage > 0 ? "up" : facts.advantage < 0 ? "down" : "";
    const advantage = `${facts.advantage > 0 ? "+" : ""}${mrl.short(facts.advantage).replace("-", "−")}`;
    const head = mrl.element("header", {}, mrl.element("strong", {}, `reward ${mrl.number(facts.reward)}`), mrl.element("span", { class: `advantage ${sign}` }, `advantage ${advantage}`), mrl.put(mrl.element("span", { class: "ended" }), `${facts.length.toLocaleString("en")} tokens, ${facts.reason}`));
    const parts = Object.entries(answer.components).map(([name, value]) => `${name} ${mrl.number(value)}`);
    if (answer.tool_calls) parts.push(`${answer.tool_calls} tool calls`);
    const body = mrl.element("div", { class: "answer-text", tabindex: 0, role: "region", "aria-label": `Text of answer ${at + 1}` });
    answer.sequences.forEach((sequence, place) => {
      if (answer.sequences.length > 1) body.append(mrl.element("p", { class: "hint" }, `sequence ${place + 1} of ${answer.sequences.length}`));
      for (const part of sequence.parts) body.append(piece(part, mode, facts));
    });
    if (answer.output) {
      const text = mrl.put(mrl.element("pre"), answer.output);
      body.append(mrl.element("details", {}, mrl.element("summary", {}, "output of the program"), text));
    }
    const box = mrl.element("article", { class: "answer" }, head);
    if (parts.length) box.append(mrl.put(mrl.element("p", { class: "hint" }), parts.join(", ")));
    box.append(body);
    return box;
  }

  /* A part of a sequence: folded unless it is what the model answered. */
  function piece(part, mode, facts) {
    if (part.kind === "left out") return mrl.element("p", { class: "hint" }, `${part.size.toLocaleString("en")} tokens are left out of the page`);
    if (part.kind === "answer") return mrl.tokens.show(part, mode, facts);
    const label = { prompt: "prompt", message: "not written by the model", reasoning: "reasoning" }[part.kind];
    const summary = mrl.element("summary", {}, `${label}, ${part.size.toLocaleString("en")} tokens`);
    const box = mrl.element("details", {}, summary);
    box.addEventListener("toggle", () => { if (box.open && box.childElementCount === 1) box.append(mrl.tokens.show(part, mode, facts)); });
    return box;
  }

  return { row };
})();
