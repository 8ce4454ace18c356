"use strict";
/* Text of models and environments: characters that hide or reorder others are shown as escapes. */
mrl.hidden =
  /[\u0000-\u0008\u000b-\u001f\u007f-\u009f\u061c\u200b-\u200f\u2028-\u202e\u2060-\u2069\ufeff\ufff9-\ufffb]|[\ud800-\udbff](?![\udc00-\udfff])|(?<![\ud800-\udbff])[\udc00-\udfff]|\udb40[\udc00-\udc7f]/g;

/* Append a text to a node. */
mrl.put = (node, text) => {
  let at = 0;
  for (const found of text.matchAll(mrl.hidden)) {
    if (found.index > at) node.append(text.slice(at, found.index));
    node.append(mrl.element("span", { class: "escape" }, `\\u{${found[0].codePointAt(0).toString(16)}}`));
    at = found.index + found[0].length;
  }
  if (at < text.length) node.append(text.slice(at));
  return node;
};

/* One line of a long text. */
mrl.line = (text, most) => {
  const flat = text.replace(/\s+/g, " ").trim();
  return flat.length > most ? `${flat.slice(0, most - 1)}…` : flat;
};

/* Tokens of an answer, coloured by one of `modes`. */
mrl.tokens = (() => {
  const modes = {
    advantage: "Trained tokens, blue where the advantage is positive and orange where it is negative.",
    difference: "Blue: the trainer finds the token likelier than the engine did; orange: less likely. Full at 0.5 nats.",
    surprise: "The darker, the less likely the token was when it was sampled. Full at 8 nats.",
    version: "The darker, the newer the policy that sampled the token, within the group.",
    mask: "Tokens that are trained on.",
    none: "",
  };
  const FULL_DIFFERENCE = 0.5;
  const FULL_SURPRISE = 8;

  /* Values of runs [value, length], one per token. */
  function spread(runs) {
    return runs.flatMap(([value, count]) => Array(count).fill(value));
  }

  /* Strength from -1 (orange) to 1 (blue) of each token of a part. */
  function strengths(part, mode, answer) {
    const trained = spread(part.trained);
    const versions = spread(part.versions);
    return part.pieces.map((piece, at) => {
      if (mode === "advantage") return trained[at] ? answer.advantage / answer.largest : 0;
      if (mode === "mask") return trained[at] ? 0.5 : 0;
      if (mode === "difference") return (part.differences[at] || 0) / FULL_DIFFERENCE;
      if (mode === "surprise") return part.logprobs.length && versions[at] >= 0 ? part.logprobs[at] / FULL_SURPRISE : 0;
      if (mode === "version") {
        const [low, high] = answer.versions;
        return versions[at] < 0 ? 0 : high === low ? 0.4 : 0.15 + (0.7 * (versions[at] - low)) / (high - low);
      }
      return 0;
    });
  }

  function said(part, at) {
    const versions = spread(part.versions);
    const texts = [`token ${part.tokens[at]}`];
    if (versions[at] >= 0 && part.logprobs.length) texts.push(`log-prob ${part.logprobs[at] ?? "not finite"}`);
    const difference = part.differences[at];
    if (difference !== undefined && difference !== null) texts.push(`trainer ${difference >= 0 ? "+" : "−"}${Math.abs(difference)}`);
    if (versions[at] >= 0) texts.push(`version ${versions[at]}`);
    if (!spread(part.trained)[at]) texts.push("not trained on");
    return texts.join(", ");
  }

  /* Text of a part; tokens say more of themselves under the pointer. */
  function show(part, mode, answer) {
    const box = mrl.element("div", { class: `tokens part-${part.kind}`, dir: "auto" });
    const strong = strengths(part, mode, answer);
    part.pieces.forEach((piece, at) => {
      const token = mrl.put(mrl.element("span"), piece);
      token.dataset.at = at;
      const share = Math.max(-1, Math.min(1, strong[at]));
      if (Math.abs(share) > 0.02) {
        const color = share > 0 ? "--c0" : "--c1";
        token.style.backgroundColor = `color-mix(in srgb, var(${color}) ${Math.round(Math.abs(share) * 42)}%, transparent)`;
      }
      box.append(token);
    });
    box.addEventListener("pointerover", (event) => {
      const token = event.target.closest("[data-at]");
      if (token && !token.title) token.title = said(part, Number(token.dataset.at));
    });
    return box;
  }

  return { modes, show };
})();
