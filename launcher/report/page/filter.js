"use strict";
/* Selection of groups: fields of a form, and the groups that fit. */
mrl.filter = (() => {
  const orders = {
    "newest first": (a, b) => b.step - a.step || a.ordinal - b.ordinal,
    "oldest first": (a, b) => a.step - b.step || a.ordinal - b.ordinal,
    "lowest reward": (a, b) => (a.mean ?? 9e9) - (b.mean ?? 9e9) || b.step - a.step,
    "highest reward": (a, b) => (b.mean ?? -9e9) - (a.mean ?? -9e9) || b.step - a.step,
    "longest answers": (a, b) => b.length - a.length,
  };

  function field(label, input) {
    return mrl.element("label", {}, mrl.element("span", {}, label), input);
  }

  function number(name, hint, step) {
    return mrl.element("input", { name, type: "number", step, placeholder: hint, inputmode: "decimal" });
  }

  function select(name, options) {
    const box = mrl.element("select", { name });
    for (const [value, label] of options) box.append(mrl.put(mrl.element("option", { value }), label));
    return box;
  }

  function pair(label, low, high) {
    low.setAttribute("aria-label", `${label} from`);
    high.setAttribute("aria-label", `${label} to`);
    return mrl.element("div", { class: "pair", role: "group", "aria-label": label }, mrl.element("span", {}, label), low, high);
  }

  /* Form for the groups of a page; `changed` is called after each change. */
  function form(groups, names, changed) {
    const known = (of) => [...new Set(groups.flatMap(of))].sort((a, b) => a - b);
    const environments = known((group) => [group.environment]);
    const reasons = known((group) => group.reasons);
    const any = [["", "any"]];
    const box = mrl.element("form", { class: "filter", role: "search", "aria-label": "Filter of the groups" });
    box.append(
      pair("Steps", number("first", "from", 1), number("last", "to", 1)),
      pair("Mean reward", number("low", "from", "any"), number("high", "to", "any")),
      field("Signal", select("signal", [...any, ["yes", "rewards differ"], ["no", "all rewards equal"], ["passed", "not trained on"]])),
      field("An answer ended by", select("reason", [...any, ...reasons.map((at) => [at, names[at]])])),
      field("An answer of at least", number("least", "tokens", 1)),
    );
    if (environments.length > 1) {
      box.append(field("Environment", select("environment", [...any, ...environments.map((at) => [at, names[at] || "main"])])));
    }
    box.append(
      field("Text", mrl.element("input", { name: "text", type: "search", placeholder: "in prompt or answer" })),
      field("Order", select("order", Object.keys(orders).map((name) => [name, name]))),
      mrl.element("label", { class: "check" }, mrl.element("input", { name: "sampled", type: "checkbox" }), mrl.element("span", {}, "with tokens")),
      mrl.element("button", { type: "reset" }, "Clear"),
    );
    let waiting = 0;
    box.addEventListener("input", () => { clearTimeout(waiting); waiting = setTimeout(changed, 120); });
    box.addEventListener("reset", () => setTimeout(() => { delete box.dataset.problem; changed(); }));
    box.addEventListener("submit", (event) => event.preventDefault());
    return box;
  }

  /* Groups that fit the fields of a form, in its order. */
  function fitting(box, groups, texts) {
    const values = Object.fromEntries(new FormData(box));
    const limit = (name, otherwise) => (values[name] === "" || values[name] === undefined ? otherwise : Number(values[name]));
    const first = limit("first", -Infinity);
    const last = limit("last", Infinity);
    const low = limit("low", -Infinity);
    const high = limit("high", Infinity);
    const least = limit("least", 0);
    const wanted = (values.text || "").toLowerCase();
    const problem = box.dataset.problem;
    return groups
      .filter((group) => {
        if (group.step < first || group.step > last) return false;
        if (problem !== undefined && group.problem !== Number(problem)) return false;
        if ((low > -Infinity || high < Infinity) && !(group.mean >= low && group.mean <= high)) return false;
        if (values.signal === "yes" && !group.signal) return false;
        if (values.signal === "no" && group.signal) return false;
        if (values.signal === "passed" && !group.passed) return false;
        if (values.reason && !group.reasons.includes(Number(values.reason))) return false;
        if (values.environment && group.environment !== Number(values.environment)) return false;
        if (values.sampled && group.sample < 0) return false;
        if (least && !group.lengths.some((length) => length >= least)) return false;
        return !wanted || texts(group).toLowerCase().includes(wanted);
      })
      .sort(orders[values.order] || orders["newest first"]);
  }

  return { form, fitting };
})();
